"""What executors report: joined, lost, and how each command ended."""

from typing import assert_never

from dormouse.core.batching import shared
from dormouse.core.messages import (
    Cancel,
    ChunkProduced,
    CommandRefused,
    Evict,
    EvictionFinished,
    Execute,
    ExecutionFailed,
    ExecutionFinished,
    ExecutorCommand,
    ExecutorJoined,
    ExecutorLost,
    Forget,
    ImageNearlyArrived,
    Load,
    LoadFailed,
    LoadFinished,
    RouteOpened,
)
from dormouse.core.ready import ReadyQueue
from dormouse.core.requests import time_out
from dormouse.core.state import (
    EXECUTING,
    RESIDENT,
    Executor,
    Function,
    Request,
    RequestState,
    Residency,
    ResidencyChange,
)
from dormouse.core.turn import Turn
from dormouse.core.types import CommandId, ExecutorId, Ns, Path, Reason


def joined(turn: Turn, event: ExecutorJoined) -> None:
    assert event.executor not in turn.state.executors, f"{event.executor} has joined already"
    turn.state.executors[event.executor] = Executor(
        id=event.executor,
        device=event.device,
        capacity_bytes=event.capacity_bytes,
        chunk_bytes=event.chunk_bytes,
        free_bytes=event.capacity_bytes,
        ready=ReadyQueue(),
        arriving=ReadyQueue(),
    )
    turn.state.executorless_since_ns = None
    turn.look_again()
    for function in turn.state.functions.values():
        if function.unplaceable:
            function.unplaceable = False
            turn.settle(function)


def lost(turn: Turn, event: ExecutorLost) -> None:
    """Its memory is gone with it. What it was running starts over elsewhere, or when it is back."""
    executor = turn.state.executors.pop(event.executor)
    turn.state.stirred.pop(event.executor, None)
    turn.state.replicate_at_ns = None  # it may have been the one that would have helped
    turn.look_again()
    if not turn.state.executors:
        turn.state.executorless_since_ns = turn.now
    for command in filter(None, (executor.ahead, executor.executing)):  # each goes to the front of its queue
        message = f"the executor was lost while it ran '{command.function}': {event.message}"
        for request in reversed(_requests_of(turn, command)):
            turn.requeue(request, Reason.EXECUTOR_LOST, message)
    for name in executor.recency:
        function = turn.state.functions[name]
        turn.give_back(function, executor)
        for destination in function.residencies.values():
            if destination.source == executor.id:
                destination.source = None  # its executor has been told too, and gives the load up
        del function.residencies[executor.id]
        turn.settle(function)
    for other in turn.state.executors.values():
        other.routes.pop(executor.id, None)


def route_opened(turn: Turn, event: RouteOpened) -> None:
    turn.state.executors[event.executor].routes[event.peer] = event.detours


def _completed(turn: Turn, name: ExecutorId, command: CommandId) -> tuple[Executor, ExecutorCommand]:
    executor = turn.state.executors[name]
    assert command in executor.pending, f"{name} answers command {command}, which is not pending"
    return executor, executor.pending.pop(command)


def image_nearly_arrived(turn: Turn, event: ImageNearlyArrived) -> None:
    executor = turn.state.executors[event.executor]
    assert event.command in executor.pending, f"{executor.id} tells of load {event.command}, which is not pending"
    turn.near(turn.state.functions[event.function], executor)


def load_finished(turn: Turn, event: LoadFinished) -> None:
    executor, _ = _completed(turn, event.executor, event.command)
    function = turn.state.functions[event.function]
    residency = function.residencies[executor.id]
    turn.end_load(function, executor, ResidencyChange.LOADED)
    if function.id not in executor.built:
        executor.built.add(function.id)
        function.build_ns = event.build_ns
    function.load_failures = 0
    function.unplaceable = False
    function.ledger.loaded(residency.path, function.spec.image_bytes)
    turn.settle(function)


def load_failed(turn: Turn, event: LoadFailed) -> None:
    executor, _ = _completed(turn, event.executor, event.command)
    _load_ended_badly(turn, turn.state.functions[event.function], executor, event.message)


def _load_ended_badly(turn: Turn, function: Function, executor: Executor, message: str) -> None:
    residency = function.residencies[executor.id]
    if residency.by_peer or residency.helpers:
        # Others had a part in it, so it is no fault of the function; the next load goes the plain way.
        function.plain_until_ns = turn.now + turn.state.settings.detour_pause_ns
    else:
        function.load_failures += 1
    turn.end_load(function, executor, ResidencyChange.LOAD_FAILED)
    if function.load_failures >= turn.state.settings.attempts:
        function.load_failures = 0
        function.unplaceable = True
        turn.refuse_queue(function, Reason.LOAD_FAILED, f"'{function.id}' could not be loaded: {message}")
    turn.settle(function)


