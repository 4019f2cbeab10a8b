"""How functions were served over the last minutes, a point for every few seconds. Pure: who calls it tells the time.

It keeps what each ledger said when the last point was taken; the next point is what has been added since. A function
that nobody asked costs a comparison, and one place in a ring.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dormouse.core.ledger import Histogram, Ledger
from dormouse.core.types import Ns
from dormouse.watch.picture import Point

POINTS = 60
BUCKET_NS: Ns = 5_000_000_000
RATE_POINTS = 2
"""Over so many points back goes a rate of now."""
P98_PPM = 980_000
_SECOND_NS = 1_000_000_000


@dataclass(slots=True)
class _Seen:
    """One function: its points, and what its ledger said at the last one."""

    points: deque[Point | None] = field(default_factory=lambda: deque(maxlen=POINTS))
    counts: tuple[int, int] = (0, 0)
    buckets: dict[int, int] = field(default_factory=dict)


class History:
    """Points of every function, all taken at the same times."""

    def __init__(self) -> None:
        self.bucket = 0
        """The number of the last point, from 1."""
        self._seen: dict[str, _Seen] = {}

    def take(self, ledgers: Iterable[tuple[str, Ledger]]) -> None:
        """The next point of every function that there is; others are forgotten."""
        before, self._seen = self._seen, {}
        for name, ledger in ledgers:
            seen = self._seen[name] = before.get(name) or _Seen()
            _take(seen, ledger)
        self.bucket += 1

    def of(self, name: str) -> tuple[Point | None, ...]:
        """Oldest first; the last is number ``bucket``. Shorter for a function that has come later."""
        seen = self._seen.get(name)
        return () if seen is None else tuple(seen.points)

    def rate_per_s(self, name: str) -> float:
        """Requests that ended lately."""
        seen = self._seen.get(name)
        if seen is None or not seen.points:
            return 0.0
        last = [seen.points[-1 - back] for back in range(min(RATE_POINTS, len(seen.points)))]
        ended = sum(point.requests for point in last if point is not None)
        return ended * _SECOND_NS / (len(last) * BUCKET_NS)


def _take(seen: _Seen, ledger: Ledger) -> None:
    counts = (ledger.requests, ledger.in_time)
    if counts == seen.counts:
        seen.points.append(None)
        return
    buckets = merged(ledger).buckets
    if counts[0] < seen.counts[0]:  # another revision has taken the name
        seen.counts, seen.buckets = (0, 0), {}
    fresh = Histogram()
    for bucket, count in buckets.items():
        if count > (known := seen.buckets.get(bucket, 0)):
            fresh.buckets[bucket] = count - known
            fresh.count += count - known
    requests, in_time = (now - then for now, then in zip(counts, seen.counts, strict=True))
    seen.points.append(Point(round(fresh.percentile(P98_PPM) / 1e6, 2), fresh.count, requests, max(0, in_time)))
    seen.counts, seen.buckets = counts, buckets


def merged(ledger: Ledger) -> Histogram:
    """All answers of a function, by whatever path."""
    together = Histogram()
    for histogram in ledger.latency.values():
        together.merge(histogram)
    return together
