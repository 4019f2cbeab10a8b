"""What Torpor's queueing remembers between two looks at all functions (``core/rrc``)."""

from dataclasses import dataclass, field

from dormouse.core.types import FunctionId

PPM = 1_000_000


@dataclass(slots=True)
class Groups:
    """Which functions are in the low group, and what decides it."""

    alpha_ppm: int = PPM
    low: set[FunctionId] = field(default_factory=set)
    updates: int = 0
    recorded_ppm: int = PPM
    """The compliant share when the threshold was last moved on purpose."""
