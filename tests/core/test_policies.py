"""Policies as their sources define them: Torpor's queueing, placement, eviction and late binding; and our own."""

import pytest

from dormouse.core.groups import PPM
from dormouse.core.messages import (
    Evict,
    Execute,
    ExecutionFinished,
    ExecutorJoined,
    ImageNearlyArrived,
    ImageRead,
    Load,
    LoadFinished,
    Refuse,
    Reply,
    RouteOpened,
    SetTimer,
    TimerFired,
)
from dormouse.core.policies import SETS, with_policies
from dormouse.core.recent import Recent
from dormouse.core.rhythm import UNKNOWN_NS, Rhythm
from dormouse.core.rrc import UPDATES_PER_ADAPTATION, artifact_metric, behind, regroup
from dormouse.core.state import Function, new_function
from dormouse.core.types import (
    DeviceId,
    ExecutorId,
    FunctionId,
    FunctionSpec,
    Link,
    Pair,
    Path,
    Pin,
    Reason,
    RequestId,
    Settings,
    Slo,
    Topology,
)
from tests.core.bench import GPU, MIB, MS, Bench, every, only

RATE = 1000 * MIB
"""A link carries 1 MiB in 1 ms."""
ONE, TWO, THREE = ExecutorId("cuda:0"), ExecutorId("cuda:1"), ExecutorId("cuda:2")


def topology(*devices: str, switches: tuple[tuple[str, ...], ...] = ()) -> Topology:
    links = tuple(Link(DeviceId(device), RATE) for device in devices)
    pairs = tuple(
        Pair(DeviceId(a), DeviceId(b), peer_bytes_per_s=10 * RATE) for a in devices for b in devices if a != b
    )
    shared = tuple(tuple(DeviceId(name) for name in switch) for switch in switches)
    return Topology(host_bytes_per_s=RATE, links=links, pairs=pairs, switches=shared)


def settings(*devices: str, switches: tuple[tuple[str, ...], ...] = (), **policies: object) -> Settings:
    known = topology(*(devices or (GPU,)), switches=switches)
    chosen: dict[str, object] = {"ahead_ns": -1, "replication": "none", **policies}
    return Settings(host_capacity_bytes=4000 * MIB, topology=known, **chosen)  # type: ignore[arg-type]


def serve(bench: Bench, name: str, device_ns: int = MS) -> None:
    """One request of a function, with whatever load it takes, to its end; twice where the first tells nothing."""
    bench.ask(name)
    for executor in list(bench.state.executors.values()):
        for load in [c for c in executor.pending.values() if isinstance(c, Load) and c.function == name]:
            if load.lead_ns < 2**62:
                bench.send(ImageNearlyArrived(executor.id, load.command, load.function))
            bench.send(LoadFinished(executor.id, load.command, load.function, 1))
    end(bench, name, device_ns)


def end(bench: Bench, name: str, device_ns: int = MS, *, after_ms: float = 1) -> list[object]:
    for executor in bench.state.executors.values():
        run = executor.executing
        if run is not None and run.function == name:
            finished = ExecutionFinished(executor.id, run.command, run.request, device_ns)
            return list(bench.send(finished, after_ms=after_ms))
    raise AssertionError(f"{name} does not run")


def known(bench: Bench, name: str, mib: int, computing_ms: int, *, slo_ms: int = 1000) -> None:
    """A function whose computing time has been measured, resident on some device."""
    bench.deploy(name, mib, slo_ms=slo_ms)
    bench.send(ImageRead(FunctionId(name)))
    serve(bench, name)
    serve(bench, name, computing_ms * MS)


# ------------------------------------------------------------------ counters


def test_what_happened_before_the_window_is_forgotten_in_parts() -> None:
    recent = Recent(window_ns=80)
    recent.ended(0, 10, in_time=True)
    recent.ended(5, 30, in_time=False)
    recent.ended(70, 20, in_time=True)
    assert (recent.sums(79).requests, recent.sums(79).in_time, recent.sums(79).mean_latency_ns) == (3, 2, 20)
    assert (recent.sums(85).requests, recent.sums(85).latency_ns) == (1, 20)
    assert recent.sums(200).requests == 0
    assert recent.sums(200).mean_latency_ns == 0


def test_without_a_window_nothing_is_forgotten() -> None:
    recent = Recent()
    recent.ended(0, 10, in_time=True)
    assert recent.sums(10**15).requests == 1


