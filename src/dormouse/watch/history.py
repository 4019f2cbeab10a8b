"""How functions were served over the last minutes, a point for every few seconds. Pure: who calls it tells the time.

It keeps what each ledger said when the last point was taken; the next point is what has been added since. A function
that nobody asked costs a comparison, and one place in a ring.
"""

from collections import deque
from collections.abc import Iterable, Iterator
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
        self._rates: dict[str, float] = {}

    def take(self, ledgers: Iterable[tuple[str, Ledger]]) -> None:
        """The next point of every function that there is; others are forgotten."""
        for _ in self.taking(ledgers):
            pass

    def taking(self, ledgers: Iterable[tuple[str, Ledger]], at_once: int = 32) -> Iterator[None]:
        """The same a little at a time: with pauses after so many functions that were asked. Points show at the end."""
        fresh: dict[str, tuple[_Seen, Point | None]] = {}
        worked_out = 0
        for name, ledger in ledgers:
            seen = self._seen.get(name) or _Seen()
            fresh[name] = (seen, point := _point(seen, ledger))
            worked_out += point is not None
            if worked_out == at_once:
                worked_out = 0
                yield
        for seen, point in fresh.values():
            seen.points.append(point)
        self._seen = {name: seen for name, (seen, _) in fresh.items()}
        self._rates = {name: _rate_per_s(seen) for name, seen in self._seen.items()}
        self.bucket += 1

    def of(self, name: str) -> tuple[Point | None, ...]:
        """Oldest first; the last is number ``bucket``. Shorter for a function that has come later."""
        seen = self._seen.get(name)
        return () if seen is None else tuple(seen.points)

    def rate_per_s(self, name: str) -> float:
        """Requests that ended lately."""
        return self._rates.get(name, 0.0)


def _rate_per_s(seen: _Seen) -> float:
    last = [seen.points[-1 - back] for back in range(min(RATE_POINTS, len(seen.points)))]
    ended = sum([point.requests for point in last if point is not None])
    return ended * _SECOND_NS / (len(last) * BUCKET_NS)


def _point(seen: _Seen, ledger: Ledger) -> Point | None:
    """Of what the ledger has counted since the last one; None: nothing."""
    counts = (ledger.requests, ledger.in_time)
    if counts == seen.counts:
        return None
    buckets = merged(ledger).buckets
    if counts[0] < seen.counts[0]:  # another revision has taken the name
        seen.counts, seen.buckets = (0, 0), {}
    fresh = Histogram()
    for bucket, count in buckets.items():
        if count > (known := seen.buckets.get(bucket, 0)):
            fresh.buckets[bucket] = count - known
            fresh.count += count - known
    requests, in_time = (now - then for now, then in zip(counts, seen.counts, strict=True))
    seen.counts, seen.buckets = counts, buckets
    return Point(round(fresh.percentile(P98_PPM) / 1e6, 2), fresh.count, requests, max(0, in_time))


def merged(ledger: Ledger) -> Histogram:
    """All answers of a function, by whatever path."""
    together = Histogram()
    for histogram in ledger.latency.values():
        together.merge(histogram)
    return together
