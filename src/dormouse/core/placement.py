"""Where work goes: resident, else host, else disk; and for a load, which device.

``standing`` says what a function that is on no device waits for. A placement policy orders the devices that a load may
go to; the first on which eviction can make room gets it.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto, unique
from typing import Final, TypeAlias

from dormouse.core.state import IN_HOST_MEMORY, PINNED, Executor, Function, ImageState, State, device_pinned_bytes

Placement: TypeAlias = Callable[[State, Function], Sequence[Executor]]


@unique
class Standing(Enum):
    """What stands between a function and its next step."""

    NOTHING = auto()
    """Nothing is wanted, or what is wanted is under way."""
    LOAD = auto()
    """It is in host memory: a copy lane and room on a device."""
    READ = auto()
    """It is on disk: room in host memory."""


NOTHING: Final = Standing.NOTHING


def standing(function: Function) -> Standing:
    """What a function waits for that is on no device: host, else disk."""
    asked = bool(function.queue)
    if not (asked or function.parking or function.spec.pin is PINNED):
        return NOTHING
    preload = function.spec.pin is PINNED and function.accepts and not function.unplaceable
    if function.image is IN_HOST_MEMORY and (asked or preload):
        return Standing.LOAD
    if function.image is ImageState.DISK and (asked or preload or function.parking):
        return Standing.READ
    return NOTHING


def could_ever_hold(executor: Executor, function: Function) -> bool:
    """Whether the function fits beside what pins keep there."""
    room = executor.capacity_bytes - device_pinned_bytes(executor, function)
    return executor.region_bytes(function.spec) <= room


def least_displacing(state: State, function: Function) -> Sequence[Executor]:
    """Devices whose copy lane is idle: those with room first, then an idle compute lane, then the most free bytes."""
    able = [
        executor for executor in state.executors.values() if executor.may_load and could_ever_hold(executor, function)
    ]
    return sorted(
        able,
        key=lambda executor: (
            executor.free_bytes < executor.region_bytes(function.spec),
            executor.executing is not None,
            -executor.free_bytes,
            executor.id,
        ),
    )


PLACEMENT: dict[str, Placement] = {"least-displacing": least_displacing}
