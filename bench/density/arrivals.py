"""When which function is asked: Torpor's generator over its published samples of requests a minute.

Functions are drawn from the samples with replacement. In each minute there are as many requests as the rates of all
functions together say, at gaps that are Poisson numbers of milliseconds, each for a function drawn by its rate.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MINUTES = 30
"""So many columns of the samples are used."""


@dataclass(frozen=True)
class Arrivals:
    """``at_s`` from the start, ascending; ``function`` by number."""

    at_s: NDArray[np.float64]
    function: NDArray[np.int64]


def drawn(samples: Path, functions: int, seconds: float, *, scale: float = 1.0, seed: int = 0) -> Arrivals:
    """Arrivals of that many functions; ``scale`` times the rates of the samples."""
    random = np.random.default_rng(seed)
    table: NDArray[Any] = np.load(samples)[:, :MINUTES]
    rates = table[random.integers(0, len(table), functions)] * scale
    times: list[NDArray[np.float64]] = []
    chosen: list[NDArray[np.int64]] = []
    for minute in range(int(np.ceil(seconds / 60))):
        of_minute = rates[:, minute % MINUTES]
        count = round(of_minute.sum())
        if count:
            gaps_ms = random.poisson(60_000 / count, count)
            times.append(minute * 60 + np.cumsum(gaps_ms) / 1000)
            chosen.append(random.choice(functions, count, p=of_minute / of_minute.sum()))
    at_s, function = np.concatenate(times), np.concatenate(chosen)
    order = np.argsort(at_s, kind="stable")
    order = order[at_s[order] < seconds]
    return Arrivals(at_s[order], function[order])