def test_a_rhythm_follows_the_gaps_and_a_long_silence_counts() -> None:
    rhythm = Rhythm()
    assert rhythm.gap_ns(5) == UNKNOWN_NS
    rhythm.asked(0)
    assert rhythm.gap_ns(5) == UNKNOWN_NS
    rhythm.asked(80)
    assert rhythm.gap_ns(90) == 80
    rhythm.asked(240)
    assert rhythm.gap_ns(250) == 90
    assert rhythm.gap_ns(1000) == 760


# ------------------------------------------------------------------ RRC


def counted(seen: int, in_time: int, latency_ns: int = 10, share_ppm: int = 980_000) -> Function:
    function = new_function(FunctionSpec(FunctionId("f/1"), 1, slo=Slo(1, share_ppm)), Settings(1, slo_window_ns=0))
    for number in range(seen):
        function.recent.ended(0, latency_ns, in_time=number < in_time)
    return function


def test_rrc_is_how_many_further_requests_in_time_a_function_needs() -> None:
    """(m + RRC)/(n + RRC) = p: 90 of 100 in time need 400 more for 98 %."""
    function = counted(100, 90)
    assert behind(function, 0) == 8 * PPM
    assert artifact_metric(function, 0) == 400 * 10
    more = counted(500, 490)
    assert behind(more, 0) == 0


def test_a_promise_of_every_request_does_not_divide_by_nothing() -> None:
    assert artifact_metric(counted(10, 9, share_ppm=PPM), 0) == PPM * 10


def asked_of(bench: Bench, name: str, seen: int, in_time: int, latency_ns: int = 10 * MS) -> None:
    function = bench.state.functions[FunctionId(name)]
    for number in range(seen):
        function.recent.ended(bench.now, latency_ns, in_time=number < in_time)


@pytest.fixture
def queues() -> Bench:
    """Three resident functions behind a busy device: one far behind its promise, one a little, one ahead of it."""
    bench = Bench(settings(queueing="torpor", slo_window_ns=0))
    bench.join(capacity_mib=200)
    for name in ("far/1", "near/1", "ahead/1", "busy/1"):
        bench.park(name)
        serve(bench, name)
    for name, in_time in (("far/1", 50), ("near/1", 97), ("ahead/1", 100)):
        asked_of(bench, name, 100, in_time)
    bench.ask("busy/1")
    return bench


def order_of(bench: Bench) -> list[str]:
    order: list[str] = []
    name = "busy/1"
    while bench.state.executors[GPU].executing is not None:
        end(bench, name)
        run = bench.state.executors[GPU].executing
        if run is not None:
            name = run.function
            order.append(name)
    return order


def test_in_the_high_group_the_furthest_behind_goes_first(queues: Bench) -> None:
    for name in ("ahead/1", "near/1", "far/1"):
        queues.ask(name)
    assert order_of(queues) == ["far/1", "near/1", "ahead/1"]


def test_the_low_group_is_served_last_and_its_nearest_first(queues: Bench) -> None:
    queues.state.groups.alpha_ppm = PPM // 1000
    queues.send(TimerFired(), after_ms=2001)
    assert queues.state.groups.low == {"far/1", "near/1"}
    for name in ("far/1", "near/1", "ahead/1"):
        queues.ask(name)
    assert order_of(queues) == ["ahead/1", "near/1", "far/1"]


def test_groups_change_the_order_of_what_waits_already(queues: Bench) -> None:
    for name in ("far/1", "ahead/1"):
        queues.ask(name)
    queues.state.groups.alpha_ppm = PPM // 1000
    queues.send(TimerFired(), after_ms=2001)
    assert order_of(queues) == ["ahead/1", "far/1"]


def test_a_budget_of_everything_leaves_nobody_in_the_low_group(queues: Bench) -> None:
    queues.send(TimerFired(), after_ms=2001)
    assert queues.state.groups.low == set()


def test_the_paper_orders_by_rrc_alone_and_the_artifact_by_latency_too() -> None:
    for policy, first in (("torpor-paper", "far/1"), ("torpor", "slow/1")):
        bench = Bench(settings(queueing=policy, slo_window_ns=0))
        bench.join(capacity_mib=200)
        for name in ("far/1", "slow/1", "busy/1"):
            bench.park(name)
            serve(bench, name)
        asked_of(bench, "far/1", 100, 90, latency_ns=MS)
        asked_of(bench, "slow/1", 100, 95, latency_ns=50 * MS)
        bench.ask("busy/1")
        bench.ask("far/1")
        bench.ask("slow/1")
        assert order_of(bench)[0] == first


