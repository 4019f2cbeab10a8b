"""The pauses between a function's requests, as a histogram: bounded, in integers, and it forgets.

A mean says how often a function is asked; a histogram also says that a function asked every minute will not be asked
for another fifty seconds, and then will. Knows nothing of tiers.

It is asked much more often than it changes, so sums from each bucket to the last one are kept until the next pause.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate

from dormouse.core.ledger import PPM, bucket_of, lower_edge, upper_edge
from dormouse.core.types import Ns

MOST = 128
"""With so many pauses all counts are halved: the old ones weigh less, and there are never more buckets."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Buckets in ascending order; and for each how many pauses there are from it on, and how long they are together."""

    buckets: list[int]
    counts: list[int]
    total_ns: list[Ns]


@dataclass(slots=True)
class Intervals:
    buckets: dict[int, int] = field(default_factory=dict)
    count: int = 0
    _sums: _Sums | None = None

    def add(self, pause_ns: Ns) -> None:
        bucket = bucket_of(pause_ns)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1
        self._sums = None
        if self.count >= MOST:
            self.buckets = {bucket: number // 2 for bucket, number in self.buckets.items() if number > 1}
            self.count = sum(self.buckets.values())

    def longer_than(self, idle_ns: Ns) -> "Rest":
        """The pauses that are still possible after so long a silence."""
        sums = self._sums
        if sums is None:
            sums = self._sums = _summed(self.buckets)
        return Rest(sums, bisect_left(sums.buckets, bucket_of(idle_ns)))


def _summed(buckets: dict[int, int]) -> _Sums:
    latest_first = sorted(buckets, reverse=True)
    counts = list(accumulate((buckets[bucket] for bucket in latest_first), initial=0))
    total_ns = list(accumulate((buckets[bucket] * upper_edge(bucket) for bucket in latest_first), initial=0))
    return _Sums(latest_first[::-1], counts[::-1], total_ns[::-1])


@dataclass(frozen=True, slots=True)
class Rest:
    """The longer ones of some pauses."""

    _sums: _Sums
    _first: int

    @property
    def count(self) -> int:
        return self._sums.counts[self._first]

    def mean_ns(self) -> Ns:
        """Of the pauses; there must be one."""
        return self._sums.total_ns[self._first] // self.count

    def no_shorter_than(self, share_ppm: int) -> Ns:
        """The lower edge of the bucket that holds a percentile of the pauses."""
        return lower_edge(self._bucket(share_ppm))

    def no_longer_than(self, share_ppm: int) -> Ns:
        """Its upper edge."""
        return upper_edge(self._bucket(share_ppm))

    def _bucket(self, share_ppm: int) -> int:
        left = self.count - -(-self.count * share_ppm // PPM)
        counts = self._sums.counts
        place = self._first
        while counts[place + 1] > left:
            place += 1
        return self._sums.buckets[place]
