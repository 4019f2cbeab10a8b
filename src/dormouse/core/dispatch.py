"""Gives free lanes their next work: the decisions of one turn, taken after every event.

A device has one compute lane and one copy lane. They are filled separately, so that the next function loads while
one runs; a function that is resident never waits behind one that is still arriving.
"""

from dormouse.core.admission import larger_than_devices
from dormouse.core.ahead import may_queue_behind
from dormouse.core.batching import company
from dormouse.core.binding import bind_late
from dormouse.core.eviction import want_of
from dormouse.core.operations import depart, give_up
from dormouse.core.reading import promote, read_images
from dormouse.core.replication import replicate
from dormouse.core.routes import helpers
from dormouse.core.state import Executor, Function, State, Want
from dormouse.core.turn import Turn


def dispatch(turn: Turn) -> None:
    state = turn.state
    if state.leaving:
        depart(turn)
    if state.cold.keys:
        read_images(turn)
    if state.promotions and state.promotions[0][0] <= turn.now:
        promote(turn)
    if turn.policies.one_queue:
        bind_late(turn)
    else:
        _fill_lanes(turn)
    state.stirred.clear()
    if state.leaving:
        depart(turn)


def _fill_lanes(turn: Turn) -> None:
    state = turn.state
    if state.stirred:
        for executor in _stirred(state):
            _fill_lane(turn, executor)
    if state.homeless.keys:
        load_images(turn)
    if len(state.executors) > 1:
        replicate(turn)
    if state.stirred:
        for executor in _stirred(state):
            # On the layers that have come so far; it waits for the others as it reaches them.
            if executor.executing is None and (function := turn.most_urgent(executor.arriving)) is not None:
                _execute(turn, function, executor)


def _stirred(state: State) -> list[Executor]:
    """In the order in which they joined."""
    if len(state.stirred) == 1:
        return list(state.stirred.values())
    return [executor for executor in state.executors.values() if executor.id in state.stirred]


def _fill_lane(turn: Turn, executor: Executor) -> None:
    while executor.executing is None or may_queue_behind(turn.state, executor):
        function = turn.most_urgent(executor.ready)
        if function is None:
            return
        _execute(turn, function, executor)


def _execute(turn: Turn, function: Function, executor: Executor) -> None:
    turn.execute(function, executor, company(function, executor))


def _free_to_load(state: State) -> list[Executor]:
    ahead = state.settings.load_ahead
    return [
        executor
        for executor in state.executors.values()
        if executor.copying is None and executor.lent_to is None and (ahead or executor.executing is None)
    ]


def load_images(turn: Turn) -> None:
    """Fill idle copy lanes, most urgent function first; one that must wait for room is not overtaken."""
    state = turn.state
    while lanes := _free_to_load(state):
        function = turn.most_urgent(state.homeless)
        if function is None:
            return
        want = want_of(function, turn.now)
        if all(executor.full_for == want for executor in lanes):
            return
        refusal = larger_than_devices(state, function)
        if refusal is not None:
            give_up(turn, function, refusal)
        elif not _load_somewhere(turn, function, want):
            for executor in lanes:
                executor.full_for = want
            return


def _load_somewhere(turn: Turn, function: Function, want: Want) -> bool:
    for executor in turn.policies.placement(turn.state, function):
        if executor.full_for == want:
            continue
        victims = turn.policies.eviction(turn.state, executor, function, turn.now)
        if victims is not None:
            for victim in victims:
                turn.evict(turn.state.functions[victim], executor, function.id)
            turn.load(function, executor, helpers=helpers(turn.state, executor, function, turn.now))
            return True
    return False
