"""Random histories: whatever happens in whatever order, the books balance and every request ends exactly once."""

from itertools import permutations
from typing import TypeAlias

from hypothesis import Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dormouse.core.binding import BINDING
from dormouse.core.eviction import EVICTION
from dormouse.core.messages import (
    Acknowledge,
    Cancel,
    ChunkProduced,
    Command,
    CommandRefused,
    DeleteImage,
    DropImage,
    Event,
    Evict,
    Execute,
    ExecutorJoined,
    ExecutorLost,
    Forget,
    FunctionDeployed,
    ImageRead,
    ImageReadFailed,
    Load,
    LoadRequested,
    ReadImage,
    Refuse,
    RemovalRequested,
    Reply,
    RequestArrived,
    RequestCancelled,
    RouteOpened,
    SetTimer,
    TimerFired,
    UnloadRequested,
)
from dormouse.core.placement import PLACEMENT
from dormouse.core.queueing import QUEUEING
from dormouse.core.replication import REPLICATION
from dormouse.core.scheduler import Scheduler
from dormouse.core.tiering import HOST_TIER
from dormouse.core.types import (
    Batch,
    DeviceId,
    ExecutorId,
    FunctionId,
    FunctionSpec,
    Limits,
    OperationId,
    Pin,
    Reason,
    RequestId,
    Settings,
    Slo,
    Topology,
    round_up,
)
from dormouse.journal import encode_commands
from dormouse.sim import invariants
from tests.core.device_model import DeviceModel

PAGE = 2
CHUNK = 4
EXECUTORS = [ExecutorId("gpu:0"), ExecutorId("gpu:1"), ExecutorId("gpu:2")]
FUNCTIONS = [FunctionId(f"f{n}/1") for n in range(6)]


BATCHES = st.builds(Batch, st.integers(1, 5), st.integers(0, 12))
SPECS = st.builds(
    FunctionSpec,
    st.sampled_from(FUNCTIONS),
    image_bytes=st.integers(1, 17),
    state_bytes=st.integers(0, 1),
    slo=st.builds(Slo, st.integers(1, 60)),
    pin=st.sampled_from([Pin.NONE, Pin.NONE, Pin.NONE, Pin.HOST, Pin.DEVICE]),
    limits=st.just(Limits(5, 80)),
    batch=BATCHES,
)


Chosen: TypeAlias = tuple[str, str, str, str, bool, int, str, str]
POLICIES = st.tuples(
    st.sampled_from(sorted(QUEUEING)),
    st.sampled_from(sorted(PLACEMENT)),
    st.sampled_from(sorted(EVICTION)),
    st.sampled_from(sorted(REPLICATION)),
    st.booleans(),
    st.sampled_from([0, 50]),
    st.sampled_from(sorted(BINDING)),
    st.sampled_from(sorted(HOST_TIER)),
)
"""Queueing, placement, eviction, replication; whether devices load ahead; the window of the SLO; binding; host tier."""


