"""Where the importer runs: a process of its own for each import, because it needs torch and reads files that nobody
has checked yet.

The processes are forked from a server that has torch loaded already, so that a deploy does not wait seconds for it.
This file itself imports no torch: it is what the control process sees of the importer.
"""

import importlib
import multiprocessing
import os
import socket
import threading

IMPORTER = "dormouse.model.importing"
DIED = 1


class ImportProcess:
    """A process that takes one request, says its answer and ends. If it dies, or is killed, it says nothing."""

    def __init__(self, request: bytes) -> None:
        """Start it. The first one is started in seconds, while torch is loaded."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", IMPORTER])
        self.answers, theirs = socket.socketpair()
        """Gives the whole answer, then ends. If it is closed before, the process ends too."""
        with theirs:
            self._process = context.Process(target=_answer, args=(theirs, request), daemon=True)
            self._process.start()

    def end(self) -> None:
        """Kill it if it has not ended by itself, and wait until it has."""
        self._process.kill()
        self._process.join()
        self._process.close()


def _answer(connection: socket.socket, request: bytes) -> None:
    """Run in that process: one JSON request in, one JSON answer out."""
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    answered: bytes = importlib.import_module(IMPORTER).answered_bytes(request)
    connection.sendall(answered)


def _end_with(connection: socket.socket) -> None:
    """End when the control process is gone, or wants no answer any more, however long the import would yet take."""
    connection.recv(1)
    os._exit(DIED)
