"""The simulated world behaves as a real node does, and the same way every time."""

from collections.abc import Iterator

import pytest

from dormouse import workload
from dormouse.core.messages import (
    Command,
    CommandRefused,
    Event,
    Execute,
    ExecutionFinished,
    ImageRead,
    Load,
    Refuse,
    Reply,
)
from dormouse.core.types import FunctionId, Path, Reason, Settings, Slo
from dormouse.journal import encode_commands
from dormouse.sim.campaign import run
from dormouse.sim.faults import Faults, inject
from dormouse.sim.hardware import MIB, MS_NS, Device, Machine, Model
from dormouse.sim.world import World

GB = 10**9
SECOND_NS = 10**9
DEVICE = Device("gpu:0", 96 * MIB, GB, chunk_bytes=2 * MIB)
MODEL = Model("m", 40 * MIB, 10 * MS_NS, 3 * MS_NS, Slo(200 * MS_NS))
COPY_NS = 40 * MIB


class Recorder:
    """What happened, and the replies by request."""

    def __init__(self) -> None:
        self.history: list[tuple[int, Event, list[Command]]] = []

    def __call__(self, now: int, event: Event, commands: list[Command]) -> None:
        self.history.append((now, event, commands))

    def commands(self, kind: type[Command]) -> list[tuple[int, Command]]:
        return [(now, c) for now, _, commands in self.history for c in commands if isinstance(c, kind)]


def world_of(functions: int = 3, device: Device = DEVICE, **changes: object) -> tuple[World, Recorder]:
    recorder = Recorder()
    names = [(FunctionId(f"f{number}/1"), MODEL) for number in range(functions)]
    machine = Machine((device,), hop_ns=50_000)
    return World(machine, Settings(GB, **changes), names, watch=recorder), recorder  # type: ignore[arg-type]


def at(*moments_ms: tuple[float, int]) -> Iterator[tuple[int, int]]:
    return iter([(round(ms * MS_NS), number) for ms, number in moments_ms])


def latencies(recorder: Recorder) -> list[float]:
    arrived = {e.request: now for now, e, _ in recorder.history if hasattr(e, "request") and "Arrived" in str(type(e))}
    return [(now - arrived[c.request]) / MS_NS for now, c in recorder.commands(Reply) if isinstance(c, Reply)]


def test_a_first_request_takes_hops_copy_and_tail_a_second_only_hops_and_computing() -> None:
    world, recorder = world_of()
    world.run(at((0, 0), (500, 0)))
    first, second = latencies(recorder)
    assert first == pytest.approx(COPY_NS / MS_NS + 3 + 2 * 0.05, abs=0.001)
    assert second == pytest.approx(10 + 2 * 0.05, abs=0.001)


def test_a_warm_world_has_images_where_they_were_used_and_no_history() -> None:
    world, recorder = world_of()
    world.warm()
    functions = list(world.core.state.functions.values())
    assert [f.ledger.requests for f in functions] == [f.recent.sums(world.now).requests for f in functions] == [0, 0, 0]
    assert sum(bool(f.residencies) for f in functions) == 2, "as many as fit"
    (resident,) = [f.id for f in functions[-1:]]
    began_ns = world.now
    world.run(at((0, world.functions.index(resident))))
    assert latencies(recorder)[-1] == pytest.approx(10 + 2 * 0.05, abs=0.001)
    assert world.now - began_ns < SECOND_NS


def test_a_run_that_begins_on_what_has_come_takes_longer_than_one_that_finds_everything() -> None:
    device = Device("gpu:0", 96 * MIB, 100 * GB, chunk_bytes=2 * MIB)
    model = Model("m", 40 * MIB, 10 * MS_NS, 0, Slo(), streamed_ns=12 * MS_NS)
    recorder = Recorder()
    world = World(Machine((device,), hop_ns=0), Settings(GB), [(FunctionId("f/1"), model)], watch=recorder)
    world.run(at((0, 0), (500, 0)))
    assert latencies(recorder) == [12.0, 10.0]


def test_a_function_that_must_make_room_evicts_and_is_answered() -> None:
    world, recorder = world_of()
    world.run(at((0, 0), (500, 1), (1000, 2), (1500, 0)))
    assert len(latencies(recorder)) == 4
    assert sum(f.ledger.evictions for f in world.core.state.functions.values()) == 2


def test_the_next_function_loads_while_one_computes() -> None:
    world, recorder = world_of()
    world.run(at((0, 0), (200, 0), (200.01, 1)))
    loads = [now for now, c in recorder.commands(Load) if isinstance(c, Load)]
    runs = [now for now, e, _ in recorder.history if isinstance(e, ExecutionFinished)]
    assert loads[1] < runs[1], "the copy lane is free while the compute lane is not"


def test_neighbours_behind_one_switch_slow_each_other() -> None:
    recorder = Recorder()
    devices = tuple(Device(f"gpu:{n}", 96 * MIB, GB, uplink="switch", chunk_bytes=2 * MIB) for n in (0, 1))
    machine = Machine(devices, {"switch": GB})
    world = World(machine, Settings(GB), [(FunctionId(f"f{n}/1"), MODEL) for n in (0, 1)], watch=recorder)
    world.run(at((0, 0), (0, 1)))
    assert max(latencies(recorder)) == pytest.approx(2 * COPY_NS / MS_NS + 3 + 0.1, rel=0.01)


