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
    _total: Sums = field(default_factory=Sums)
    _parts: dict[int, Sums] = field(default_factory=dict)
    _part: Sums = field(default_factory=Sums)
    """The one that counts now; it ends at ``_ends_ns``."""
    _ends_ns: Ns = 0

    def ended(self, now: Ns, latency_ns: Ns, *, in_time: bool) -> None:
        """A request was answered or refused."""
        if self.window_ns:
            if now >= self._ends_ns:
                self._turn(now)
            part = self._part
            part.requests += 1
            part.in_time += in_time
            part.latency_ns += latency_ns
        total = self._total
        total.requests += 1
        total.in_time += in_time
        total.latency_ns += latency_ns

    def sums(self, now: Ns) -> Sums:
        """Of the window that ends now."""
        if self.window_ns and now >= self._ends_ns:
            self._turn(now)
        return self._total

    def _turn(self, now: Ns) -> None:
        """Begin the next part, and forget those that the window has left behind."""
        number = now * PARTS // self.window_ns
        self._ends_ns = -(-(number + 1) * self.window_ns // PARTS)
        for old in [part for part in self._parts if part <= number - PARTS]:
            gone = self._parts.pop(old)
            self._total.requests -= gone.requests
            self._total.in_time -= gone.in_time
            self._total.latency_ns -= gone.latency_ns
        self._part = self._parts[number] = Sums()
