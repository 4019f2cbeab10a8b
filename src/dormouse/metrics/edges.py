"""The edges of Prometheus' histograms, and counts at them that are exact although the core keeps buckets of its own.

The rule: an edge is the last nanosecond of one of the core's buckets. Durations are whole nanoseconds, so every bucket
lies wholly below an edge or wholly above it, and what is counted at an edge is exactly what was not longer. The core
has sixteen buckets for each power of two, and each of the edges here, a nanosecond short of a power of two, ends one.
"""

from bisect import bisect_left
from itertools import accumulate

from dormouse.core.ledger import Histogram, bucket_of, upper_edge
from dormouse.core.types import Ns

SHORTEST, LONGEST = 18, 36
"""Powers of two of nanoseconds: from a quarter of a millisecond to a minute."""
EDGES: tuple[Ns, ...] = tuple(2**power - 1 for power in range(SHORTEST, LONGEST + 1))
"""Each holds what took up to so long; what took longer is in the last bucket, which has no edge."""
SECONDS: tuple[str, ...] = (*(f"{edge // 10**9}.{edge % 10**9:09d}" for edge in EDGES), "+Inf")
"""The same as Prometheus writes them: exact, in seconds."""

_UPPER = [upper_edge(bucket) for bucket in range(bucket_of(2**62))]
_PLACES = [bisect_left(EDGES, edge) for edge in _UPPER]
"""By bucket of the core: the first edge that is not before its end."""
assert all(upper_edge(bucket_of(edge)) == edge for edge in EDGES), "an edge within a bucket would be inexact"


def counted(histogram: Histogram) -> list[int]:
    """How many durations lie between one edge and the next, the last number being of those behind all edges."""
    counts = [0] * len(SECONDS)
    for bucket, number in histogram.buckets.items():
        counts[_PLACES[bucket]] += number
    return counts


def cumulated(histogram: Histogram, less: Histogram | None = None) -> list[int]:
    """How many durations were not longer than each edge, and how many there are; ``less`` those of another one."""
    counts = counted(histogram)
    if less is not None:
        counts = [all_of_them - others for all_of_them, others in zip(counts, counted(less), strict=True)]
    return list(accumulate(counts))
