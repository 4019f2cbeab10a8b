"""Gives free lanes their next work: the decisions of one turn, taken after every event.

A device has one compute lane and one copy lane. They are filled separately, so that the next function loads while
one runs; a function that is resident never waits behind one that is still arriving.
"""

from dormouse.core.admission import larger_than_devices, larger_than_host
from dormouse.core.eviction import images_to_drop, residents_to_bring_home
from dormouse.core.operations import depart, evict_everywhere, give_up
from dormouse.core.state import Executor, Function
from dormouse.core.turn import Turn


def dispatch(turn: Turn) -> None:
    depart(turn)
    read_images(turn)
    for executor in turn.state.executors.values():
        run_resident(turn, executor)
    load_images(turn)
    for executor in turn.state.executors.values():
        run_arriving(turn, executor)
    depart(turn)


def run_resident(turn: Turn, executor: Executor) -> None:
    name = executor.ready.first() if executor.executing is None else None
    if name is not None:
        turn.execute(turn.state.functions[name], executor)


def run_arriving(turn: Turn, executor: Executor) -> None:
    """Start a request on the layers that have come so far; it waits for the others as it reaches them."""
    name = executor.arriving.first() if executor.executing is None else None
    if name is not None:
        turn.execute(turn.state.functions[name], executor)


def load_images(turn: Turn) -> None:
    """Fill idle copy lanes, most urgent function first; one that must wait for room is not overtaken."""
    while turn.state.executors and (name := turn.state.homeless.first()) is not None:
        function = turn.state.functions[name]
        refusal = larger_than_devices(turn.state, function)
        if refusal is not None:
            give_up(turn, function, refusal)
        elif not _load_somewhere(turn, function):
            return


def _load_somewhere(turn: Turn, function: Function) -> bool:
    for executor in turn.policies.placement(turn.state, function):
        victims = turn.policies.eviction(turn.state, executor, function, turn.now)
        if victims is not None:
            for victim in victims:
                turn.evict(turn.state.functions[victim], executor)
            turn.load(function, executor)
            return True
    return False


def read_images(turn: Turn) -> None:
    """Bring wanted images from disk, most urgent first, dropping what has not been used for longest."""
    state = turn.state
    while state.reading < state.settings.concurrent_reads and (name := state.cold.first()) is not None:
        function = state.functions[name]
        refusal = larger_than_host(state, function)
        if refusal is not None:
            give_up(turn, function, refusal)
            continue
        victims = images_to_drop(state, function)
        if victims is None:
            for resident in residents_to_bring_home(state, function):
                evict_everywhere(turn, state.functions[resident])
            return
        for victim in victims:
            turn.drop_image(state.functions[victim])
        turn.read_image(function)
