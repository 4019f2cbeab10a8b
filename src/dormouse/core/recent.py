"""How a function was served lately: counts over a sliding window, or since the beginning.

The window is cut into parts; when one is over, the oldest is forgotten. So it covers between seven and eight eighths of
its length, and costs the same however many requests there are.
"""

from dataclasses import dataclass, field

from dormouse.core.types import Ns

PARTS = 8


@dataclass(slots=True)
class Sums:
    requests: int = 0
    in_time: int = 0
    latency_ns: Ns = 0

    @property
    def mean_latency_ns(self) -> Ns:
        return self.latency_ns // self.requests if self.requests else 0


@dataclass(slots=True)
class Recent:
    """``window_ns`` 0: nothing is ever forgotten."""

    window_ns: Ns = 0
    _parts: dict[int, Sums] = field(default_factory=dict)
    _total: Sums = field(default_factory=Sums)

    def ended(self, now: Ns, latency_ns: Ns, *, in_time: bool) -> None:
        """A request was answered or refused."""
        self._forget(now)
        for sums in (self._total, self._part(now)) if self.window_ns else (self._total,):
            sums.requests += 1
            sums.in_time += in_time
            sums.latency_ns += latency_ns

    def sums(self, now: Ns) -> Sums:
        """Of the window that ends now."""
        self._forget(now)
        return self._total

    def _part(self, now: Ns) -> Sums:
        return self._parts.setdefault(now * PARTS // self.window_ns, Sums())

    def _forget(self, now: Ns) -> None:
        if not self.window_ns or not self._parts:
            return
        oldest = now * PARTS // self.window_ns - PARTS + 1
        for number in [number for number in self._parts if number < oldest]:
            old = self._parts.pop(number)
            self._total.requests -= old.requests
            self._total.in_time -= old.in_time
            self._total.latency_ns -= old.latency_ns
