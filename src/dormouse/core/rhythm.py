"""How often a function is asked: a mean of the gaps between its requests that forgets slowly; and all gaps, where a
policy wants to know."""

from dataclasses import dataclass

from dormouse.core.ledger import Histogram
from dormouse.core.types import Ns

UNKNOWN_NS: Ns = 3_600_000_000_000
"""The gap of a function that was asked once or never."""
WEIGHT = 8
"""A new gap moves the mean by an eighth."""
KEEP_ALIVE_PPM = 990_000


@dataclass(slots=True)
class Rhythm:
    last_ns: Ns = -1
    mean_gap_ns: Ns = 0
    gaps: Histogram | None = None
    """None: nobody wants to know."""

    def asked(self, now: Ns) -> None:
        if self.last_ns >= 0:
            gap_ns = now - self.last_ns
            self.mean_gap_ns = (
                gap_ns if not self.mean_gap_ns else self.mean_gap_ns + (gap_ns - self.mean_gap_ns) // WEIGHT
            )
            if self.gaps is not None:
                self.gaps.add(gap_ns)
        self.last_ns = now

    def gap_ns(self, now: Ns) -> Ns:
        """What to expect; a silence that is longer than usual counts as the gap it already is. Never 0."""
        if not self.mean_gap_ns:
            return UNKNOWN_NS
        return max(1, self.mean_gap_ns, now - self.last_ns)

    def is_over(self, now: Ns) -> bool:
        """Whether it has been silent for longer than nearly all gaps were; never while no gap is known."""
        if self.gaps is None or not self.gaps.count:
            return False
        return now - self.last_ns > self.gaps.percentile(KEEP_ALIVE_PPM)