class Histories(RuleBasedStateMachine):
    """The world outside the core: clients, two devices, a host store, an administrator, and a clock."""

    @initialize(
        host=st.integers(8, 40), policies=POLICIES, last=st.booleans(), furnished=st.booleans(), shed=st.booleans()
    )
    def start(self, host: int, policies: Chosen, last: bool, furnished: bool, shed: bool) -> None:
        self.settings = Settings(
            host_capacity_bytes=host,
            host_page_bytes=PAGE,
            host_is_last=last,
            queueing=policies[0],
            placement=policies[1],
            eviction=policies[2],
            replication=policies[3],
            load_ahead=policies[4],
            shed_late=shed,
            slo_window_ns=policies[5],
            binding=policies[6],
            host_tier=policies[7],
            queue_length=12,
            executor_grace_ns=50,
            command_window_ns=1000,
            topology=Topology(10**9, 4 * 10**9, 10**9, detour_ns=0),
            detour_pause_ns=3,
        )
        self.core = Scheduler(self.settings)
        self.now = 0
        self.timer: int | None = None
        self.history: list[tuple[int, Event, bytes]] = []
        self.devices: dict[ExecutorId, DeviceModel] = {}
        self.sizes: dict[FunctionId, int] = {}
        self.reads: list[FunctionId] = []
        self.device_ns: dict[FunctionId, int] = {}
        """By function: what its executions have taken, to be found in its ledger to the nanosecond."""
        self.open: set[RequestId] = set()
        self.operations: set[OperationId] = set()
        self.serial = 0
        if furnished:
            self.furnish()

    def furnish(self) -> None:
        """Two devices that know each other, and two functions in host memory: what most histories never come to."""
        for executor in EXECUTORS[:2]:
            self.join(executor, 6)
        for executor, peer in permutations(EXECUTORS[:2], 2):
            self.post(RouteOpened(executor, peer, detours=True))
        for function in FUNCTIONS[:2]:
            self.deploy(FunctionSpec(function, image_bytes=4, slo=Slo(20), limits=Limits(5, 80)), "new")
            while self.reads:
                self.post(ImageRead(self.reads.pop(0)))

    # -------------------------------------------------------------- the shell

    def post(self, event: Event) -> None:
        self.now += 1
        commands = self.core.handle(self.now, event)
        self.history.append((self.now, event, encode_commands(commands)))
        for command in commands:
            self.perform(command)
        invariants.check_victims(self.core.state, {c.function for c in commands if isinstance(c, Evict)})

    def perform(self, command: Command) -> None:
        match command:
            case Load() | Execute() | Evict() | Cancel() | Forget():
                self.devices[command.executor].obey(command)
            case ReadImage():
                self.reads.append(command.function)
            case DropImage():
                heads = [d.copy_lane[0] for d in self.devices.values() if d.copy_lane]
                copying = [c.function for c in heads if isinstance(c, Load) and c.source is None]
                assert command.function not in copying, "dropped under a copy"
            case Reply():
                assert command.request in self.open
                if command.final:
                    self.open.remove(command.request)
            case Refuse():
                self.open.remove(command.request)
            case Acknowledge():
                self.operations.remove(command.operation)
            case SetTimer():
                self.timer = command.at_ns
            case DeleteImage():
                assert command.function not in self.reads, "deleted while it is being read"
                assert not any(command.function in d.mapped for d in self.devices.values()), "deleted while resident"

    def operation(self) -> OperationId:
        self.serial += 1
        self.operations.add(OperationId(self.serial))
        return OperationId(self.serial)

    # -------------------------------------------------------------- what clients and administrators do

    @rule(spec=SPECS, kind=st.sampled_from(["new", "new", "restored", "restored unavailable"]))
    def deploy(self, spec: FunctionSpec, kind: str) -> None:
        if spec.id not in self.core.state.functions:
            self.device_ns[spec.id] = 0
            self.sizes[spec.id] = round_up(spec.image_bytes, CHUNK)
        self.post(FunctionDeployed(self.operation(), spec, kind != "new", kind != "restored unavailable"))

    @rule(
        function=st.sampled_from(FUNCTIONS),
        deadline=st.none() | st.integers(0, 30),
        timeout=st.none() | st.integers(0, 40),
        priority=st.integers(0, 2),
        shape=st.tuples(st.integers(1, 6), st.sampled_from(["", "x", "x", "x", "y"])),
    )
    def ask(
        self, function: FunctionId, deadline: int | None, timeout: int | None, priority: int, shape: tuple[int, str]
    ) -> None:
        self.serial += 1
        request = RequestId(self.serial)
        self.open.add(request)
        at = [None if d is None else self.now + d for d in (deadline, timeout)]
        self.post(RequestArrived(request, function, at[0], at[1], priority, *shape))

    @rule(function=st.sampled_from(FUNCTIONS[:2]), count=st.integers(2, 4), deadline=st.integers(0, 30))
    def rush(self, function: FunctionId, count: int, deadline: int) -> None:
        """More than one device serves at a time."""
        for _ in range(count):
            self.ask(function, deadline, None, 0, (1, ""))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.open)))
        self.open.remove(request)
        self.post(RequestCancelled(request))

    @rule(function=st.sampled_from(FUNCTIONS), kind=st.sampled_from([LoadRequested, UnloadRequested, RemovalRequested]))
    def operate(
        self, function: FunctionId, kind: type[LoadRequested] | type[UnloadRequested] | type[RemovalRequested]
    ) -> None:
        self.post(kind(self.operation(), function))

    # -------------------------------------------------------------- what devices, disks and clocks do

    @rule(executor=st.sampled_from(EXECUTORS), chunks=st.integers(2, 6))
    def join(self, executor: ExecutorId, chunks: int) -> None:
        if executor not in self.devices:
            self.devices[executor] = DeviceModel(executor, chunks * CHUNK, self.sizes, others=self.devices)
            self.post(ExecutorJoined(executor, DeviceId(executor), chunks * CHUNK, CHUNK))

    @precondition(lambda self: len(self.devices) > 1)
    @rule(data=st.data(), detours=st.booleans())
    def introduce(self, data: st.DataObject, detours: bool) -> None:
        executor, peer = data.draw(st.sampled_from(list(permutations(sorted(self.devices), 2))))
        self.post(RouteOpened(executor, peer, detours))

    @precondition(lambda self: self.devices)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        executor = data.draw(st.sampled_from(sorted(self.devices)))
        del self.devices[executor]
        for device in self.devices.values():
            device.peer_lost(executor)
        self.post(ExecutorLost(executor, "injected"))

    @precondition(lambda self: any(d.copy_lane for d in self.devices.values()))
    @rule(data=st.data(), fails=st.integers(0, 4))
    def copy(self, data: st.DataObject, fails: int) -> None:
        device = data.draw(st.sampled_from([d for d in self.devices.values() if d.copy_lane]))
        head = device.copy_lane[0]
        if fails >= 2 and (near := device.approach()) is not None:
            self.post(near)
        elif fails == 0 and isinstance(head, Load):
            for event in device.fail_load():
                self.post(event)
        elif fails == 1 and isinstance(head, Load):
            self.post(CommandRefused(device.id, device.refuse_load().command, Reason.TOO_LATE))
        else:
            self.post(device.finish_copy())

    @precondition(lambda self: any(d.compute_lane for d in self.devices.values()))
    @rule(
        data=st.data(),
        ending=st.sampled_from(["finish", "finish", "finish", "fail", "chunk", "refuse", "mixed up"]),
        device_ns=st.integers(1, 20),
    )
    def compute(self, data: st.DataObject, ending: str, device_ns: int) -> None:
        device = data.draw(st.sampled_from([d for d in self.devices.values() if d.compute_lane]))
        command = device.compute_lane[0]
        if ending == "fail" or not device.can_run(command):
            self.post(device.fail_execution())
        elif ending == "mixed up" and command.padded_rows:
            self.post(device.cannot_split())
        elif ending == "chunk" and not command.padded_rows:
            self.post(ChunkProduced(device.id, command.command, command.request))
        elif ending == "refuse":
            device.compute_lane.popleft()
            self.post(CommandRefused(device.id, command.command, Reason.TOO_LATE))
        else:
            self.device_ns[command.function] = self.device_ns.get(command.function, 0) + device_ns
            self.post(device.finish_execution(device_ns))

    @precondition(lambda self: self.reads)
    @rule(fails=st.integers(0, 4))
    def read(self, fails: int) -> None:
        function = self.reads.pop(0)
        self.post(ImageReadFailed(function, "injected") if fails == 0 else ImageRead(function))

    @rule(duration=st.integers(1, 30))
    def wait(self, duration: int) -> None:
        end = self.now + duration
        while self.timer is not None and self.timer <= end:
            self.now, self.timer = max(self.now, self.timer), None
            self.post(TimerFired())
        self.now = max(self.now, end)

    # -------------------------------------------------------------- what must hold

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "core"):
            invariants.check(self.core.state)
            waiting = {r.id for r in self.core.state.requests.values() if r.state.value != "abandoned"}
            assert waiting == self.open
            for function in self.core.state.functions.values():
                assert function.ledger.device_ns == self.device_ns[function.id]

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.let_everything_end()
            self.replay()

    def let_everything_end(self) -> None:
        """With devices there and nothing failing, every request and every operation ends."""
        for executor in EXECUTORS:
            if executor not in self.devices:
                self.devices[executor] = DeviceModel(executor, 6 * CHUNK, self.sizes, others=self.devices)
                self.post(ExecutorJoined(executor, DeviceId(executor), 6 * CHUNK, CHUNK))
        for _ in range(2000):
            busy = [d for d in self.devices.values() if d.compute_lane or d.copy_lane]
            if self.reads:
                self.post(ImageRead(self.reads.pop(0)))
            elif busy:
                device = busy[0]
                self.post(self.next_end(device))
            elif self.timer is not None and self.open:
                self.now, self.timer = max(self.now, self.timer), None
                self.post(TimerFired())
            else:
                break
            self.books_balance()
        assert not self.open, f"requests without an end: {self.open}"
        assert not self.operations, f"operations without an end: {self.operations}"
        assert not self.core.state.requests

    def next_end(self, device: DeviceModel, device_ns: int = 1) -> Event:
        if not device.compute_lane:
            return device.finish_copy()
        runs = device.can_run(device.compute_lane[0])
        if not runs:
            return device.fail_execution()
        self.device_ns[device.compute_lane[0].function] += device_ns
        return device.finish_execution(device_ns)

    def replay(self) -> None:
        """The same again, by a core that never remembers that there was no room, and by one that does."""
        again, forgetful = Scheduler(self.settings), Scheduler(self.settings)
        for now, event, commands in self.history:
            assert encode_commands(again.handle(now, event)) == commands
            for executor in forgetful.state.executors.values():
                executor.full_for = None
            assert encode_commands(forgetful.handle(now, event)) == commands


