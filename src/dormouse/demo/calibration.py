"""From what single requests took to the load that follows: its rate and its deadlines. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from dormouse.demo.messages import Target

UTILIZATION = 0.5
"""Share of the time that the device would be busy if every request came by ``host`` alone."""
DEADLINE_FACTOR = 10.0
SHORTEST_DEADLINE_MS = 250.0


def by_model(latencies_ms: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The median of each model's latencies."""
    found: dict[str, list[float]] = {}
    for model, latency_ms in latencies_ms:
        found.setdefault(model, []).append(latency_ms)
    return {model: median(values) for model, values in found.items()}


def deadlines(host_ms: Mapping[str, float]) -> dict[str, float]:
    """By model: so many times what an idle machine takes to wake the function and answer, and never very short.

    That leaves room for the queue that bursts make before one device, and for no more.
    """
    return {model: max(SHORTEST_DEADLINE_MS, DEADLINE_FACTOR * value) for model, value in host_ms.items()}


def rate_per_s(host_ms: Mapping[str, float], targets: Sequence[Target]) -> float:
    """Requests a second that keep the device busy for the chosen share of the time."""
    mean_ms = sum(target.popularity * host_ms[target.model] for target in targets)
    return UTILIZATION * 1e3 / mean_ms
