"""One call of the door: the state, the time, and the commands it has brought forth so far. Made once, used again.

The steps here are the only ones that change a residency, a lane, an image or a request, so each keeps its books in
one place. They decide nothing: who takes which step is the business of the files that call them.
"""

from dataclasses import dataclass, field
from heapq import heapify, heappush

from dormouse.core.batching import gathers_until_ns, padded_rows
from dormouse.core.eviction import Eviction
from dormouse.core.messages import (
    Acknowledge,
    Cancel,
    Command,
    DropImage,
    Evict,
    Execute,
    ExecutorCommand,
    Load,
    ReadImage,
    Refuse,
    Reply,
)
from dormouse.core.placement import NOTHING, Placement, Standing, standing
from dormouse.core.queueing import Queueing
from dormouse.core.ready import LAST, Key, ReadyQueue
from dormouse.core.shedding import may_wait_until_ns
from dormouse.core.state import (
    ABSENT,
    ARRIVING,
    BEGIN,
    EXECUTE,
    EXECUTED,
    IN_HOST_MEMORY,
    PINNED,
    RESIDENCY_TRANSITIONS,
    RESIDENT,
    RUNNING,
    STREAMING,
    Executor,
    Function,
    ImageChange,
    ImageState,
    Request,
    RequestChange,
    RequestState,
    Residency,
    ResidencyChange,
    State,
    step,
)
from dormouse.core.tiering import HostTier, put_in_order
from dormouse.core.types import (
    FOREVER_NS,
    Bytes,
    CommandId,
    ExecutorId,
    FunctionId,
    Ns,
    OperationId,
    Path,
    Reason,
    RequestId,
)


@dataclass(frozen=True, slots=True)
class Policies:
    """What the configuration chose by name."""

    queueing: Queueing
    placement: Placement
    eviction: Eviction
    host_tier: HostTier
    one_queue: bool = False
    """All devices are served from one queue; else each lane has its own."""


