"""What goes wrong on a copy lane: faults injected by tests, and copies whose failure nobody has been told of.

Injected faults are words such as ``copy:3`` (the third copy fails) or ``map:1``; the call that fails is a call of
the Device contract. Nothing is injected unless a device is constructed with such words.
"""

import threading
from collections import Counter
from collections.abc import Iterable

from dormouse.errors import ConfigurationFault, DeviceError

CALLS = ("reserve", "map", "unmap", "copy", "register", "peer-copy", "adopt")
"""Calls of a device that can be made to fail. Words about anything else are for somebody else."""


class Faults:
    """Counts calls, and fails those that the words name."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        self._planned: set[tuple[str, int]] = set()
        self._calls: Counter[str] = Counter()
        for word in words:
            call, _, number = word.partition(":")
            if call in CALLS:
                if not number.isdecimal():
                    raise ConfigurationFault(f"fault {word!r} cannot be injected; expected a call and a number: copy:3")
                self._planned.add((call, int(number)))

    def strike(self, call: str) -> None:
        """Count one call. Raises DeviceError if this is the one to fail."""
        if not self._planned:
            return
        self._calls[call] += 1
        if (call, self._calls[call]) in self._planned:
            raise DeviceError(call, "INJECTED", f"call {self._calls[call]}")


class FailedCopies:
    """Copies are numbered as they are queued; a fence asks for a failure among those it covers.

    A fence covers every copy queued before it, except failures that had been reported when it was made: so each
    fence of a broken load raises, and the load after it starts clean.
    """

    def __init__(self) -> None:
        self._failures: list[tuple[int, DeviceError]] = []
        self._reported = 0
        self._queued = 0
        self._lock = threading.Lock()

    def number(self) -> int:
        """The number of a copy that is being queued."""
        self._queued += 1
        return self._queued

    @property
    def last(self) -> int:
        """The number of the copy that was queued last; 0 before the first."""
        return self._queued

    def covered(self) -> range:
        """The copies that a fence made now answers for."""
        with self._lock:
            return range(self._reported + 1, self._queued + 1)

    def record(self, copy: int, failure: DeviceError) -> None:
        with self._lock:
            self._failures.append((copy, failure))

    def report(self, covered: range) -> None:
        """Raises DeviceError for the first failed copy in ``covered``."""
        if not self._failures:
            return
        with self._lock:
            failed = [(copy, failure) for copy, failure in self._failures if copy in covered]
            self._reported = max([self._reported, *(copy for copy, _ in failed)])
        for _, failure in failed:
            raise DeviceError("copy", failure.code, str(failure))
