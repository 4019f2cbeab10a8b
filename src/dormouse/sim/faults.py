"""What goes wrong in a simulated world, and when: drawn beforehand from a seed, so that a failure can be seen again."""

import random
from collections.abc import Callable

from msgspec import Struct

from dormouse.core.types import Ns
from dormouse.sim.world import World

SECOND_NS: Ns = 1_000_000_000


class Faults(Struct, frozen=True, forbid_unknown_fields=True):
    """How often each happens, a minute, over all devices."""

    executor_losses: float = 0.0
    slow_links: float = 0.0
    failed_loads: float = 0.0
    late_commands: float = 0.0
    clock_jumps: float = 0.0


def inject(world: World, faults: Faults, duration_ns: Ns, seed: int) -> None:
    """Put all faults of a run into the world's future."""
    draw = random.Random(seed ^ 0x5EED)
    names = list(world.executors)
    began_ns = world.now

    def lose() -> None:
        world.lose(draw.choice(names))

    def slow() -> None:
        link = world.links[draw.choice(sorted(world.links))]
        world.slow(link, draw.uniform(2, 20), round(draw.uniform(0.05, 2) * SECOND_NS))

    def fail() -> None:
        world.executors[draw.choice(names)].fail_next_load = "out of memory"

    def hold() -> None:
        world.hold(draw.choice(names), round(draw.uniform(0.05, 200) * SECOND_NS))

    def jump() -> None:
        world.jump(round(draw.uniform(0.001, 5) * SECOND_NS))

    def schedule(rate: float, act: Callable[[], None]) -> None:
        at_ns = 0.0
        while rate > 0 and (at_ns := at_ns + draw.expovariate(rate / 60) * SECOND_NS) < duration_ns:
            world.at(began_ns + round(at_ns), act)

    schedule(faults.executor_losses, lose)
    schedule(faults.slow_links, slow)
    schedule(faults.failed_loads, fail)
    schedule(faults.late_commands, hold)
    schedule(faults.clock_jumps, jump)