class BusyHistories(Histories):
    """The same world in the midst of its work: two devices, five small functions in host memory, and much is asked."""

    @initialize(policies=POLICIES, batches=st.lists(BATCHES, min_size=5, max_size=5), shed=st.booleans())
    def begin(self, policies: Chosen, batches: list[Batch], shed: bool) -> None:
        self.start(40, policies, last=False, furnished=False, shed=shed)
        for executor in EXECUTORS:
            self.join(executor, 3)
        for function, batch in zip(FUNCTIONS, batches, strict=False):
            self.deploy(FunctionSpec(function, 6, slo=Slo(20), limits=Limits(8, 200), batch=batch), "new")
            self.post(ImageRead(self.reads.pop(0)))

    @rule(function=st.sampled_from(FUNCTIONS[:5]), rows=st.lists(st.integers(1, 3), min_size=2, max_size=5))
    def crowd(self, function: FunctionId, rows: list[int]) -> None:
        for count in rows:
            self.ask(function, None, None, 0, (count, "x"))

    @rule(steps=st.integers(1, 6), device_ns=st.integers(1, 20))
    def go_on(self, steps: int, device_ns: int) -> None:
        for _ in range(steps):
            for device in self.devices.values():
                if device.copy_lane and (near := device.approach()) is not None:
                    self.post(near)
                if device.compute_lane or device.copy_lane:
                    self.post(self.next_end(device, device_ns))


QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Shrinking such histories takes minutes; add Phase.shrink by hand to understand a failure."""

TestHistories = Histories.TestCase
TestHistories.settings = hypothesis_settings(max_examples=150, stateful_step_count=60, deadline=None, phases=QUICK)

TestBusyHistories = BusyHistories.TestCase
TestBusyHistories.settings = hypothesis_settings(max_examples=60, stateful_step_count=60, deadline=None, phases=QUICK)
