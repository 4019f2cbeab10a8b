"""What an executor does with each command: the copy lane's work, the compute lane's, and the order of their answers.

Rules that the control side relies on:

- A command outside its window is refused, and nothing is done.
- An execution that waits for a load which fails (or is refused) is answered before the load is.
- A load that is reported as failed holds nothing any more; an eviction that is reported has happened. It may be
  reported after a later load has begun: its memory is free at once, and the rest is done beside that load's copies.

Locks: ``_Function.running`` is held by whoever runs the module or takes its memory away; ``waiting`` (executions that
have not begun) has a lock of its own, so that a failed load can answer them while another function computes.
"""

import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

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
    Forget,
    ImageNearlyArrived,
    Load,
    LoadFailed,
    LoadFinished,
)
from dormouse.core.types import Bytes, CommandId, ExecutorId, FunctionId, Reason, RequestId
from dormouse.device.base import Device
from dormouse.errors import DormouseError, InvalidRequest, TooLarge, without_paths
from dormouse.executor.approach import Approach, Link
from dormouse.executor.arrival import Arrival, ImageNotArrived
from dormouse.executor.batching import Unbatchable, cut, joined, no_chunks, rows_of
from dormouse.executor.compute import Compute
from dormouse.executor.lanes import Lane
from dormouse.executor.payload import decoded
from dormouse.executor.replies import Replies
from dormouse.executor.routes import Route, route_of
from dormouse.executor.runner import Runner
from dormouse.executor.skeletons import Skeletons
from dormouse.model.loaded import Inputs, Value, one_line
from dormouse.model.outputs import Output
from dormouse.slab import Slab
from dormouse.wire import ChunkReady, ExecuteRequest, FromExecutor, GraphsHeld, ImageHeld, LoadImage, TensorRef


class _Cancelled(DormouseError):
    """Nobody waits for the rest of an answer."""


_REASONS: dict[type[DormouseError], Reason] = {
    _Cancelled: Reason.CANCELLED,
    ImageNotArrived: Reason.LOAD_FAILED,
    InvalidRequest: Reason.INVALID_INPUT,
    TooLarge: Reason.OUTPUT_TOO_LARGE,
    Unbatchable: Reason.UNBATCHABLE,
}


@dataclass(eq=False)
class _Execution:
    asked: ExecuteRequest
    arrival: Arrival | None
    given_up: set[RequestId] = field(default_factory=set)
    """Requests that nobody waits for."""

    @property
    def cancelled(self) -> bool:
        return len(self.given_up) > len(self.asked.command.others)


@dataclass(eq=False)
class _Function:
    id: FunctionId
    runner: Runner
    arrival: Arrival | None = None
    """Of the load asked for last."""
    running: threading.Lock = field(default_factory=threading.Lock)
    waiting: dict[CommandId, _Execution] = field(default_factory=dict)
    waiting_lock: threading.Lock = field(default_factory=threading.Lock)
    leaving: bool = False
    """Its memory is wanted: a capture gives way."""
    capture_planned: bool = False
    reported: tuple[int, str] = (0, "")
    """What the control side knows of its graphs."""

    def take(self, execution: _Execution) -> bool:
        """Whether the caller is the one to answer this execution."""
        with self.waiting_lock:
            return self.waiting.pop(execution.asked.command.command, None) is not None

    def taken(self, arrival: Arrival) -> list[_Execution]:
        """All that wait for this arrival, to be answered by the caller, who holds ``waiting_lock``."""
        chosen = [execution for execution in self.waiting.values() if execution.arrival is arrival]
        for execution in chosen:
            del self.waiting[execution.asked.command.command]
        return chosen


@dataclass(frozen=True)
class Terms:
    """What every runner of this process is made with."""

    host_address: int
    group_bytes: Bytes
    allow_code: Sequence[Path]
    poison: bool
    peers: bool = False
    """Others want to know where images lie."""


