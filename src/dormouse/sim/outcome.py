"""What a simulated run came to, read from the core's own ledgers."""

from collections import Counter

from msgspec import Struct

from dormouse.core.ledger import Histogram
from dormouse.core.state import State
from dormouse.core.types import Bytes, Path

_MEDIAN_PPM, _P98_PPM = 500_000, 980_000


class PathRow(Struct, frozen=True):
    requests: int
    share: float
    p50_ms: float
    p98_ms: float


class Outcome(Struct, frozen=True):
    """Of all functions together, and of the one that was served worst."""

    functions: int
    compliant: int
    requests: int
    in_time: int
    refused: int
    evictions: int
    moved_bytes: Bytes
    read_bytes: Bytes
    """From disk to host memory."""
    promotions: int
    """Images read ahead of their request, ..."""
    promotions_unused: int
    """... and those of them that left again before one came."""
    p98_ms: float
    paths: dict[str, PathRow]
    worst_function: str
    worst_share: float
    """Of its requests in time."""
    simulated_s: float
    wall_s: float = 0.0
    requests_per_wall_s: float = 0.0


def outcome_of(state: State, simulated_ns: int, wall_s: float = 0.0) -> Outcome:
    """Sums over the ledgers; a function that was never asked is compliant."""
    functions = list(state.functions.values())
    together: dict[Path, Histogram] = {}
    for function in functions:
        for path, histogram in function.ledger.latency.items():
            together.setdefault(path, Histogram()).merge(histogram)
    everything = Histogram()
    for histogram in together.values():
        everything.merge(histogram)
    ledgers = [function.ledger for function in functions]
    asked = [function for function in functions if function.ledger.requests]
    worst = min(asked, key=lambda f: (f.ledger.in_time / f.ledger.requests, f.id), default=None)
    refusals: Counter[str] = Counter()
    for function in functions:
        refusals.update({str(reason): count for reason, count in function.ledger.refusals.items()})
    requests = sum(function.ledger.requests for function in functions)
    return Outcome(
        functions=len(functions),
        compliant=sum(function.ledger.compliant(function.spec.slo) for function in functions),
        requests=requests,
        in_time=sum(function.ledger.in_time for function in functions),
        refused=sum(refusals.values()),
        evictions=sum(function.ledger.evictions for function in functions),
        moved_bytes=sum(function.ledger.loaded_bytes for function in functions),
        read_bytes=sum(ledger.read_bytes for ledger in ledgers),
        promotions=sum(ledger.promotions_used + ledger.promotions_unused for ledger in ledgers),
        promotions_unused=sum(ledger.promotions_unused for ledger in ledgers),
        p98_ms=everything.percentile(_P98_PPM) / 1e6,
        paths={str(path): _row(together[path], requests) for path in Path if path in together},
        worst_function="" if worst is None else str(worst.id).partition("/")[0],
        worst_share=1.0 if worst is None else worst.ledger.in_time / worst.ledger.requests,
        simulated_s=simulated_ns / 1e9,
        wall_s=wall_s,
        requests_per_wall_s=requests / wall_s if wall_s else 0.0,
    )


def _row(histogram: Histogram, requests: int) -> PathRow:
    return PathRow(
        histogram.count,
        histogram.count / requests,
        histogram.percentile(_MEDIAN_PPM) / 1e6,
        histogram.percentile(_P98_PPM) / 1e6,
    )
