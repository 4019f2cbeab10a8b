"""A lane: one thread that does what it is given, in order; and when there is nothing, what can wait."""

import os
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable

CRASHED = 70
"""Exit status after a bug in a lane. The parent starts a new process; half a lane would only look alive."""


class Lane:
    """Starts its thread at once."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._when_idle: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def put_when_idle(self, work: Callable[[], None]) -> None:
        """To be done when nothing else is there. For the lane's own thread; what is left at the end is not done."""
        self._when_idle.append(work)

    @property
    def busy(self) -> bool:
        """Whether more work waits."""
        return not self._work.empty()

    def finish(self) -> None:
        """Do what was put before, then end; returns when it has ended."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(CRASHED)

    def _next(self) -> Callable[[], None] | None:
        if not self._when_idle:
            return self._work.get()
        try:
            return self._work.get_nowait()
        except queue.Empty:
            return self._when_idle.popleft()