class Desk:
    """Its methods are called by the one thread that receives; they return at once. ``send`` may be called by any."""

    def __init__(
        self,
        executor: ExecutorId,
        *,
        device: Device,
        compute: Compute,
        requests: Slab,
        replies: Replies,
        terms: Terms,
        send: Callable[[FromExecutor], None],
    ) -> None:
        self._executor = executor
        self._device = device
        self._compute = compute
        self._requests = requests
        self._replies = replies
        self._terms = terms
        self._send = send
        self._skeletons = Skeletons(terms.group_bytes)
        self._functions: dict[FunctionId, _Function] = {}
        self._executions: dict[RequestId, _Execution] = {}
        self._links: defaultdict[str, Link] = defaultdict(Link)
        """By kind of route."""
        self._vacated: list[Evict] = []
        """Evictions that have still to be swept and reported."""
        self._copying = Lane("copy-lane")
        self._computing = Lane("compute-lane")
        self._computing.put(compute.settle_in)

    def load(self, asked: LoadImage) -> None:
        function = self._functions.get(asked.command.function)
        if function is None:
            function = _Function(asked.command.function, self._runner(Path(asked.directory)))
            self._functions[asked.command.function] = function
        arrival = function.arrival = Arrival("" if asked.source is None else asked.source.address)
        self._copy_lane(lambda: self._load(function, asked, arrival))

    def execute(self, asked: ExecuteRequest) -> None:
        function = self._functions.get(asked.command.function)
        execution = _Execution(asked, function.arrival if function else None)
        self._executions.update((request, execution) for request in asked.command.requests)
        if function is None:
            self._fail(execution, Reason.LOAD_FAILED, f"{asked.command.function} has never been loaded here")
            return
        with function.waiting_lock:
            function.waiting[asked.command.command] = execution
        self._computing.put(lambda: self._execute(function, execution))

    def evict(self, command: Evict) -> None:
        self._make_way(command.function)
        self._copy_lane(lambda: self._evict(command))

    def forget(self, command: Forget) -> None:
        self._make_way(command.function)
        self._copy_lane(lambda: self._forget(command))

    def cancel(self, command: Cancel) -> None:
        execution = self._executions.get(command.request)
        if execution is not None:
            execution.given_up.add(command.request)

    def grown(self, offset: Bytes, size_bytes: Bytes) -> None:
        """New host memory: make it fit for fast copies before anything is copied from it."""
        self._copy_lane(lambda: self._device.register_host(self._terms.host_address + offset, size_bytes))

    def read(self, offsets: tuple[Bytes, ...]) -> None:
        """The control side has copied these tensors out of the reply slab."""
        self._replies.read(offsets)

    def peer_lost(self, address: str) -> None:
        """What is under way from there is not to be trusted: nobody waits for more of it, and the load fails."""
        for function in list(self._functions.values()):
            if function.arrival is not None and function.arrival.source == address:
                function.arrival.fail("the executor that it was copied from is gone")

    def on_copy_lane(self, work: Callable[[], None]) -> None:
        """Have something done between the copies."""
        self._copy_lane(work)

    def finish(self) -> None:
        """Do everything that was asked for, then give the device back."""
        self._computing.finish()
        self._copying.put(self._sweep)
        self._copying.finish()
        self._device.close()

    # -------------------------------------------------------------- the copy lane

    def _copy_lane(self, work: Callable[[], None]) -> None:
        def do() -> None:
            work()
            if not self._copying.busy:
                self._sweep()

        self._copying.put(do)

    def _make_way(self, name: FunctionId) -> None:
        function = self._functions.get(name)
        if function is not None:
            function.leaving = True

    def _load(self, function: _Function, asked: LoadImage, arrival: Arrival) -> None:
        command = asked.command
        refused = self._outside(command)
        if refused is not None:
            self._end_load(function, arrival, f"the load was refused: {refused.reason}", refused)
            return
        started = time.monotonic_ns()
        try:
            route = route_of(asked, self._terms.host_address)
            approach = self._approach(command, route)
            build_ns = function.runner.load(asked.extents, arrival, self._sweep, approach, route)
        except (Exception, SystemExit) as fault:
            message = self._said(fault, asked.directory)
            # Let go of those that wait, so that one which has begun ends and answers; then take the memory away.
            arrival.fail(message)
            self._answer_waiting(function, arrival, message)
            with function.running:
                function.runner.discard()
            failed = LoadFailed(self._executor, command.command, command.function, message)
            self._end_load(function, arrival, message, failed)
            return
        load_ns = time.monotonic_ns() - started - build_ns
        if self._terms.peers:
            self._send(ImageHeld(command.function, function.runner.held))
        self._send(LoadFinished(self._executor, command.command, command.function, load_ns, build_ns))

    def _approach(self, command: Load, route: Route) -> Approach:
        near = ImageNearlyArrived(self._executor, command.command, command.function)
        return Approach(command.lead_ns, self._links[route.kind], lambda: self._send(near))

    def _said(self, fault: BaseException, directory: str) -> str:
        if isinstance(fault, DormouseError):
            print(fault.message, file=sys.stderr)
            return without_paths(fault.message, directory)
        traceback.print_exc()
        return f"the module cannot be built: {one_line(fault)}"

    def _end_load(
        self, function: _Function, arrival: Arrival, message: str, event: LoadFailed | CommandRefused
    ) -> None:
        """Report a load that came to nothing, behind the failures of all that were asked to run with it."""
        arrival.fail(message)
        with function.waiting_lock:  # none is added between the last of them and the event
            for execution in function.taken(arrival):
                self._fail(execution, Reason.LOAD_FAILED, message)
            self._send(event)

    def _answer_waiting(self, function: _Function, arrival: Arrival, message: str) -> None:
        with function.waiting_lock:
            for execution in function.taken(arrival):
                self._fail(execution, Reason.LOAD_FAILED, message)

    def _evict(self, command: Evict) -> None:
        refused = self._outside(command)
        if refused is not None:
            self._send(refused)
            return
        function = self._functions.get(command.function)
        if function is not None:
            with function.running:
                lost = function.runner.evict()
            function.leaving = False
            if lost:
                print(f"{command.function}: {lost}", file=sys.stderr, flush=True)
        self._vacated.append(command)

    def _sweep(self) -> None:
        """Complete the evictions so far and report them."""
        if self._vacated:
            self._device.sweep()
            unaccounted_bytes = self._device.unaccounted_bytes()
            for command in self._vacated:
                self._send(EvictionFinished(self._executor, command.command, command.function, unaccounted_bytes))
            self._vacated.clear()

    def _forget(self, command: Forget) -> None:
        refused = self._outside(command)
        if refused is not None:
            self._send(refused)
            return
        function = self._functions.pop(command.function, None)
        if function is not None:
            with function.running:
                function.runner.forget()

    # -------------------------------------------------------------- the compute lane

    def _execute(self, function: _Function, execution: _Execution) -> None:
        if execution.arrival is not None:
            with suppress(ImageNotArrived):  # whoever failed the load has answered, or the run below is told the same
                execution.arrival.wait_begun()
        with function.running:
            if function.take(execution):
                self._answer(function.runner, execution)
        if function.runner.capture_overdue:
            self._capture(function, patient=False)
        self._plan_capture(function)

    def _plan_capture(self, function: _Function) -> None:
        """Nobody who waits is made to wait for a graph: it is captured when the lane is idle."""
        self._report(function)
        if function.runner.capture_wanted and not function.leaving and not function.capture_planned:
            function.capture_planned = True
            self._computing.put_when_idle(lambda: self._capture_when_idle(function))

    def _capture_when_idle(self, function: _Function) -> None:
        function.capture_planned = False
        self._capture(function, patient=True)
        self._plan_capture(function)

    def _capture(self, function: _Function, *, patient: bool) -> None:
        with function.running:
            if not function.leaving:
                function.runner.capture(lambda: function.leaving or (patient and self._computing.busy))

    def _report(self, function: _Function) -> None:
        held = function.runner.graphs
        if held != function.reported and self._functions.get(function.id) is function:
            function.reported = held
            self._send(GraphsHeld(function.id, *held))

    def _answer(self, runner: Runner, execution: _Execution) -> None:
        command = execution.asked.command
        refused = self._outside(command)
        if refused is not None:
            self._drop(command)
            self._send(refused)
            return
        started = time.monotonic_ns()
        try:
            outputs = self._run(runner, execution)
            device_ns = time.monotonic_ns() - started
            refs = self._replies.place(outputs)
        except DormouseError as fault:
            self._fail(execution, _REASONS.get(type(fault), Reason.EXECUTION_FAILED), fault.message)
        except (Exception, SystemExit) as fault:
            traceback.print_exc()
            self._fail(execution, Reason.EXECUTION_FAILED, f"the model failed: {one_line(fault)}")
            self._compute.check()
        else:
            self._drop(command)
            finished = ExecutionFinished(self._executor, command.command, command.request, device_ns, command.others)
            rows = rows_of((execution.asked.inputs, *execution.asked.others)) if command.padded_rows else ()
            self._send(ChunkReady(finished, refs, rows))

    def _drop(self, command: Execute) -> None:
        for request in command.requests:
            self._executions.pop(request, None)

    def _run(self, runner: Runner, execution: _Execution) -> dict[str, Output]:
        asked = execution.asked

        def emit(chunk: dict[str, Output]) -> bool:
            if not execution.cancelled:
                produced = ChunkProduced(self._executor, asked.command.command, asked.command.request)
                self._send(ChunkReady(produced, self._replies.place(chunk)))
            return not execution.cancelled

        if execution.arrival is None:
            raise ImageNotArrived(f"{asked.command.function} is not on the device")
        if execution.cancelled:
            answer: dict[str, Output] = {}
        elif asked.command.padded_rows:
            answer = self._run_together(runner, execution.arrival, asked)
        else:
            answer = runner.run(execution.arrival, self._inputs(asked), asked.outputs, emit)
        if execution.cancelled:
            raise _Cancelled("the client is gone")
        return answer

    def _run_together(self, runner: Runner, arrival: Arrival, asked: ExecuteRequest) -> dict[str, Output]:
        parts, padded_rows = (asked.inputs, *asked.others), asked.command.padded_rows
        inputs = joined(parts, padded_rows, self._requests)
        try:
            answer = runner.run(arrival, inputs, asked.outputs, no_chunks)
            return cut(answer, sum(rows_of(parts)), padded_rows)
        except Unbatchable as fault:
            print(f"{asked.command.function} is not run in batches: {fault.message}", file=sys.stderr, flush=True)
            raise

    def _inputs(self, asked: ExecuteRequest) -> Inputs:
        return {ref.name: self._input(ref) for ref in asked.inputs}

    def _input(self, ref: TensorRef) -> Value:
        with self._requests.view(ref.offset, ref.size_bytes) as data:
            return decoded(ref.datatype, ref.shape, data)

    # -------------------------------------------------------------- both

    def _runner(self, directory: Path) -> Runner:
        terms = self._terms
        return Runner(
            self._device,
            self._compute,
            directory,
            terms.host_address,
            terms.group_bytes,
            allow_code=terms.allow_code,
            poison=terms.poison,
            skeletons=self._skeletons,
        )

    def _fail(self, execution: _Execution, reason: Reason, message: str) -> None:
        command = execution.asked.command
        self._drop(command)
        failed = ExecutionFailed(self._executor, command.command, command.request, reason, message, command.others)
        self._send(failed)

    def _outside(self, command: ExecutorCommand) -> CommandRefused | None:
        """The refusal of a command that came outside its window."""
        now_ns = time.monotonic_ns()
        if command.earliest_ns <= now_ns <= command.latest_ns:
            return None
        reason = Reason.TOO_EARLY if now_ns < command.earliest_ns else Reason.TOO_LATE
        return CommandRefused(self._executor, command.command, reason)
