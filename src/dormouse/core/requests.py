"""What happens to a request that arrives, is cancelled, or runs out of time."""

from heapq import heappop, heappush

from dormouse.core.admission import executors_are_gone, refuse_request
from dormouse.core.messages import Refuse, RequestArrived, RequestCancelled
from dormouse.core.reading import next_promotion_ns
from dormouse.core.state import Request, RequestState, State
from dormouse.core.tiering import learn
from dormouse.core.turn import Turn
from dormouse.core.types import DEFAULT_PRIORITY, FOREVER_NS, Ns, Reason

SHED_RETRY_NS: Ns = 1_000_000_000
"""What was shed may be asked again then."""


def arrived(turn: Turn, event: RequestArrived) -> None:
    assert event.request not in turn.state.requests, f"request {event.request} has arrived already"
    refusal = refuse_request(turn.state, event.function, turn.now)
    if refusal is not None:
        if event.function in turn.state.functions:
            turn.state.functions[event.function].refused(turn.now, 0, refusal.reason, event.guest)
        turn.commands.append(Refuse(event.request, refusal.reason, refusal.message, refusal.retry_after_ns))
        return
    function = turn.state.functions[event.function]
    spec = function.spec
    began_ns = turn.now if event.began_ns is None else event.began_ns
    assert began_ns <= turn.now, f"request {event.request} comes from the future"
    deadline_ns = began_ns + spec.slo.deadline_ns if event.deadline_ns is None else event.deadline_ns
    timeout_ns = began_ns + spec.limits.timeout_ns if event.timeout_ns is None else event.timeout_ns
    priority = event.priority or DEFAULT_PRIORITY
    request = Request(event.request, event.function, began_ns, turn.now, deadline_ns, timeout_ns, priority)
    if event.guest is not None:
        request.guest = event.guest
    if event.alike:
        request.rows, request.alike = event.rows, event.alike
    turn.state.requests[request.id] = request
    if turn.policies.host_tier.learns:
        learn(turn.state, function, turn.now)
    else:
        function.rhythm.asked(turn.now)
    if function.promoted:
        function.promoted = False
        function.ledger.promotions_used += 1
    turn.enqueue(request)


def cancelled(turn: Turn, event: RequestCancelled) -> None:
    """The client is gone. A request that has ended meanwhile is nothing to cancel."""
    request = turn.state.requests.get(event.request)
    if request is None or request.state is RequestState.ABANDONED:
        return
    turn.state.functions[request.function].ledger.cancelled += 1
    if request.state is RequestState.QUEUED:
        turn.dequeue(request)
        del turn.state.requests[request.id]
    else:
        turn.abandon(request)


def expire(turn: Turn) -> None:
    """End what has run out of time, wherever it is."""
    timeouts = turn.state.timeouts
    while timeouts and timeouts[0][0] <= turn.now:
        _, name = heappop(timeouts)
        request = turn.state.requests.get(name)
        if request is None or request.state is RequestState.ABANDONED:
            continue
        if request.timeout_ns <= turn.now:
            time_out(turn, request)
        elif request.state is RequestState.QUEUED:
            _shed(turn, request)
        else:
            heappush(timeouts, (request.timeout_ns, name))
    if turn.state.queued and executors_are_gone(turn.state, turn.now):
        for function in turn.state.functions.values():
            turn.refuse_queue(function, Reason.EXECUTOR_LOST, f"no executor came back to serve '{function.id}'")


def end_gatherings(turn: Turn) -> None:
    """Whose first request has waited long enough for company goes where it is run."""
    gatherings = turn.state.gatherings
    while gatherings and gatherings[0][0] <= turn.now:
        _, name = heappop(gatherings)
        function = turn.state.functions.get(name)
        if function is not None and function.gathers_until_ns is not None:
            turn.settle(function)


def time_out(turn: Turn, request: Request) -> None:
    waited_ms = (turn.now - request.began_ns) / 1e6
    message = f"'{request.function}' gave no answer within {waited_ms:.0f} ms; the request was {request.state}"
    function = turn.state.functions[request.function]
    if request.state is RequestState.QUEUED:
        turn.dequeue(request)
        turn.refuse(request, Reason.TIMEOUT, message)
    else:
        turn.abandon(request)
        function.refused(turn.now, turn.now - request.began_ns, Reason.TIMEOUT, request.guest)
        turn.commands.append(Refuse(request.id, Reason.TIMEOUT, message))


def _shed(turn: Turn, request: Request) -> None:
    waited_ms = (request.deadline_ns - request.began_ns) / 1e6
    message = f"'{request.function}' could not answer within its {waited_ms:.0f} ms: others were before this request"
    turn.dequeue(request)
    turn.refuse(request, Reason.SHED, message, SHED_RETRY_NS)


def next_timer_ns(state: State) -> int | None:
    """When the core next wants to be woken although nothing happens."""
    timeouts, requests = state.timeouts, state.requests
    while timeouts and timeouts[0][1] not in requests:
        heappop(timeouts)
    wanted = next_promotion_ns(state) if state.promotions else FOREVER_NS
    if not timeouts:  # nobody waits for anything
        return None if wanted == FOREVER_NS else wanted
    wanted = min(wanted, timeouts[0][0])
    if state.gatherings:
        wanted = min(wanted, _next_gathering_ns(state))
    if state.replicate_at_ns is not None:
        wanted = min(wanted, state.replicate_at_ns)
    if state.executorless_since_ns is not None:
        wanted = min(wanted, state.executorless_since_ns + state.settings.executor_grace_ns)
    return wanted


def _next_gathering_ns(state: State) -> int:
    gatherings = state.gatherings
    while gatherings:
        until_ns, name = gatherings[0]
        function = state.functions.get(name)
        if function is not None and function.gathers_until_ns == until_ns:
            return until_ns
        heappop(gatherings)
    return FOREVER_NS
