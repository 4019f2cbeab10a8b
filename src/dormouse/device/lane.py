"""The copy lane of a device without streams: one thread that does what it is given, in order.

Knows no regions: work is a callable. A limit on bytes per second makes it behave like a slower link.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dormouse.core.types import Bytes
from dormouse.device.faults import FailedCopies
from dormouse.errors import DeviceError

_BILLION = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Copy:
    number: int
    work: Callable[[], object]
    size_bytes: Bytes
    queued_ns: int


class LaneFence:
    """A point in the lane. There are no streams to hold back, so waiting is always the caller's."""

    def __init__(self, failed: FailedCopies) -> None:
        self._failed = failed
        self._covered = failed.covered()
        self._passed = threading.Event()

    def wait(self, stream: int) -> None:
        del stream  # there is none to hold back
        self.synchronize()

    def synchronize(self) -> None:
        self._passed.wait()
        self._failed.report(self._covered)

    def drain(self) -> None:
        """Block until the point is reached, whatever became of the copies before it."""
        self._passed.wait()

    def reached(self) -> None:
        """Called by the lane alone."""
        self._passed.set()


class CopyLane:
    """Starts its thread at once; ``stop`` ends it after everything queued before."""

    def __init__(self, name: str, bytes_per_s: int | None = None) -> None:
        self._queue: queue.SimpleQueue[_Copy | LaneFence | None] = queue.SimpleQueue()
        self._bytes_per_s = bytes_per_s
        self._link_free_ns = 0
        self._failed = FailedCopies()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def copy(self, work: Callable[[], object], size_bytes: Bytes) -> None:
        """Queue work that moves ``size_bytes``. What it raises surfaces, as a DeviceError, at the fences after it."""
        self._queue.put(_Copy(self._failed.number(), work, size_bytes, time.monotonic_ns()))

    def fence(self) -> LaneFence:
        fence = LaneFence(self._failed)
        self._queue.put(fence)
        return fence

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, LaneFence):
                item.reached()
            else:
                self._perform(item)

    def _perform(self, copy: _Copy) -> None:
        try:
            copy.work()
        except DeviceError as failure:
            self._failed.record(copy.number, failure)
        except Exception as fault:  # a bug, but one that must not leave everybody waiting for a dead thread
            self._failed.record(copy.number, DeviceError("copy", type(fault).__name__, str(fault)))
        if self._bytes_per_s is not None:
            self._pace(copy, self._bytes_per_s)

    def _pace(self, copy: _Copy, bytes_per_s: int) -> None:
        # A link serves one copy after another: each starts when it was queued or when the one before it was due,
        # whichever is later. Due times, not sleeps, add up, so a late wake-up does not slow the link.
        start_ns = max(self._link_free_ns, copy.queued_ns)
        self._link_free_ns = start_ns + copy.size_bytes * _BILLION // bytes_per_s
        remaining_ns = self._link_free_ns - time.monotonic_ns()
        if remaining_ns > 0:
            time.sleep(remaining_ns / _BILLION)
