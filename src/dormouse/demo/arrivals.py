"""When which function is asked: seeded, bursty, skewed. Pure.

Visits come as a Poisson process whose rate switches between calm and rush; a visit picks one function by popularity
and asks it once or several times in short order, as a user or a batch of work does.
"""

import random
from collections.abc import Iterator, Sequence

from msgspec import Struct

CALM_S, RUSH_S = 3.0, 1.0
"""Mean lengths."""
RUSH = 3.0
"""Visits in a rush come so many times as fast as in a calm."""
ASKED_AGAIN = 0.4
"""Chance that a visit asks once more, after every time."""
PAUSE_S = 0.15
"""Mean pause between two requests of a visit."""


class Arrival(Struct, frozen=True, order=True):
    at_s: float
    function: int
    """Index into the popularities."""
    example: int
    """A number to choose an example with."""


def arrivals(seconds: float, rate_per_s: float, popularities: Sequence[float], seed: int) -> list[Arrival]:
    """All requests of ``seconds``, in order of time; ``rate_per_s`` on average."""
    dice = random.Random(seed)
    found = []
    for visit_s in _visits(seconds, rate_per_s * (1 - ASKED_AGAIN), dice):
        function = dice.choices(range(len(popularities)), popularities)[0]
        at_s = visit_s
        while at_s < seconds:
            found.append(Arrival(at_s, function, dice.randrange(2**16)))
            if dice.random() >= ASKED_AGAIN:
                break
            at_s += dice.expovariate(1 / PAUSE_S)
    return sorted(found)


def _visits(seconds: float, rate_per_s: float, dice: random.Random) -> Iterator[float]:
    """Points of a Poisson process that is stretched where it is calm and squeezed in a rush."""
    calm_rate = rate_per_s * (CALM_S + RUSH_S) / (CALM_S + RUSH * RUSH_S)
    start_s, rush = 0.0, False
    while start_s < seconds:
        end_s = start_s + dice.expovariate(1 / (RUSH_S if rush else CALM_S))
        at_s = start_s
        while (at_s := at_s + dice.expovariate(calm_rate * (RUSH if rush else 1))) < min(end_s, seconds):
            yield at_s
        start_s, rush = end_s, not rush
