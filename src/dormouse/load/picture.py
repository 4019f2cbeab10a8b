"""The distribution of a run's latencies as a PNG. Needs matplotlib, which is asked for only here."""

from collections.abc import Sequence
from pathlib import Path

from dormouse.errors import ConfigurationFault
from dormouse.load.outcome import Sent
from dormouse.load.report import by_path


def draw(sent: Sequence[Sent], file: Path) -> None:
    """Share of answers by latency, one line a path. Raises ConfigurationFault."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ConfigurationFault(f"--report {file} needs matplotlib: pip install 'dormouse-serve[plot]'") from None
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for path, values in by_path(sent).items():
        axes.step(values, [(rank + 1) / len(values) for rank in range(len(values))], label=f"{path} ({len(values)})")
    axes.set_xscale("log")
    axes.set_xlabel("latency, ms")
    axes.set_ylabel("share of answers")
    axes.legend()
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as fault:
        raise ConfigurationFault(f"--report {file}: {fault}") from None
    finally:
        pyplot.close(figure)
