"""When to say that an image has nearly arrived: the rest of its copy takes no longer than a given lead.

Knows fences and bytes, no memory and no module. It says so a group too early rather than too late. It belongs to the
thread that queues the copies and then has nothing to do but wait for them; it wakes a few times on the way, not for
every group, since each time takes the interpreter from whoever computes.
"""

import time
from collections.abc import Callable, Sequence

from dormouse.core.types import FOREVER_NS, Bytes, Ns
from dormouse.executor.arrival import Arrival


class Link:
    """How fast the last whole image came in over a device's copy lane."""

    def __init__(self) -> None:
        self.bytes_per_ns = 0.0
        """0: none has."""


class Approach:
    """Of one image. ``say`` is called once at most; never if the lead is FOREVER_NS, as nobody waits for it then."""

    def __init__(
        self, lead_ns: Ns, link: Link, say: Callable[[], None], clock: Callable[[], Ns] = time.monotonic_ns
    ) -> None:
        self._lead_ns = lead_ns
        self._link = link
        self._say = say
        self._clock = clock
        self._waits = lead_ns < FOREVER_NS
        self._ends: Sequence[Bytes] = ()
        self._began_ns = 0

    def begin(self, ends: Sequence[Bytes]) -> None:
        """The first copy is about to be queued; ``ends`` are those of the groups in the image."""
        self._ends = ends
        self._began_ns = self._clock()

    def hurry(self, busy_ns: Ns = 0) -> None:
        """Before something that takes so long is done instead of following: say it now, if the last image's speed
        makes it due by then."""
        if self._waits and self._link.bytes_per_ns:
            end_ns = self._began_ns + self._ends[-1] / self._link.bytes_per_ns
            if end_ns - self._clock() - busy_ns <= self._lead_ns:
                self._tell()

    def follow(self, arrival: Arrival) -> None:
        """Wait, all copies being queued, until it is time to say it. Raises DeviceError if a copy has failed."""
        speed, done, first = self._link.bytes_per_ns, -1, (0, 0)
        while self._waits:
            due = self._due(speed) if speed else 0
            if due <= done:
                self._tell()
                return
            done = done + (due - done + 1) // 2  # halfway, to learn the speed of this image
            arrival.reach(done)
            now_ns, copied = self._clock(), self._ends[done]
            speed = copied / max(now_ns - self._began_ns, 1)
            if first[1]:
                speed = max(speed, (copied - first[1]) / max(now_ns - first[0], 1))
            else:
                first = (now_ns, copied)

    def end(self) -> None:
        """The whole image is in place."""
        self._link.bytes_per_ns = self._ends[-1] / max(self._clock() - self._began_ns, 1)

    def _due(self, speed: float) -> int:
        """The group with whose arrival it is time: once one more had come, it would be too late. -1: it is time now."""
        total, near = self._ends[-1], self._lead_ns * speed
        return next(group for group, end in enumerate(self._ends, -1) if total - end < near)

    def _tell(self) -> None:
        self._waits = False
        self._say()
