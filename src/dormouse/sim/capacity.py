"""How many functions a machine serves: the largest number with every one inside its SLO, found by bisection."""

from collections.abc import Callable
from pathlib import Path

from dormouse.sim.outcome import outcome_of
from dormouse.sim.scenario import Scenario, arrivals_of, world_of


def largest_compliant(
    scenario: Scenario, directory: Path, tried: Callable[[int, int], object], *, within: int = 1
) -> int:
    """Begins at the scenario's own count and doubles or halves it; 0 if not even one is compliant. ``tried`` is told
    of every count and how many of its functions were compliant. A count that is not is at most ``within`` away."""

    def all_compliant(count: int) -> bool:
        world = world_of(scenario, functions=count)
        world.run(arrivals_of(scenario, directory, functions=count))
        compliant = outcome_of(world.core.state, world.now).compliant
        tried(count, compliant)
        return compliant == count

    low, high = 0, scenario.functions.count
    while all_compliant(high):
        low, high = high, high * 2
    while high - low > within:
        middle = (low + high) // 2
        low, high = (middle, high) if all_compliant(middle) else (low, middle)
    return low