@dataclass(slots=True)
class Turn:
    state: State
    policies: Policies
    now: Ns = 0
    commands: list[Command] = field(default_factory=list)

    # ------------------------------------------------------------------ where a function waits

    def settle(self, function: Function) -> None:
        """Put a function into the queues where its next step is decided; call it after whatever may move it."""
        if function.waits_in:
            for queue in function.waits_in:
                queue.discard(function.id)
            function.waits_in.clear()
        gathered_until_ns, function.gathers_until_ns = function.gathers_until_ns, None
        if function.residencies:
            if not self.policies.one_queue:
                self._settle_on_devices(function, gathered_until_ns)
            elif function.queue and not function.is_engaged:
                self._wait_in(self.state.homeless, function)
            if function.parking and function.image is ImageState.DISK:
                self._wait_in(self.state.cold, function)
        elif (stands := standing(function)) is not NOTHING:
            self._wait_in(self.state.homeless if stands is Standing.LOAD else self.state.cold, function)

    def _settle_on_devices(self, function: Function, gathered_until_ns: Ns | None) -> None:
        for name, residency in function.residencies.items():
            executor = self.state.executors[name]
            executor.full_for = None
            if function.queue:
                self.state.stirred[name] = executor
                if residency.state is RESIDENT or residency.state is RUNNING:
                    if not (function.spec.batch.wait_ns and self._gather(function, executor, gathered_until_ns)):
                        self._wait_in(executor.ready, function)
                elif residency.state is ARRIVING:
                    self._wait_in(executor.arriving, function)

    def _gather(self, function: Function, executor: Executor, before: Ns | None) -> bool:
        """Let the first request wait for company, if it may; ``before``: until when it has done so till now."""
        until_ns = function.gathers_until_ns = gathers_until_ns(function, executor, self.now)
        if until_ns is None:
            return False
        if until_ns != before:
            heappush(self.state.gatherings, (until_ns, function.id))
        return True

    def _wait_in(self, queue: ReadyQueue, function: Function) -> None:
        self._put(queue, function)
        function.waits_in.append(queue)

    def _put(self, queue: ReadyQueue, function: Function) -> None:
        arrange = self.policies.queueing.arrange
        if arrange is not None:
            arrange(self.state, function, self.now)
        head = function.head
        queue.put(function.id, LAST if head is None else self.key_of(function, head))

    def key_of(self, function: Function, head: Request) -> Key:
        """Where a function stands in the order of work now."""
        return self.policies.queueing.key(self.state, function, head, self.now)

    def most_urgent(self, queue: ReadyQueue) -> Function | None:
        """Who is first in a queue now; where keys change with time, those that were first are looked at again."""
        while (name := queue.first()) is not None:
            function = self.state.functions[name]
            if not function.queue or not self.policies.queueing.passing:
                return function
            known = queue.keys[name]
            self._put(queue, function)
            if queue.keys[name] == known:
                return function
        return None

    # ------------------------------------------------------------------ commands to executors

    def number(self) -> CommandId:
        """The next command's serial number."""
        number = self.state.next_command
        self.state.next_command += 1
        return CommandId(number)

    def _send(self, executor: Executor, command: ExecutorCommand) -> None:
        executor.pending[command.command] = command
        self.commands.append(command)

    def load(
        self,
        function: Function,
        executor: Executor,
        source: ExecutorId | None = None,
        helpers: tuple[ExecutorId, ...] = (),
    ) -> None:
        """Begin to copy an image in, from host memory or another executor's device; its room must be free."""
        by_peer = source is not None
        path = Path.PEER if by_peer else Path.DISK if function.from_disk else Path.HOST
        if function.id not in executor.built:
            path = Path.BUILD
        size_bytes = executor.region_bytes(function.spec)
        residency = Residency(size_bytes, path, by_peer, source, helpers, load_started_ns=self.now)
        assert executor.may_load, f"{executor.id} copies {executor.copying or executor.lent_to} already"
        assert residency.size_bytes <= executor.free_bytes, f"{executor.id} has no room for {function.id}"
        function.residencies[executor.id] = executor.recency[function.id] = residency
        self._change(function, executor, ResidencyChange.LOAD)
        executor.free_bytes -= residency.size_bytes
        if function.spec.pin is PINNED:
            self.pin(executor, residency.size_bytes)
        executor.copying = function.id
        executor.known.add(function.id)
        function.from_disk = False
        self._borrow(function, executor, residency)
        latest, lead_ns = self.now + self.state.settings.command_window_ns, function.lead.lead_ns
        if self.policies.one_queue or not self.state.settings.load_ahead:
            lead_ns = FOREVER_NS
        number = self.number()
        self._send(executor, Load(executor.id, number, function.id, path, self.now, latest, lead_ns, source, helpers))
        if lead_ns >= FOREVER_NS:
            self._change(function, executor, ResidencyChange.NEARLY_ARRIVED)
        self.settle(function)

    def near(self, function: Function, executor: Executor) -> None:
        """A run may begin on what has come so far."""
        self._change(function, executor, ResidencyChange.NEARLY_ARRIVED)
        self.settle(function)

    def _borrow(self, function: Function, executor: Executor, residency: Residency) -> None:
        """Hold on to what a load needs of others."""
        if residency.source is not None:
            assert residency.source in executor.routes, f"{executor.id} cannot copy from {residency.source}"
            function.residencies[residency.source].feeds.add(executor.id)
        for name in residency.helpers:
            helper = self.state.executors[name]
            assert executor.routes[name] and helper.may_load, f"{name} cannot lend {executor.id} its link"
            helper.lent_to = executor.id

    def give_back(self, function: Function, executor: Executor) -> None:
        """The load needs nothing of others any more."""
        residency = function.residencies[executor.id]
        source = None if residency.source is None else function.residencies.get(residency.source)
        if source is not None:
            source.feeds.discard(executor.id)
            self.look_again()  # it may be evicted now
        for name in residency.helpers:
            helper = self.state.executors.get(name)
            if helper is not None and helper.lent_to == executor.id:
                helper.lent_to = None
        residency.source, residency.helpers = None, ()

    def pin(self, executor: Executor, size_bytes: Bytes) -> None:
        """Chunks that a pin keeps from now on, or gives back."""
        executor.pinned_bytes += size_bytes
        self.look_again()

    def look_again(self) -> None:
        """What could not be placed may be placeable now, or nowhere ever."""
        for executor in self.state.executors.values():
            executor.full_for = None

    def end_load(self, function: Function, executor: Executor, change: ResidencyChange) -> None:
        """The copy lane is free again; a failed load has given its chunks back."""
        assert executor.copying == function.id, f"{executor.id} was not copying {function.id}"
        executor.copying = None
        self.give_back(function, executor)
        residency = function.residencies[executor.id]
        if change is ResidencyChange.LOADED:
            residency.loaded_ns = self.now
        else:
            executor.free_bytes += residency.size_bytes
        self._change(function, executor, change)

    def execute(self, function: Function, executor: Executor, requests: list[Request]) -> None:
        """Start these requests of a function as one on an executor where it is resident or arriving; or, if the lane
        is taken, queue them behind what runs there."""
        assert executor.ahead is None, f"{executor.id} has {executor.ahead} to do already"
        residency = function.residencies[executor.id]
        for request in requests:
            self._begin(request, function, residency)
            request.executor = executor.id
        executor.recency.move_to_end(function.id)
        if function.image is IN_HOST_MEMORY:
            self.state.host_recency.move_to_end(function.id)
        if residency.state is not RUNNING:
            self._change(function, executor, EXECUTE)
        first = requests[0]
        others: tuple[RequestId, ...] = ()
        padded = 0
        latest = first.timeout_ns
        if first.alike:
            others = tuple(request.id for request in requests[1:])
            padded = padded_rows(function, executor, requests)
            latest = max(request.timeout_ns for request in requests)  # when nobody waits any more
        number = self.number()
        command = Execute(executor.id, number, first.id, function.id, self.now, latest, others, padded)
        if executor.executing is None:
            executor.executing = command
        else:
            executor.ahead = command
        self._send(executor, command)
        self.settle(function)

    def _begin(self, request: Request, function: Function, residency: Residency) -> None:
        del function.queue[request.id]
        self.state.queued -= 1
        request.streamed = residency.state is ARRIVING
        waited_for_load = request.streamed or residency.loaded_ns > request.arrived_ns
        request.path = residency.path if waited_for_load else Path.RESIDENT
        request.change(BEGIN)
        request.started_ns = self.now
        request.attempts += 1

    def end_execution(self, command: Execute, executor: Executor, reason: Reason | None = None) -> Function:
        """The compute lane is free for what is queued behind. ``reason`` says why, unless it ran to its end."""
        assert executor.executing is command, f"{executor.id} was not executing {command.request}"
        self.state.stirred[executor.id] = executor
        function = self.state.functions[command.function]
        streams = function.residencies[executor.id].state is STREAMING
        broken = streams and reason is Reason.LOAD_FAILED
        self._change(function, executor, ResidencyChange.BREAK if broken else EXECUTED)
        executor.executing, executor.ahead = executor.ahead, None
        if executor.executing is not None:
            self._advance(executor.executing, executor)
        return function

    def _advance(self, command: Execute, executor: Executor) -> None:
        """What was queued behind has begun."""
        function = self.state.functions[command.function]
        if function.residencies[executor.id].state is RESIDENT:  # its own run was before it
            self._change(function, executor, EXECUTE)
        for request in command.requests:
            self.state.requests[request].started_ns = self.now

    def evict(self, function: Function, executor: Executor, cause: FunctionId | None = None) -> None:
        """Give a function's chunks back; they may be promised to the next load, of ``cause``, at once."""
        self._change(function, executor, ResidencyChange.EVICT)
        residency = function.residencies[executor.id]
        executor.free_bytes += residency.size_bytes
        function.ledger.evicted(self.now - residency.loaded_ns)
        self._send(executor, Evict(executor.id, self.number(), function.id, cause=cause))
        self.settle(function)

    def end_eviction(self, function: Function, executor: Executor) -> None:
        self._change(function, executor, ResidencyChange.EVICTED)

    def _change(self, function: Function, executor: Executor, change: ResidencyChange) -> None:
        residency = function.residencies[executor.id]
        residency.state = step(RESIDENCY_TRANSITIONS, residency.state, change)
        executor.full_for = None
        if residency.state is ABSENT:
            if function.spec.pin is PINNED:
                self.pin(executor, -residency.size_bytes)
            del function.residencies[executor.id], executor.recency[function.id]

    # ------------------------------------------------------------------ commands to the host store

    def read_image(self, function: Function) -> None:
        """Begin to bring an image to host memory; its room must be free."""
        assert function.host_bytes <= self.state.host_free_bytes, f"no host memory for {function.id}"
        function.change_image(ImageChange.READ)
        self.unpark(function)
        self.state.host_used_bytes += function.host_bytes
        self.state.reading += 1
        function.read_started_ns = self.now
        self.commands.append(ReadImage(function.id))
        self.settle(function)

    def end_read(self, function: Function, change: ImageChange) -> None:
        function.change_image(change)
        self.state.reading -= 1
        if change is ImageChange.ARRIVED:
            function.from_disk = bool(function.queue)
            self.state.host_recency[function.id] = None
            self.state.disk.measured(function.spec.image_bytes, self.now - function.read_started_ns)
            function.ledger.read(function.spec.image_bytes)
            if self.policies.host_tier.learns:
                put_in_order(self.state, function, self.now)
        else:
            self._end_promotion(function)
            self.state.host_used_bytes -= function.host_bytes

    def drop_image(self, function: Function) -> None:
        """Free an image's pages at once."""
        function.change_image(ImageChange.DROP)
        self.state.host_used_bytes -= function.host_bytes
        del self.state.host_recency[function.id]
        self.state.far.discard(function.id)
        self._end_promotion(function)
        self.commands.append(DropImage(function.id))
        self.settle(function)

    def _end_promotion(self, function: Function) -> None:
        """An image that was read ahead of its request is gone before it came."""
        function.ledger.promotions_unused += function.promoted
        function.promoted = False

    def park(self, function: Function) -> None:
        """Promise to bring an image to host memory."""
        if not function.parking:
            function.parking = True
            self.state.parking_bytes += function.host_bytes

    def unpark(self, function: Function) -> None:
        if function.parking:
            function.parking = False
            self.state.parking_bytes -= function.host_bytes

    # ------------------------------------------------------------------ requests

    def enqueue(self, request: Request) -> None:
        function = self.state.functions[request.function]
        function.queue[request.id] = request
        self.state.queued += 1
        timeouts, requests = self.state.timeouts, self.state.requests
        heappush(timeouts, (may_wait_until_ns(self.state, function, request), request.id))
        if len(timeouts) > 2 * len(requests) + 64:
            timeouts[:] = [entry for entry in timeouts if entry[1] in requests]
            heapify(timeouts)
        # Else it waits already, for the sake of its first request, and not for company.
        if (
            len(function.queue) == 1
            or function.gathers_until_ns is not None
            or self.policies.queueing.arrange is not None
        ):
            self.settle(function)

    def requeue(self, request: Request, reason: Reason, message: str) -> None:
        """Start over a request that did not run to its end, unless it has begun to answer or has failed too often."""
        function = self.state.functions[request.function]
        if request.state is RequestState.ABANDONED:
            del self.state.requests[request.id]
        elif request.chunks or request.attempts >= self.state.settings.attempts:
            self.refuse(request, reason, message)
        else:
            request.change(RequestChange.REQUEUE)
            request.executor = None
            function.queue[request.id] = request
            function.queue.move_to_end(request.id, last=False)
            self.state.queued += 1

    def set_apart(self, request: Request) -> None:
        """Start over, without the others, a request that failed among them; this is none of its attempts."""
        request.attempts -= 1
        request.alone = True
        self.requeue(request, Reason.EXECUTION_FAILED, "")

    def dequeue(self, request: Request) -> None:
        """Take a waiting request out of its queue."""
        function = self.state.functions[request.function]
        del function.queue[request.id]
        self.state.queued -= 1
        self.settle(function)

    def reply(self, request: Request, device_ns: Ns, *, final: bool, part_ns: Ns = 0, in_time: bool = True) -> None:
        queued_ns = request.started_ns - request.began_ns
        self.commands.append(Reply(request.id, final, request.path, queued_ns, device_ns, part_ns, in_time))

    def refuse(self, request: Request, reason: Reason, message: str, retry_after_ns: Ns = 0) -> None:
        """End a request that is in no queue and on no lane (or is about to leave it)."""
        del self.state.requests[request.id]
        self.state.functions[request.function].refused(self.now, self.now - request.began_ns, reason, request.guest)
        self.commands.append(Refuse(request.id, reason, message, retry_after_ns))

    def abandon(self, request: Request) -> None:
        """Nobody waits for it any more; its lane stays taken until it ends."""
        assert request.executor is not None
        request.change(RequestChange.ABANDON)
        executor = self.state.executors[request.executor]
        self.commands.append(Cancel(executor.id, self.number(), request.id))

    def refuse_queue(self, function: Function, reason: Reason, message: str, retry_after_ns: Ns = 0) -> None:
        """End every request that waits for a function."""
        for request in tuple(function.queue.values()):
            self.dequeue(request)
            self.refuse(request, reason, message, retry_after_ns)

    # ------------------------------------------------------------------ operations

    def acknowledge(self, operations: list[OperationId], reason: Reason | None = None, message: str = "") -> None:
        self.commands.extend(Acknowledge(operation, reason, message) for operation in operations)
        operations.clear()