def test_a_lost_executor_comes_back_and_its_request_is_answered() -> None:
    world, recorder = world_of()
    world.at(world.now + 10 * MS_NS, lambda: world.lose(next(iter(world.executors))))
    world.run(at((0, 0)))
    (latency,) = latencies(recorder)
    assert latency > 3000


def test_a_failed_load_is_tried_again() -> None:
    world, recorder = world_of()
    next(iter(world.executors.values())).fail_next_load = "out of memory"
    world.run(at((0, 0)))
    assert len(recorder.commands(Load)) == 2
    assert latencies(recorder)[0] == pytest.approx(1.5 * COPY_NS / MS_NS + 3, rel=0.05)


def test_commands_that_come_after_their_window_are_refused_and_the_request_times_out() -> None:
    world, recorder = world_of()
    world.run(at((0, 0)))
    world.hold(next(iter(world.executors)), 100 * SECOND_NS)
    world.request(world.functions[0])
    world.until(world.now + 200 * SECOND_NS)
    (refusal,) = [c for _, c in recorder.commands(Refuse) if isinstance(c, Refuse)]
    assert refusal.reason is Reason.TIMEOUT
    assert not world.core.state.requests


def test_a_shorter_hold_does_not_let_a_command_overtake_those_that_are_held() -> None:
    world, recorder = world_of(ahead_ns=20 * MS_NS)
    (executor,) = world.executors
    for second in (1, 2):
        world.request(world.functions[0])
        world.until(second * SECOND_NS)
    world.hold(executor, 100 * SECOND_NS)
    world.request(world.functions[0])
    world.hold(executor, SECOND_NS)
    world.request(world.functions[0])
    world.until(world.now + 110 * SECOND_NS)
    sent = [command.command for _, command in recorder.commands(Execute) if isinstance(command, Execute)]
    ended = [event.command for _, event, _ in recorder.history if isinstance(event, ExecutionFinished | CommandRefused)]
    assert len(sent) == 4
    assert ended == sent


def test_after_a_leap_of_the_clock_what_was_due_comes_late_and_in_order() -> None:
    world, recorder = world_of()
    world.at(world.now + 5 * MS_NS, lambda: world.jump(2 * SECOND_NS))
    world.run(at((0, 0), (1000, 1)))
    times = [now for now, _, _ in recorder.history]
    assert times == sorted(times)
    assert len(latencies(recorder)) == 2


def test_the_same_seed_gives_the_same_commands_byte_for_byte() -> None:
    def history() -> bytes:
        world, recorder = world_of(6)
        inject(world, Faults(30, 30, 30, 0, 30), 10 * SECOND_NS, 5)
        world.run(workload.gamma([2.0] * 6, 3.0, 10 * SECOND_NS, 5))
        return encode_commands([c for _, _, commands in recorder.history for c in commands])

    assert history() == history()


def test_everything_is_asked_of_the_compute_lane_one_at_a_time() -> None:
    world, recorder = world_of()
    world.run(workload.poisson([20.0] * 3, 3 * SECOND_NS, 1))
    running = 0
    for _, event, commands in recorder.history:
        running -= isinstance(event, ExecutionFinished)
        running += sum(isinstance(c, Execute) for c in commands)
        assert 0 <= running <= 1


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_under_faults_the_invariants_hold_and_every_request_ends_once(first: int) -> None:
    for seed in range(first, first + 20):
        run(seed)


def test_a_campaign_sees_every_path_and_every_kind_of_fault() -> None:
    seen = sum((run(seed) for seed in range(101, 125)), start=run(100))
    for what in (
        "ExecutorLost",
        "LoadFailed",
        "CommandRefused",
        "RequestCancelled",
        *(f"path {p}" for p in (Path.RESIDENT, Path.HOST, Path.DISK, Path.BUILD)),
    ):
        assert seen[what], f"{what} never happened"


def test_reads_share_the_disk() -> None:
    recorder = Recorder()
    names = [(FunctionId(f"f{number}/1"), MODEL) for number in range(2)]
    World(Machine((DEVICE,), disk_bytes_per_s=GB), Settings(GB, concurrent_reads=2), names, watch=recorder)
    read = [now for now, e, _ in recorder.history if isinstance(e, ImageRead)]
    assert read[-1] == pytest.approx(2 * COPY_NS, rel=0.001)


def test_an_image_that_is_due_is_read_ahead_of_its_request() -> None:
    """Three functions for two places in host memory; one of them is asked every ten seconds."""
    paths = {}
    for host_tier in ("lru", "interval"):
        recorder = Recorder()
        names = [(FunctionId(f"f{number}/1"), MODEL) for number in range(3)]
        settings = Settings(90 * MIB, host_tier=host_tier)
        machine = Machine((DEVICE,), hop_ns=50_000)
        world = World(machine, settings, names, watch=recorder)
        others = ((10_000 * n + 1000 * after, 1 + after % 2) for n in range(30) for after in (2, 3, 4, 5))
        world.run(at(*sorted([(10_000 * n, 0) for n in range(30)] + list(others))))
        found = world.core.state.functions[FunctionId("f0/1")].ledger
        paths[host_tier] = found.promotions_used
    assert paths["lru"] == 0
    assert paths["interval"] > 0
