"""The world: one ordered heap of things to come, virtual time, and the real core in the middle of it.

The third shell over the core. Same scenario and seed, same history, to the last command. Executors answer as real ones
do (``executor``), copies share links (``network``), and what goes wrong is drawn beforehand (``faults``).
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

from dormouse.core.groups import Groups
from dormouse.core.ledger import Ledger
from dormouse.core.messages import (
    Acknowledge,
    Cancel,
    Command,
    DeleteImage,
    DropImage,
    Event,
    Evict,
    Execute,
    ExecutorCommand,
    ExecutorJoined,
    ExecutorLost,
    Forget,
    FunctionDeployed,
    ImageRead,
    Load,
    ReadImage,
    Refuse,
    Reply,
    RequestArrived,
    RouteOpened,
    SetTimer,
    TimerFired,
)
from dormouse.core.recent import Recent
from dormouse.core.scheduler import Scheduler
from dormouse.core.types import (
    Bytes,
    DeviceId,
    ExecutorId,
    FunctionId,
    FunctionSpec,
    Limits,
    Ns,
    OperationId,
    RequestId,
    Settings,
)
from dormouse.sim.executor import SimulatedExecutor
from dormouse.sim.hardware import Device, Machine, Model
from dormouse.sim.network import Copy, Link, Network, Route

SECOND_NS: Ns = 1_000_000_000
RESTART_NS: Ns = 3_000_000_000
"""From the loss of an executor to the next one on its device."""

Watcher = Callable[[Ns, Event, list[Command]], None]


class World:
    """``watch`` is called after every event, with the commands it brought forth."""

    def __init__(
        self,
        machine: Machine,
        settings: Settings,
        functions: Sequence[tuple[FunctionId, Model]],
        *,
        limits: Limits | None = None,
        watch: Watcher | None = None,
    ) -> None:
        self.core = Scheduler(settings)
        self.now: Ns = 0
        self.requests = 0
        self.events = 0
        self.machine = machine
        self.executors: dict[ExecutorId, SimulatedExecutor] = {}
        self.functions = [function for function, _ in functions]
        self._models = dict(functions)
        self.watch = watch
        self._heap: list[tuple[Ns, int, Callable[[], None]]] = []
        self._numbers = count()
        self._timer: object = None
        self._network = Network()
        self._ends: dict[Copy, Callable[[], None]] = {}
        self._next_end: tuple[Copy, Ns] | None = None
        self._wire_free_ns: dict[ExecutorId, Ns] = {}
        self._held_until_ns: dict[ExecutorId, Ns] = {}
        self._lost: set[ExecutorId] = set()
        self.links = {device.name: Link(device.name, device.link_bytes_per_s) for device in machine.devices}
        self.links |= {name: Link(name, bytes_per_s) for name, bytes_per_s in machine.uplinks.items()}
        self.links |= {name: Link(name, bytes_per_s) for name, bytes_per_s in machine.peers.items()}
        self._disk = Link("disk", machine.disk_bytes_per_s)
        for device in machine.devices:
            self._join(device)
        for number, (function, model) in enumerate(functions):
            spec = FunctionSpec(function, model.image_bytes, slo=model.slo, pin=model.pin, limits=limits or Limits())
            self.tell(FunctionDeployed(OperationId(number), spec))
        self.settle()

    # ------------------------------------------------------------------ time

    def settle(self) -> None:
        """Let everything happen that has been begun, but for timers far away."""
        while self._heap and self.core.state.reading:
            self._step()

    def run(self, arrivals: Iterator[tuple[Ns, int]]) -> None:
        """Requests for functions by number, at points in time from now on in ascending order; until all have ended."""
        began_ns = self.now
        for at_ns, number in arrivals:
            self.until(began_ns + at_ns)
            self.request(self.functions[number])
        while self._heap and self.core.state.requests:
            self._step()

    def warm(self) -> None:
        """Ask every function once, as many at a time as there are devices, and forget that."""
        width = len(self.executors)
        for first in range(0, len(self.functions), width):
            for function in self.functions[first : first + width]:
                self.request(function)
            while self._heap and self.core.state.requests:
                self._step()
            self.until(self.now + SECOND_NS)
        self.forget_history()

    def forget_history(self) -> None:
        """How functions were served so far does not count: ledgers and what policies have concluded begin anew. Where
        images are, what computing takes and how often functions are asked stays known."""
        state = self.core.state
        for function in state.functions.values():
            function.ledger, function.recent = Ledger(), Recent(state.settings.slo_window_ns)
        state.groups, state.refresh_at_ns = Groups(), self.now

    def until(self, at_ns: Ns) -> None:
        """Everything up to a point in time."""
        heap = self._heap
        while heap and heap[0][0] <= at_ns:
            due_ns, _, act = heappop(heap)
            self.now = max(self.now, due_ns)
            act()
        self.now = max(self.now, at_ns)

    def _step(self) -> None:
        at_ns, _, act = heappop(self._heap)
        self.now = max(self.now, at_ns)
        act()

    def later(self, delay_ns: Ns, act: Callable[[], None]) -> None:
        heappush(self._heap, (self.now + delay_ns, next(self._numbers), act))

    def at(self, at_ns: Ns, act: Callable[[], None]) -> None:
        """Do something at a point in time, counted from the world's beginning."""
        heappush(self._heap, (at_ns, next(self._numbers), act))

    # ------------------------------------------------------------------ the core

    def request(self, function: FunctionId) -> RequestId:
        self.requests += 1
        request = RequestId(self.requests)
        self.tell(RequestArrived(request, function))
        return request

    def tell(self, event: Event) -> None:
        """Give the core an event now, and perform what it commands."""
        self.events += 1
        commands = self.core.handle(self.now, event)
        for command in commands:
            self._perform(command)
        if self.watch is not None:
            self.watch(self.now, event, commands)

    def report(self, event: Event) -> None:
        self.later(self.machine.hop_ns, lambda: self._hear(event))

    def _hear(self, event: Event) -> None:
        """What a dead executor had still said is lost with it, and so is what was said of it."""
        if self._lost and {getattr(event, "executor", None), getattr(event, "peer", None)} & self._lost:
            return
        self.tell(event)

    def _perform(self, command: Command) -> None:
        match command:
            case Load() | Execute() | Evict() | Cancel() | Forget():
                self._send(command)
            case SetTimer():
                self._set_timer(command.at_ns)
            case ReadImage():
                size_bytes = self._models[command.function].image_bytes
                self.copy(size_bytes, ([self._disk],), lambda: self.tell(ImageRead(command.function)))
            case Reply() | Refuse() | Acknowledge() | DropImage() | DeleteImage():
                pass

    def _send(self, command: ExecutorCommand) -> None:
        executor = self.executors[command.executor]
        due_ns = max(self.now + self.machine.hop_ns, self._held_until_ns.get(command.executor, 0))
        self.at(due_ns, lambda: executor.obey(command))

    def _set_timer(self, at_ns: Ns) -> None:
        timer = self._timer = object()

        def fire() -> None:
            if self._timer is timer:
                self._timer = None
                self.tell(TimerFired())

        self.at(max(at_ns, self.now), fire)

    # ------------------------------------------------------------------ devices and links

    def model_of(self, function: FunctionId) -> Model:
        return self._models[function]

    def copy(self, size_bytes: Bytes, routes: tuple[Route, ...], ended: Callable[[], None]) -> Copy:
        copy = self._network.start(self.now, size_bytes, routes)
        self._ends[copy] = ended
        self._await_copies()
        return copy

    def _await_copies(self) -> None:
        first = self._network.next()
        due = None if first is None else (first, first.ends_ns)
        if due is None or due == self._next_end:
            return
        self._next_end = due
        self.at(due[1], lambda: self._copies_end(due))

    def _copies_end(self, due: tuple[Copy, Ns]) -> None:
        if due != self._next_end:
            return  # something has changed since
        copy = due[0]
        self._next_end = None
        self._network.end(self.now, copy)
        ended = self._ends.pop(copy)
        ended()
        self._await_copies()

    def _join(self, device: Device) -> None:
        name = ExecutorId(device.name)
        self.executors[name] = SimulatedExecutor(name, device, self)
        self._lost.discard(name)
        capacity = device.capacity_bytes // device.chunk_bytes * device.chunk_bytes
        self.tell(ExecutorJoined(name, DeviceId(device.name), capacity, device.chunk_bytes))
        for other in self.executors.values():
            if other.alive and other.id != name:
                self._introduce(name, other.id)
                self._introduce(other.id, name)

    def _introduce(self, name: ExecutorId, peer: ExecutorId) -> None:
        """Where there is a link between two devices, memory can be copied over it, and a detour taken."""
        self.executors[name].lost_peers.discard(peer)
        if f"{peer}>{name}" in self.machine.peers:
            self.report(RouteOpened(name, peer, detours=self.machine.detours))

    def ways_of(self, load: Load) -> tuple[Route, ...]:
        if load.source is not None:
            return ([self.links[f"{load.source}>{load.executor}"]],)
        own = self._host_way(load.executor)
        detours = [[*self._host_way(helper), self.links[f"{helper}>{load.executor}"]] for helper in load.helpers]
        return (own, *detours)

    def _host_way(self, name: ExecutorId) -> list[Link]:
        device = self.executors[name].device
        return [self.links[device.name]] + ([self.links[device.uplink]] if device.uplink else [])

    # ------------------------------------------------------------------ what goes wrong

    def lose(self, name: ExecutorId, restart_ns: Ns = RESTART_NS) -> None:
        """An executor dies with everything it had, and comes back empty."""
        executor = self.executors.get(name)
        if executor is None or not executor.alive:
            return
        executor.alive = False
        self._lost.add(name)
        for other in self.executors.values():
            other.lost_peers.add(name)
        self.tell(ExecutorLost(name, "killed"))
        self.later(restart_ns, lambda: self._join(executor.device))

    def hold(self, name: ExecutorId, duration_ns: Ns) -> None:
        """Commands to an executor are stuck for a while, and then come late, in the order in which they were sent."""
        self._held_until_ns[name] = max(self._held_until_ns.get(name, 0), self.now + duration_ns)

    def slow(self, link: Link, factor: float, duration_ns: Ns) -> None:
        """A link is so many times slower for a while."""
        usual = link.bytes_per_s
        self._change(link, usual / factor)
        self.later(duration_ns, lambda: self._change(link, link.bytes_per_s * factor))

    def _change(self, link: Link, bytes_per_s: float) -> None:
        self._network.change(self.now, link, bytes_per_s)
        self._next_end = None
        self._await_copies()

    def jump(self, duration_ns: Ns) -> None:
        """The clock leaps: everything that was due meanwhile is late."""
        self.now += duration_ns
