"""A lane: one thread that does what it is given, in order."""

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable

CRASHED = 70
"""Exit status after a bug in a lane. The parent starts a new process; half a lane would only look alive."""


class Lane:
    """Starts its thread at once."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def finish(self) -> None:
        """Do what was put before, then end; returns when it has ended."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(CRASHED)
