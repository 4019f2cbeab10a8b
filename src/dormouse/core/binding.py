"""When a request gets its device. By name:

``lanes``: ours. Every lane of every device has work of its own waiting: what is resident there runs first, and the next
function loads meanwhile (``core/dispatch``).

``late``: Torpor's late binding (ATC'25, Algorithm 1). One queue for all devices, in the order of the queueing policy;
whenever a device has nothing to do at all, the first function that can be served gets it. A device does one thing at a
time, a load occupies it, and a function has one execution under way at most. An idle device that holds the function is
taken; else its image comes from the nearest device that has it, else from host memory, to where the placement policy
says. Waiting for company (batching) has no place here: nothing waits while a device is idle.
"""

from collections.abc import Iterator

from dormouse.core.admission import larger_than_devices
from dormouse.core.batching import company
from dormouse.core.operations import give_up
from dormouse.core.routes import peer_ns
from dormouse.core.state import IN_HOST_MEMORY, PINNED, RESIDENT, Executor, Function, State
from dormouse.core.turn import Turn
from dormouse.core.types import ExecutorId

BINDING = {"lanes": False, "late": True}
"""By name, whether one queue serves all devices."""


def bind_late(turn: Turn) -> None:
    """Give every idle device the most urgent function that it can serve."""
    state = turn.state
    passed = []
    while any(is_idle(e) for e in state.executors.values()):
        function = turn.most_urgent(state.homeless)
        if function is None:
            break
        refusal = None if function.residencies else larger_than_devices(state, function)
        if refusal is not None:
            give_up(turn, function, refusal)
        elif not _bind(turn, function):
            state.homeless.discard(function.id)
            passed.append(function)
    for function in passed:
        turn.settle(function)


def is_idle(executor: Executor) -> bool:
    """Whether a device does nothing at all."""
    return executor.executing is None and executor.may_load


def _bind(turn: Turn, function: Function) -> bool:
    """Whether a device was found."""
    state = turn.state
    for name, residency in function.residencies.items():
        if residency.state is RESIDENT and is_idle(state.executors[name]):
            _execute(turn, function, state.executors[name])
            return True
    for target, source in _ways(turn, function):
        victims = turn.policies.eviction(state, target, function, turn.now)
        if victims is not None:
            for victim in victims:
                turn.evict(state.functions[victim], target, function.id)
            turn.load(function, target, source=source)
            if function.queue:
                _execute(turn, function, target)
            return True
    return False


def _execute(turn: Turn, function: Function, executor: Executor) -> None:
    turn.execute(function, executor, company(function, executor))


def _ways(turn: Turn, function: Function) -> Iterator[tuple[Executor, ExecutorId | None]]:
    """Idle devices, and where each would have the image from: the fastest pairs first, then host memory."""
    state = turn.state
    if function.residencies and (function.spec.state_bytes or function.spec.pin is PINNED):
        return  # it has one home
    targets = [
        executor
        for executor in turn.policies.placement(state, function)
        if is_idle(executor) and executor.id not in function.residencies
    ]
    if turn.now >= function.plain_until_ns:
        yield from _peers(state, function, targets)
    if function.image is IN_HOST_MEMORY:
        for target in targets:
            yield target, None


def _peers(state: State, function: Function, targets: list[Executor]) -> list[tuple[Executor, ExecutorId]]:
    pairs = []
    for target in targets:
        for name in function.residencies:
            took_ns = peer_ns(state, target, function, state.executors[name])
            if took_ns is not None:
                pairs.append((took_ns, target, name))
    pairs.sort(key=lambda pair: pair[0])
    return [(target, source) for _, target, source in pairs]