def eviction_finished(turn: Turn, event: EvictionFinished) -> None:
    executor, _ = _completed(turn, event.executor, event.command)
    function = turn.state.functions[event.function]
    function.ledger.unaccounted_bytes = event.unaccounted_bytes
    turn.end_eviction(function, executor)
    turn.settle(function)


def chunk_produced(turn: Turn, event: ChunkProduced) -> None:
    request = turn.state.requests[event.request]
    if request.state is RequestState.EXECUTING:
        request.chunks += 1
        turn.reply(request, 0, final=False)


def execution_finished(turn: Turn, event: ExecutionFinished) -> None:
    executor, command = _completed(turn, event.executor, event.command)
    assert isinstance(command, Execute) and event.others == command.others, f"{event} answers {command}"
    requests = _requests_of(turn, command)
    function = turn.end_execution(command, executor)
    function.ledger.executions += 1
    _learn_lead(turn, function, requests, function.residencies[executor.id], event.device_ns)
    if len(requests) == 1:
        _answer(turn, function, requests[0], event.device_ns, event.device_ns)
    else:
        for request, part_ns in zip(requests, shared(event.device_ns, requests), strict=True):
            _answer(turn, function, request, event.device_ns, part_ns)
    turn.settle(function)


def _requests_of(turn: Turn, command: Execute) -> list[Request]:
    requests = turn.state.requests
    return [requests[name] for name in command.requests] if command.others else [requests[command.request]]


def _answer(turn: Turn, function: Function, request: Request, device_ns: Ns, part_ns: Ns) -> None:
    """``part_ns`` of the device's time is this request's."""
    del turn.state.requests[request.id]
    if request.state is EXECUTING:
        in_time = turn.now <= request.deadline_ns
        latency_ns = turn.now - request.began_ns
        function.ledger.answered(request.path, latency_ns, part_ns, in_time=in_time, guest=request.guest)
        function.recent.ended(turn.now, latency_ns, in_time=in_time)
        function.ledger.queued_ns += request.started_ns - request.began_ns
        function.ledger.last_answer_ns = turn.now
        turn.reply(request, device_ns, final=True, part_ns=part_ns, in_time=in_time)
    else:
        function.ledger.device_ns += part_ns


def _learn_lead(turn: Turn, function: Function, requests: list[Request], residency: Residency, device_ns: Ns) -> None:
    """A run that went on for a while when the image was there has computed all the time; one that ended with the copy
    has waited for it. The first after a build tells nothing: libraries make themselves ready in it; nor does one that
    nobody wanted to its end."""
    if requests[0].state is not EXECUTING and all(request.state is not EXECUTING for request in requests):
        return
    if not requests[0].streamed:
        function.lead.computed(device_ns)
    elif residency.path is not Path.BUILD:
        alone_ns = turn.now - residency.loaded_ns if residency.state is RESIDENT else 0
        if alone_ns * 4 > device_ns:
            function.lead.computed(device_ns)
        else:
            function.lead.waited(device_ns)


def execution_failed(turn: Turn, event: ExecutionFailed) -> None:
    executor, command = _completed(turn, event.executor, event.command)
    assert isinstance(command, Execute) and event.others == command.others, f"{event} answers {command}"
    if event.reason is Reason.UNBATCHABLE:
        executor.unbatched[command.function] = event.message
    _execution_ended_badly(turn, command, executor, event.reason, event.message)


def _execution_ended_badly(turn: Turn, command: Execute, executor: Executor, reason: Reason, message: str) -> None:
    """A failed load or a closed window is no fault of the request: it may start over. What a model raised is final,
    unless it may have been another request's fault, or the filling's."""
    requests = _requests_of(turn, command)
    residency = turn.state.functions[command.function].residencies[executor.id]
    if reason is Reason.LOAD_FAILED and (residency.by_peer or residency.helpers):
        for request in requests:
            request.attempts -= 1  # what others had a part in is tried again the plain way
    function = turn.end_execution(command, executor, reason)
    faultless = reason in (Reason.LOAD_FAILED, Reason.TOO_LATE, Reason.TOO_EARLY)
    for request in reversed(requests):  # each goes to the front of the queue
        if faultless or request.state is RequestState.ABANDONED:
            turn.requeue(request, reason, message)
        elif command.padded_rows:
            turn.set_apart(request)
        else:
            turn.refuse(request, reason, message)
    turn.settle(function)


def command_refused(turn: Turn, event: CommandRefused) -> None:
    """The executor did nothing, because the command came outside its window."""
    executor, command = _completed(turn, event.executor, event.command)
    message = f"{executor.id} refused the command: {event.reason}"
    match command:
        case Load():
            _load_ended_badly(turn, turn.state.functions[command.function], executor, message)
        case Execute():
            for request in _requests_of(turn, command):
                if turn.now >= request.timeout_ns and request.state is RequestState.EXECUTING:
                    time_out(turn, request)
            _execution_ended_badly(turn, command, executor, event.reason, message)
        case Evict() | Cancel() | Forget():
            raise AssertionError(f"{executor.id} refused {command}, whose window never closes")
        case _ as never:
            assert_never(never)
