"""What became of the requests of a run: figures by path and by function, and whether they are worth anything. Pure.

A request's latency counts from when the plan wanted it sent. So one that the generator sent late, because it was busy
or had no connection left, is not counted as a quick one; how late it was is told beside.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from dormouse.core.types import Ns

MS_NS: Ns = 1_000_000
LATE_MS = 10.0
"""From here on a request is sent late."""
MOST_LATE = 0.01
"""The share of late requests beyond which a run says nothing of the server."""
OK = "200"
PERCENTILES = (50, 95, 98, 99)


class Sent(Struct, frozen=True):
    """A request: when it was due, from the start, how much later it was sent, and how long after ``due`` it was
    answered. ``status`` is HTTP's, or ``timeout``, ``connection`` or ``unfinished``."""

    number: int
    due_ns: Ns
    late_ns: Ns
    took_ns: Ns
    status: str
    path: str


class Latency(Struct, frozen=True):
    """In milliseconds."""

    count: int
    p50_ms: float
    p95_ms: float
    p98_ms: float
    p99_ms: float
    max_ms: float


class OfFunction(Struct, frozen=True):
    """How one function was served. ``in_time`` counts answers within the deadline; failures are not in time."""

    name: str
    requests: int
    deadline_ms: float
    percentile: float
    in_time: int
    compliant: bool
    latency: Latency | None


class Generator(Struct, frozen=True):
    """How well the generator kept to the plan."""

    late: int
    late_p50_ms: float
    late_p99_ms: float
    late_max_ms: float
    connections: int
    valid: bool


class Outcome(Struct, frozen=True):
    planned: int
    sent: int
    answered: int
    duration_s: float
    offered_per_s: float
    answered_per_s: float
    interrupted: bool
    latency: Latency | None
    paths: dict[str, Latency]
    errors: dict[str, int]
    functions: list[OfFunction]
    generator: Generator

    @property
    def compliant(self) -> int:
        """Functions inside their SLO."""
        return sum(function.compliant for function in self.functions)


def latency_of(values_ns: Iterable[Ns]) -> Latency | None:
    """Percentiles by nearest rank; nothing of nothing."""
    values = np.fromiter(values_ns, np.float64) / MS_NS
    if not len(values):
        return None
    p50, p95, p98, p99 = (float(each) for each in np.percentile(values, PERCENTILES, method="inverted_cdf"))
    return Latency(len(values), p50, p95, p98, p99, float(values.max()))


def outcome_of(
    sent: Sequence[Sent],
    functions: Sequence[tuple[str, float, float]],
    *,
    planned: int,
    duration_ns: Ns,
    connections: int,
    interrupted: bool = False,
) -> Outcome:
    """``functions``: name, deadline in milliseconds and percentile, by number."""
    answered = [each for each in sent if each.status == OK]
    by_path: dict[str, list[Ns]] = {}
    for each in answered:
        by_path.setdefault(each.path or "unknown", []).append(each.took_ns)
    paths = {path: latency_of(values) for path, values in sorted(by_path.items())}
    seconds = max(duration_ns, 1) / 1e9
    finished = [each for each in sent if each.status != "unfinished"]
    return Outcome(
        planned=planned,
        sent=len(sent),
        answered=len(answered),
        duration_s=seconds,
        offered_per_s=len(sent) / seconds,
        answered_per_s=len(answered) / seconds,
        interrupted=interrupted,
        latency=latency_of(each.took_ns for each in answered),
        paths={path: latency for path, latency in paths.items() if latency is not None},
        errors=dict(sorted(Counter(each.status for each in sent if each.status != OK).items())),
        functions=[_of_function(number, *each, finished) for number, each in enumerate(functions)],
        generator=_generator(sent, connections),
    )


def _of_function(number: int, name: str, deadline_ms: float, percentile: float, sent: Sequence[Sent]) -> OfFunction:
    mine = [each for each in sent if each.number == number]
    answered = [each.took_ns for each in mine if each.status == OK]
    in_time = sum(took_ns <= deadline_ms * MS_NS for took_ns in answered)
    return OfFunction(
        name=name,
        requests=len(mine),
        deadline_ms=deadline_ms,
        percentile=percentile,
        in_time=in_time,
        compliant=in_time * 100 >= len(mine) * percentile,
        latency=latency_of(answered),
    )


def _generator(sent: Sequence[Sent], connections: int) -> Generator:
    late = sum(each.late_ns > LATE_MS * MS_NS for each in sent)
    delays = latency_of(each.late_ns for each in sent) or Latency(0, 0, 0, 0, 0, 0)
    valid = bool(sent) and late <= MOST_LATE * len(sent)
    return Generator(late, delays.p50_ms, delays.p99_ms, delays.max_ms, connections, valid)