@pytest.mark.parametrize(
    ("before_ppm", "compliant", "alpha_ppm", "expected"),
    [
        (PPM // 2, 3, PPM // 4, PPM // 2),  # twice as many keep their promise: twice the high group
        (PPM, 1, PPM // 2, PPM // 4),  # many fewer: half of it
        (PPM, 3, PPM // 2, PPM // 2 * 101 // 100),  # nothing has changed: a little more
        (PPM // 2, 3, PPM, PPM),  # never more than everybody
    ],
)
def test_the_threshold_follows_the_share_that_keeps_its_promise(
    before_ppm: int, compliant: int, alpha_ppm: int, expected: int
) -> None:
    bench = Bench(settings(queueing="torpor", slo_window_ns=0))
    for number in range(3):
        bench.park(f"f{number}/1")
        asked_of(bench, f"f{number}/1", 10, 10 if number < compliant else 0)
    groups = bench.state.groups
    groups.alpha_ppm, groups.recorded_ppm, groups.updates = alpha_ppm, before_ppm, UPDATES_PER_ADAPTATION - 1
    regroup(bench.state, bench.now)
    assert groups.alpha_ppm == expected


def test_a_node_without_functions_has_no_share_to_follow() -> None:
    bench = Bench(settings(queueing="torpor"))
    bench.state.groups.updates = UPDATES_PER_ADAPTATION - 1
    regroup(bench.state, 1)
    assert bench.state.groups.alpha_ppm == PPM


# ------------------------------------------------------------------ slack


@pytest.fixture
def slack() -> Bench:
    """A device that is busy for a while, and functions of 10 MiB that compute 5 ms."""
    bench = Bench(settings(queueing="slack"))
    bench.join(capacity_mib=200)
    for name in ("a/1", "b/1", "busy/1"):
        known(bench, name, 10, 5)
    bench.ask("busy/1")
    return bench


@pytest.mark.parametrize(
    ("long", "computing_ms", "expected"),
    [
        pytest.param("b/1", 90, ["a/1", "b/1"], id="long work with a later deadline does not go first"),
        pytest.param("a/1", 130, ["b/1", "a/1"], id="nor does what is longer than its deadline"),
    ],
)
def test_deadlines_make_the_order_of_what_can_be_in_time(
    slack: Bench, long: str, computing_ms: int, expected: list[str]
) -> None:
    slack.state.functions[FunctionId(long)].lead.computing_ns = computing_ms * MS
    slack.ask("b/1", deadline_ms=120)
    slack.ask("a/1", deadline_ms=100)
    assert order_of(slack) == expected


def test_what_cannot_be_in_time_goes_behind_what_can(slack: Bench) -> None:
    slack.ask("a/1", deadline_ms=8)
    slack.ask("b/1", deadline_ms=1000)
    slack.send(TimerFired(), after_ms=20)
    assert order_of(slack) == ["b/1", "a/1"]


def test_a_late_request_steps_aside_for_one_of_its_own_function_that_can_be_in_time(slack: Bench) -> None:
    slack.ask("a/1", deadline_ms=8)
    late = RequestId(slack.requests)
    slack.send(TimerFired(), after_ms=20)
    slack.ask("a/1", deadline_ms=1000)
    assert list(slack.state.functions[FunctionId("a/1")].queue)[-1] == late


def test_when_all_are_late_the_first_stays_first(slack: Bench) -> None:
    slack.ask("a/1", deadline_ms=8)
    first = RequestId(slack.requests)
    slack.ask("a/1", deadline_ms=8)
    slack.send(TimerFired(), after_ms=50)
    assert next(iter(slack.state.functions[FunctionId("a/1")].queue)) == first
    assert order_of(slack) == ["a/1", "a/1"]


# ------------------------------------------------------------------ shedding


def busy(*, shed_late: bool = True) -> Bench:
    """A device that is busy, and a resident function that computes 5 ms."""
    bench = Bench(settings(queueing="slack", shed_late=shed_late))
    bench.join(capacity_mib=200)
    for name in ("a/1", "busy/1"):
        known(bench, name, 10, 5)
    bench.ask("busy/1")
    return bench


def test_a_request_that_waits_at_its_deadline_is_shed_by_the_timer() -> None:
    bench = busy()
    timer = only(bench.ask("a/1", deadline_ms=8), SetTimer)
    assert timer.at_ns == bench.now + 8 * MS
    refusal = only(bench.send(TimerFired(), after_ms=8), Refuse)
    assert (refusal.request, refusal.reason, refusal.retry_after_ns) == (bench.requests, Reason.SHED, 1000 * MS)
    assert bench.state.functions[FunctionId("a/1")].ledger.refusals == {Reason.SHED: 1}


def test_without_shedding_it_is_answered_late() -> None:
    bench = busy(shed_late=False)
    bench.ask("a/1", deadline_ms=8)
    assert every(bench.send(TimerFired(), after_ms=50), Refuse) == []
    end(bench, "busy/1")
    assert [command.request for command in end(bench, "a/1") if isinstance(command, Reply)] == [bench.requests]


def test_what_runs_at_its_deadline_is_answered_and_still_has_its_timeout() -> None:
    bench = busy()
    end(bench, "busy/1")
    bench.ask("a/1", deadline_ms=8, timeout_ms=30)
    assert only(bench.send(TimerFired(), after_ms=8), SetTimer).at_ns == bench.now + 22 * MS
    assert only(bench.send(TimerFired(), after_ms=22), Refuse).reason is Reason.TIMEOUT


@pytest.mark.parametrize("computing_ms", [5, 20])
def test_what_could_not_be_in_time_on_an_idle_node_is_not_shed(computing_ms: int) -> None:
    bench = busy()
    bench.state.functions[FunctionId("a/1")].lead.computing_ns = computing_ms * MS
    bench.ask("a/1", deadline_ms=8)
    shed = every(bench.send(TimerFired(), after_ms=8), Refuse)
    assert len(shed) == (computing_ms == 5)


@pytest.mark.parametrize("in_host_memory", [True, False])
def test_what_waits_for_its_image_from_disk_is_not_shed(in_host_memory: bool) -> None:
    bench = busy()
    bench.park("before/1")
    bench.ask("before/1")  # takes the copy lane
    bench.deploy("cold/1")
    if in_host_memory:
        bench.send(ImageRead(FunctionId("cold/1")))
    bench.ask("cold/1", deadline_ms=15)
    shed = every(bench.send(TimerFired(), after_ms=15), Refuse)
    assert len(shed) == in_host_memory


# ------------------------------------------------------------------ eviction


def evicted(bench: Bench, name: str, mib: int) -> list[str]:
    bench.park(name, mib)
    return [str(c.function) for c in every(bench.ask(name), Evict)]


@pytest.fixture
def full() -> Bench:
    """Room for 40 MiB: a heavy function, used first, and two light ones."""
    bench = Bench(settings(eviction="torpor"))
    bench.join(capacity_mib=40)
    known(bench, "heavy/1", 20, 10)
    known(bench, "light/1", 10, 50)
    known(bench, "light/2", 10, 50)
    return bench


def test_light_functions_go_first_in_order_of_use(full: Bench) -> None:
    assert evicted(full, "new/1", 10) == ["light/1"]


def test_heavy_functions_go_when_light_ones_do_not_suffice(full: Bench) -> None:
    assert set(evicted(full, "new/1", 40)) == {"heavy/1", "light/1", "light/2"}


def test_a_heavy_function_with_another_replica_goes_like_a_light_one() -> None:
    bench = Bench(settings(ONE, TWO, eviction="torpor", replication="late"))
    bench.join(ONE, capacity_mib=30)
    bench.join(TWO, capacity_mib=30)
    for executor, peer in ((ONE, TWO), (TWO, ONE)):
        bench.send(RouteOpened(executor, peer))
    known(bench, "heavy/1", 20, 10)
    bench.ask("heavy/1")
    bench.ask("heavy/1")
    assert len(bench.state.functions[FunctionId("heavy/1")].residencies) == 2
    load = only([c for c in bench.state.executors[TWO].pending.values() if isinstance(c, Load)], Load)
    bench.send(LoadFinished(TWO, load.command, load.function, 1))
    end(bench, "heavy/1")
    end(bench, "heavy/1")
    known(bench, "other/1", 8, 4)
    holder = next(iter(bench.state.functions[FunctionId("other/1")].residencies))
    bench.park("big/1", 22)
    gone = every(bench.ask("big/1"), Evict)
    assert [c.function for c in gone if c.executor == holder] in (["heavy/1"], [])
    assert any(c.function == "heavy/1" for c in gone)


def test_ours_keeps_what_is_asked_often() -> None:
    bench = Bench(settings(eviction="least-missed"))
    bench.join(capacity_mib=40)
    for name in ("often/1", "seldom/1"):
        known(bench, name, 20, 10)
    for number in range(40):
        bench.send(TimerFired(), after_ms=20)
        serve(bench, "often/1")
        if number % 10 == 9:
            serve(bench, "seldom/1")
    assert evicted(bench, "new/1", 20) == ["seldom/1"], "although it was used later"


def test_ours_keeps_what_would_miss_its_deadline_if_it_came_from_the_host() -> None:
    bench = Bench(settings(eviction="least-missed"))
    bench.join(capacity_mib=40)
    known(bench, "tight/1", 20, 10, slo_ms=45)
    known(bench, "easy/1", 20, 10, slo_ms=1000)
    assert evicted(bench, "new/1", 20) == ["easy/1"]


def test_where_there_is_room_ours_evicts_nobody() -> None:
    bench = Bench(settings(eviction="least-missed"))
    bench.join(capacity_mib=40)
    known(bench, "a/1", 20, 10)
    assert evicted(bench, "new/1", 20) == []


# ------------------------------------------------------------------ placement


def joined(bench: Bench, *devices: ExecutorId, capacity_mib: int = 100) -> None:
    for device in devices:
        bench.send(ExecutorJoined(device, DeviceId(device), capacity_mib * MIB, 2 * MIB))


def placed(bench: Bench, name: str) -> str:
    bench.park(name)
    return str(only(bench.ask(name), Load).executor)


def test_a_device_whose_neighbour_loads_comes_last_unless_what_it_loads_is_light() -> None:
    switches = ((ONE, TWO),)
    bench = Bench(settings(ONE, TWO, THREE, switches=switches, placement="torpor"))
    joined(bench, ONE, TWO, THREE)
    assert placed(bench, "a/1") == ONE
    assert placed(bench, "b/1") == THREE, "the neighbour of the first loads"
    assert placed(bench, "c/1") == TWO, "there is no other"


def test_a_neighbour_that_loads_something_light_disturbs_less() -> None:
    bench = Bench(
        settings("cuda:0", "cuda:1", "cuda:2", "cuda:3", switches=((ONE, TWO), (THREE, "cuda:3")), placement="torpor")
    )
    joined(bench, ONE, TWO, THREE, ExecutorId("cuda:3"))
    known(bench, "light/1", 2, 90)
    bench.park("heavy/1")
    bench.state.functions[FunctionId("light/1")].residencies.clear()
    for executor in bench.state.executors.values():
        executor.recency.pop(FunctionId("light/1"), None)
        executor.free_bytes = executor.capacity_bytes
    assert only(bench.ask("heavy/1"), Load).executor == ONE
    assert only(bench.ask("light/1"), Load).executor == THREE
    assert placed(bench, "next/1") == "cuda:3", "beside the light one, not beside the heavy one"


def test_ours_fills_a_device_with_room_before_it_evicts_on_another() -> None:
    bench = Bench(settings(ONE, TWO, placement="quiet"))
    joined(bench, ONE, TWO, capacity_mib=20)
    for name, mib in (("a/1", 20), ("b/1", 10), ("c/1", 10)):
        known(bench, name, mib, 5)
    holders = [set(bench.state.functions[FunctionId(name)].residencies) for name in ("a/1", "b/1", "c/1")]
    assert holders == [{ONE}, {TWO}, {TWO}]


def test_of_devices_with_room_ours_takes_one_whose_neighbours_are_quiet() -> None:
    bench = Bench(settings(ONE, TWO, THREE, switches=((ONE, TWO),), placement="quiet"))
    joined(bench, ONE, TWO, THREE)
    assert placed(bench, "a/1") == ONE
    assert placed(bench, "b/1") == THREE


def test_at_random_is_somewhere_and_the_same_every_time() -> None:
    def places() -> list[str]:
        bench = Bench(settings(ONE, TWO, THREE, placement="random"))
        joined(bench, ONE, TWO, THREE)
        return [placed(bench, f"f{number}/1") for number in range(3)]

    assert sorted(places()) == [ONE, TWO, THREE]
    assert places() == places()


def test_a_device_that_does_not_load_ahead_loads_only_when_it_is_idle() -> None:
    bench = Bench(settings(load_ahead=False))
    bench.join(capacity_mib=100)
    known(bench, "a/1", 10, 5)
    bench.ask("a/1")
    bench.park("b/1")
    assert every(bench.ask("b/1"), Load) == []
    commands = end(bench, "a/1")
    assert [type(c).__name__ for c in commands if isinstance(c, Load | Execute)] == ["Load", "Execute"]


# ------------------------------------------------------------------ late binding


@pytest.fixture
def pair() -> Bench:
    bench = Bench(settings(ONE, TWO, eviction="torpor", replication="late"))
    joined(bench, ONE, TWO, capacity_mib=30)
    return bench


def test_a_function_that_waits_for_a_busy_device_comes_to_an_idle_one_at_once(pair: Bench) -> None:
    pair.send(RouteOpened(TWO, ONE))
    known(pair, "a/1", 10, 5)
    pair.ask("a/1")
    load = only(pair.ask("a/1"), Load)
    assert (load.executor, load.source, load.path) == (TWO, ONE, Path.BUILD)


def test_without_a_way_between_devices_it_comes_from_the_host(pair: Bench) -> None:
    known(pair, "a/1", 10, 5)
    pair.ask("a/1")
    load = only(pair.ask("a/1"), Load)
    assert (load.executor, load.source) == (TWO, None)


def test_room_is_made_for_it(pair: Bench) -> None:
    known(pair, "a/1", 20, 5)
    pair.ask("a/1")
    known(pair, "b/1", 20, 5)
    commands = pair.ask("a/1")
    assert [(c.executor, c.function) for c in every(commands, Evict)] == [(TWO, "b/1")]
    assert only(commands, Load).executor == TWO


def test_a_function_with_state_has_one_home_and_waits_for_it(pair: Bench) -> None:
    pair.deploy("s/1", 10, state_mib=1)
    pair.send(ImageRead(FunctionId("s/1")))
    serve(pair, "s/1")
    pair.ask("s/1")
    assert every(pair.ask("s/1"), Load) == []


def test_what_is_arriving_on_a_second_device_does_not_come_to_a_third() -> None:
    bench = Bench(settings(ONE, TWO, THREE, replication="late"))
    joined(bench, ONE, TWO, THREE)
    known(bench, "a/1", 10, 5)
    bench.ask("a/1")
    assert len(every(bench.ask("a/1"), Load)) == 1
    assert every(bench.ask("a/1"), Load) == []


def test_where_no_room_can_be_made_it_waits(pair: Bench) -> None:
    known(pair, "a/1", 20, 5)
    pair.ask("a/1")
    pair.park("pinned/1", 20, pin=Pin.DEVICE)
    load = only([c for c in pair.state.executors[TWO].pending.values() if isinstance(c, Load)], Load)
    pair.send(LoadFinished(TWO, load.command, load.function, 1))
    assert every(pair.ask("a/1"), Load) == []


@pytest.mark.parametrize("makes_room", [True, False])
def test_a_copy_that_pays_makes_room_only_where_the_settings_say_so(makes_room: bool) -> None:
    replication = "worthwhile-evicting" if makes_room else "worthwhile"
    bench = Bench(settings(ONE, TWO, eviction="lru", replication=replication))
    joined(bench, ONE, TWO, capacity_mib=30)
    bench.send(RouteOpened(TWO, ONE))
    known(bench, "a/1", 20, 50)
    bench.ask("a/1")
    known(bench, "b/1", 20, 5)
    commands = bench.ask("a/1", deadline_ms=3, after_ms=5)
    assert [c.function for c in every(commands, Evict)] == (["b/1"] if makes_room else [])
    assert [c.executor for c in every(commands, Load)] == ([TWO] if makes_room else [])


# ------------------------------------------------------------------ sets


@pytest.mark.parametrize("name", sorted(SETS))
def test_a_set_of_policies_can_be_had_by_name_and_serves(name: str) -> None:
    bench = Bench(with_policies(name, Settings(host_capacity_bytes=100 * MIB)))
    bench.join(capacity_mib=40)
    known(bench, "a/1", 10, 5)
    assert bench.state.functions[FunctionId("a/1")].ledger.requests == 2


def test_a_set_changes_nothing_but_policies() -> None:
    plain = Settings(host_capacity_bytes=100 * MIB, queue_length=7)
    assert with_policies("torpor", plain).queue_length == 7
    with pytest.raises(KeyError):
        with_policies("mine", plain)
