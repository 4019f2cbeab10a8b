"""Where work goes: resident, else host, else disk; and for a load, which device.

``standing`` says what a function that is on no device waits for. A placement policy orders the devices that a load may
go to; the first on which eviction can make room gets it.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto, unique
from typing import Final, TypeAlias
from zlib import crc32

from dormouse.core.eviction import is_heavy
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
    return sorted(
        able(state, function),
        key=lambda executor: (
            executor.free_bytes < executor.region_bytes(function.spec),
            executor.executing is not None,
            -executor.free_bytes,
            executor.id,
        ),
    )


def able(state: State, function: Function) -> list[Executor]:
    """Devices that could begin to load the function now."""
    ahead = state.settings.load_ahead
    return [
        executor
        for executor in state.executors.values()
        if executor.may_load and (ahead or executor.executing is None) and could_ever_hold(executor, function)
    ]


def torpor(state: State, function: Function) -> Sequence[Executor]:
    """Algorithm 1, step 3: first devices whose neighbours behind the PCIe switch do not load, then those whose
    neighbours load something light, then any. Steps 1 and 2, a device that holds it, are not asked of a placement."""
    return sorted(able(state, function), key=lambda executor: (disturbance(state, executor), executor.id))


def quiet(state: State, function: Function) -> Sequence[Executor]:
    """Ours: devices with room first, then those whose neighbours are quiet, then as ``least_displacing``."""
    return sorted(
        able(state, function),
        key=lambda executor: (
            executor.free_bytes < executor.region_bytes(function.spec),
            disturbance(state, executor),
            executor.executing is not None,
            -executor.free_bytes,
            executor.id,
        ),
    )


def disturbance(state: State, executor: Executor) -> int:
    """0: nobody loads behind the same switch; 1: only something light; 2: something heavy."""
    neighbours = state.settings.topology.neighbours(executor.device)
    if not neighbours:
        return 0
    loads = [other.copying for other in state.executors.values() if other.device in neighbours and other.copying]
    if not loads:
        return 0
    return 1 if all(not is_heavy(state, state.functions[name]) for name in loads) else 2


def anywhere(state: State, function: Function) -> Sequence[Executor]:
    """Torpor-Random: any idle device, drawn as if by lot from the function and the number of the next command."""
    return sorted(
        able(state, function),
        key=lambda executor: crc32(f"{function.id} {state.next_command} {executor.id}".encode()),
    )


def bound(state: State, function: Function) -> Sequence[Executor]:
    """Early binding: each function has one device for good, dealt to them in the order of deployment."""
    executors = list(state.executors.values())
    own = executors[function.number % len(executors)] if executors else None
    return [executor for executor in able(state, function) if executor is own]


PLACEMENT: dict[str, Placement] = {
    "least-displacing": least_displacing,
    "torpor": torpor,
    "quiet": quiet,
    "random": anywhere,
    "bound": bound,
}
