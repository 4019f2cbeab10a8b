"""When a function that is on a device should come to a second one. By name:

``none``: never; a request waits for the device that has its function.

``late``: Torpor's late binding (ATC'25, Algorithm 1): whenever it waits for a busy device and another is idle; from
device to device where there is a way, else from host memory; making room as any load does.

``worthwhile``: the smallest rule that uses idle devices. The most urgent request that waits for a busy device is worth
a copy from there to an idle one if it would miss its deadline where it waits, or if the wait is long beside the copy.
Nothing makes room for a replica: it takes memory that is free, and leaves like any other when somebody needs it.
"""

from collections.abc import Callable

from dormouse.core.routes import peer_ns
from dormouse.core.state import Executor, Function, ImageState, State
from dormouse.core.turn import Turn
from dormouse.core.types import ExecutorId, Ns, Pin

CLEARLY = 3
"""So many times as long as the copy must the wait be, when no deadline is at stake."""


def replicate(turn: Turn) -> None:
    """Fill idle devices with copies of what others are too busy to serve, as the settings say."""
    state = turn.state
    state.replicate_at_ns = None
    if state.homeless.keys:
        return
    for executor in state.executors.values():
        if executor.executing is None and executor.may_load and not executor.arriving.keys:
            REPLICATION[state.settings.replication](turn, executor)


def _never(turn: Turn, idle: Executor) -> None:
    del turn, idle


def _bind_late(turn: Turn, idle: Executor) -> None:
    """Give an idle device the most urgent function that waits for a busy one."""
    state = turn.state
    waiting = []
    for busy in state.executors.values():
        function = None if busy.executing is None else turn.most_urgent(busy.ready)
        head = None if function is None else function.head
        if function is not None and head is not None and _may_come(state, idle, function, turn.now):
            waiting.append((turn.key_of(function, head), function.id))
    if not waiting:
        return
    function = state.functions[min(waiting)[1]]
    victims = turn.policies.eviction(state, idle, function, turn.now)
    if victims is None:
        return
    for victim in victims:
        turn.evict(state.functions[victim], idle, function.id)
    turn.load(function, idle, source=_fastest_source(state, idle, function))


def _may_come(state: State, idle: Executor, function: Function, now: Ns) -> bool:
    if idle.id in function.residencies or function.is_arriving or function.spec.pin is Pin.DEVICE:
        return False
    by_peer = now >= function.plain_until_ns and _fastest_source(state, idle, function) is not None
    return (by_peer or function.image is ImageState.HOST) and not function.spec.state_bytes


def _fastest_source(state: State, idle: Executor, function: Function) -> ExecutorId | None:
    ways = []
    for name in function.residencies:
        took_ns = peer_ns(state, idle, function, state.executors[name])
        if took_ns is not None:
            ways.append((took_ns, name))
    return min(ways)[1] if ways else None


def _help_out(turn: Turn, idle: Executor) -> None:
    _help_where_it_pays(turn, idle, makes_room=False)


def _help_out_and_make_room(turn: Turn, idle: Executor) -> None:
    _help_where_it_pays(turn, idle, makes_room=True)


def _help_where_it_pays(turn: Turn, idle: Executor, *, makes_room: bool) -> None:
    state = turn.state
    if not idle.routes:
        return
    for busy in state.executors.values():
        function = None if busy.executing is None else turn.most_urgent(busy.ready)
        took_ns = None if function is None else _copy_ns(turn, idle, function, busy)
        if function is None or took_ns is None:
            continue
        at_ns = max(_worthwhile_at(state, busy, function, took_ns, turn.now), function.plain_until_ns)
        if at_ns <= turn.now:
            victims = turn.policies.eviction(state, idle, function, turn.now)
            if victims is None or (victims and not makes_room):
                continue
            for victim in victims:
                turn.evict(state.functions[victim], idle, function.id)
            turn.load(function, idle, source=busy.id)
            return
        if state.replicate_at_ns is None or at_ns < state.replicate_at_ns:
            state.replicate_at_ns = at_ns


def _copy_ns(turn: Turn, idle: Executor, function: Function, source: Executor) -> Ns | None:
    """How long a copy would take; None if there can or need be none."""
    if idle.id in function.residencies or function.is_arriving or function.spec.pin is Pin.DEVICE:
        return None
    return peer_ns(turn.state, idle, function, source)


def _worthwhile_at(state: State, busy: Executor, function: Function, took_ns: Ns, now: Ns) -> Ns:
    """When the copy pays, if the device is still busy then.

    Of what runs nothing is known but how long such runs take and how long it has run. So what is left of it is the
    rest of the usual time, and once that is over, as much again as it has taken.
    """
    head, running = function.head, busy.executing
    assert head is not None and running is not None, f"{function.id} does not wait for {busy.id}"
    usual_ns = _usual_ns(state.functions[running.function])
    started_ns = state.requests[running.request].started_ns
    ran_ns = now - started_ns
    left_ns = usual_ns - ran_ns if ran_ns < usual_ns else ran_ns
    queue_ns = (len(function.queue) - 1) * function.ledger.mean_device_ns()
    patient_ns = max(CLEARLY * took_ns - queue_ns, took_ns)
    late = head.deadline_ns < now + left_ns
    if left_ns > (took_ns if late else patient_ns):
        return now
    when_late_ns = max(head.deadline_ns, started_ns + max(usual_ns, took_ns) + 1)
    return min(when_late_ns, started_ns + max(usual_ns, patient_ns) + 1)


def _usual_ns(function: Function) -> Ns:
    """How long a run takes when nothing has to be waited for, as far as is known."""
    return function.lead.computing_ns if function.lead.known else function.ledger.mean_device_ns()


REPLICATION: dict[str, Callable[[Turn, Executor], None]] = {
    "none": _never,
    "late": _bind_late,
    "worthwhile": _help_out,
    "worthwhile-evicting": _help_out_and_make_room,
}
