"""Latency by path as a picture. Needs matplotlib, which is asked for only here."""

from pathlib import Path

from dormouse.core.ledger import Histogram
from dormouse.core.types import Path as RequestPath
from dormouse.errors import ConfigurationFault
from dormouse.sim.world import World

_SHARES_PPM = [share * 1000 for share in range(10, 1000, 5)]


def plot(world: World, file: Path) -> None:
    """The distribution of latencies, one line a path. Raises ConfigurationFault."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ConfigurationFault("--plot needs matplotlib: pip install 'dormouse[plot]'") from None
    together: dict[RequestPath, Histogram] = {}
    for function in world.core.state.functions.values():
        for path, histogram in function.ledger.latency.items():
            together.setdefault(path, Histogram()).merge(histogram)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for path, histogram in together.items():
        latencies = [histogram.percentile(share) / 1e6 for share in _SHARES_PPM]
        axes.plot(latencies, [share / 1_000_000 for share in _SHARES_PPM], label=f"{path} ({histogram.count})")
    axes.set_xscale("log")
    axes.set_xlabel("latency, ms")
    axes.set_ylabel("share of requests")
    axes.legend()
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as fault:
        raise ConfigurationFault(f"--plot {file}: {fault}") from None
    finally:
        pyplot.close(figure)
