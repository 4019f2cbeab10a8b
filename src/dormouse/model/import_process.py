"""Where the importer runs: a process of its own for each import, because it needs torch and reads files that nobody
has checked yet.

The processes are forked from a server that has torch loaded already, so that a deploy does not wait seconds for it.
This file itself imports no torch: it is what the control process sees of the importer.
"""

import importlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

IMPORTER = "dormouse.model.importing"


def process_for_one_import() -> ProcessPoolExecutor:
    """A process that takes one request and ends. If it dies, its future raises BrokenProcessPool and nobody else's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", IMPORTER])
    return ProcessPoolExecutor(max_workers=1, mp_context=context)


def answer(request: bytes) -> bytes:
    """Run in that process: one JSON request in, one JSON answer out."""
    answered: bytes = importlib.import_module(IMPORTER).answered_bytes(request)
    return answered
