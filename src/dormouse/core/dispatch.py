"""Gives free lanes their next work: the decisions of one turn, taken after every event.

A device has one compute lane and one copy lane. They are filled separately, so that the next function loads while
one runs; a function that is resident never waits behind one that is still arriving.
"""

from dormouse.core.admission import larger_than_devices, larger_than_host
from dormouse.core.eviction import images_to_drop, residents_to_bring_home
from dormouse.core.operations import depart, evict_everywhere, give_up
from dormouse.core.replication import replicate
from dormouse.core.routes import helpers
from dormouse.core.state import Function
from dormouse.core.turn import Turn


def dispatch(turn: Turn) -> None:
    state, executors = turn.state, turn.state.executors.values()
    depart(turn)
    if state.cold:
        read_images(turn)
    for executor in executors:
        if executor.executing is None and (name := executor.ready.first()) is not None:
            turn.execute(state.functions[name], executor)
    if state.homeless:
        load_images(turn)
    if len(executors) > 1:
        replicate(turn)
    for executor in executors:
        # On the layers that have come so far; it waits for the others as it reaches them.
        if executor.executing is None and (name := executor.arriving.first()) is not None:
            turn.execute(state.functions[name], executor)
    depart(turn)


def load_images(turn: Turn) -> None:
    """Fill idle copy lanes, most urgent function first; one that must wait for room is not overtaken."""
    executors = turn.state.executors.values()
    while any(executor.may_load for executor in executors):
        name = turn.state.homeless.first()
        if name is None:
            return
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
            turn.load(function, executor, helpers=helpers(turn.state, executor, function, turn.now))
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
