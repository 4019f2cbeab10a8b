"""Why a function's requests wait, in words, read from the core's records. Decides nothing.

The words name executors and never other functions: whoever owns the one that waits may read them.
"""

from collections.abc import Iterable

from dormouse.core.state import ON_THE_WAY, Function, ImageState, ResidencyState, State

_BUSY = (ResidencyState.RUNNING, ResidencyState.STREAMING)


def why_waiting(state: State, function: Function) -> str:
    """One line."""
    if not state.executors:
        return "no executor is here; one is expected back"
    if function.image is ImageState.READING:
        return "its image is read from disk"
    if function.image is ImageState.DISK:
        return "its image is on disk and waits for its turn to be read"
    if function.residencies:
        return _why_not_run(state, function)
    if function.unplaceable:
        return "no device can take it at present"
    if not any(executor.may_load for executor in state.executors.values()):
        return "every device is taking in another image"
    return "no device has room that may be made free"


def _why_not_run(state: State, function: Function) -> str:
    """It is on a device, or on its way there."""
    if function.gathers_until_ns is not None:
        return "it waits for more requests to run together"
    states = {name: residency.state for name, residency in function.residencies.items()}
    if where := [name for name, each in states.items() if each in _BUSY]:
        return f"requests before it run on {_listed(where)}"
    if where := [name for name, each in states.items() if each in ON_THE_WAY]:
        return f"its image is on its way to {_listed(where)}"
    if where := [name for name, each in states.items() if each is ResidencyState.RESIDENT]:
        busy = [name for name in where if state.executors[name].executing is not None]
        return f"{_listed(busy or where)} runs another function"
    return f"it is leaving {_listed(states)}"


def _listed(names: Iterable[str]) -> str:
    return " and ".join(names)
