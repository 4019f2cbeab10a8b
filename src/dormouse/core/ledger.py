"""What each function cost and how well it was served.

Counts and integer histograms only, so a ledger is as exact after a year as after a minute and never grows.
"""

from collections import Counter
from dataclasses import dataclass, field, fields

from dormouse.core.types import Bytes, Ns, Path, Reason, Slo

PPM = 1_000_000


class Histogram:
    """Durations in buckets 6 % wide: exact counts, percentiles within one bucket."""

    __slots__ = ("buckets", "count", "total_ns")

    def __init__(self) -> None:
        self.buckets: dict[int, int] = {}
        self.count = 0
        self.total_ns: Ns = 0

    def add(self, duration_ns: Ns) -> None:
        bucket = bucket_of(duration_ns)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1
        self.total_ns += duration_ns

    def merge(self, other: "Histogram") -> None:
        """Add all of another one's durations."""
        for bucket, number in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + number
        self.count += other.count
        self.total_ns += other.total_ns

    def percentile(self, share_ppm: int) -> Ns:
        """The upper edge of the bucket that holds the given share of all durations; 0 when there are none."""
        rank = -(-self.count * share_ppm // PPM)
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                return upper_edge(bucket)
        return 0


def bucket_of(duration_ns: Ns) -> int:
    """Four bits below the leading one select among sixteen buckets of each power of two."""
    shift = max(duration_ns.bit_length() - 5, 0)
    return shift * 32 + (duration_ns >> shift)


def lower_edge(bucket: int) -> Ns:
    shift, top = divmod(bucket, 32)
    return top << shift


def upper_edge(bucket: int) -> Ns:
    shift, top = divmod(bucket, 32)
    return ((top + 1) << shift) - 1


@dataclass(slots=True)
class Ledger:
    """One function's account since it was deployed or the server started."""

    latency: dict[Path, Histogram] = field(default_factory=dict)
    loads: Counter[Path] = field(default_factory=Counter)
    refusals: Counter[Reason] = field(default_factory=Counter)
    in_time: int = 0
    missed: int = 0
    cancelled: int = 0
    evictions: int = 0
    loaded_bytes: Bytes = 0
    unaccounted_bytes: Bytes = 0
    device_ns: Ns = 0
    resident_ns: Ns = 0
    reads: int = 0
    """From disk to host memory, those of its deploy and of restarts too."""
    read_bytes: Bytes = 0
    promotions_used: int = 0
    """Reads ahead of a request that then came while the image was still in host memory."""
    promotions_unused: int = 0
    queued_ns: Ns = 0
    """How long the requests that were answered had waited before they went to a device."""
    refused_ns: Ns = 0
    executions: int = 0
    """Runs that came to an end; each answers one request or a batch."""
    last_answer_ns: Ns | None = None
    guests: "dict[str, Ledger]" = field(default_factory=dict)
    """Answers and refusals of tenants that are not the function's owner, by tenant; they are in this account, too."""

    def answered(self, path: Path, latency_ns: Ns, device_ns: Ns, *, in_time: bool, guest: str | None = None) -> None:
        histogram = self.latency.get(path)
        if histogram is None:
            histogram = self.latency[path] = Histogram()
        histogram.add(latency_ns)
        self.device_ns += device_ns
        self.in_time += in_time
        self.missed += not in_time
        if guest is not None:
            self.of_guest(guest).answered(path, latency_ns, device_ns, in_time=in_time)

    def refused(self, reason: Reason, after_ns: Ns = 0, guest: str | None = None) -> None:
        """A request that ends without an answer has missed its deadline, whoever's fault it was."""
        self.refusals[reason] += 1
        self.refused_ns += after_ns
        self.missed += 1
        if guest is not None:
            self.of_guest(guest).refused(reason, after_ns)

    def of_guest(self, tenant: str) -> "Ledger":
        """The part of a tenant that is not the owner."""
        ledger = self.guests.get(tenant)
        if ledger is None:
            ledger = self.guests[tenant] = Ledger()
        return ledger

    def loaded(self, path: Path, size_bytes: Bytes) -> None:
        self.loads[path] += 1
        self.loaded_bytes += size_bytes

    def evicted(self, resident_ns: Ns) -> None:
        self.evictions += 1
        self.resident_ns += resident_ns

    def read(self, size_bytes: Bytes) -> None:
        self.reads += 1
        self.read_bytes += size_bytes

    def merge(self, other: "Ledger") -> None:
        """Add all that is in another one."""
        for path, histogram in other.latency.items():
            self.latency.setdefault(path, Histogram()).merge(histogram)
        self.loads.update(other.loads)
        self.refusals.update(other.refusals)
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for tenant, ledger in other.guests.items():
            self.of_guest(tenant).merge(ledger)
        if other.last_answer_ns is not None:
            self.last_answer_ns = max(self.last_answer_ns or 0, other.last_answer_ns)

    @property
    def requests(self) -> int:
        """Requests that have ended, cancelled ones left out."""
        return self.in_time + self.missed

    def compliant(self, slo: Slo) -> bool:
        """Whether the promised share of all requests so far was in time; a function never asked is compliant."""
        return self.in_time * PPM >= self.requests * slo.share_ppm

    def mean_device_ns(self) -> Ns:
        answers = sum(histogram.count for histogram in self.latency.values())
        return self.device_ns // answers if answers else 0


_COUNTS = tuple(each.name for each in fields(Ledger) if each.default == 0)
"""What adds up as it is."""
