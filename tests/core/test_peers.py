"""Several devices: copies from one to another, borrowed links, and what happens when the other one is lost."""

import pytest

from dormouse.core.messages import (
    Command,
    Evict,
    Execute,
    ExecutionFailed,
    ExecutionFinished,
    ExecutorLost,
    ImageRead,
    Load,
    LoadFailed,
    LoadFinished,
    Reply,
    RequestArrived,
    RouteOpened,
    SetTimer,
    TimerFired,
    UnloadRequested,
)
from dormouse.core.state import ResidencyState
from dormouse.core.types import (
    DeviceId,
    ExecutorId,
    FunctionId,
    Link,
    Pair,
    Path,
    Pin,
    Reason,
    RequestId,
    Settings,
    Topology,
)
from tests.core.bench import MIB, MS, Bench, every, only
from tests.core.test_devices import Device

ONE, TWO = ExecutorId("cuda:0"), ExecutorId("cuda:1")
MEASURED = Topology(
    detour_ns=MS,
    links=(Link(DeviceId(ONE), 1000 * MIB), Link(DeviceId(TWO), 1000 * MIB)),
    pairs=(
        Pair(DeviceId(ONE), DeviceId(TWO), peer_bytes_per_s=5000 * MIB, detour_bytes_per_s=900 * MIB),
        Pair(DeviceId(TWO), DeviceId(ONE), peer_bytes_per_s=0, detour_bytes_per_s=900 * MIB),
    ),
)
"""10 MiB take 10 ms from the host, 2 ms from ``ONE`` to ``TWO``, and there is no way back."""


@pytest.fixture
def bench() -> Bench:
    """Two devices that know each other, and functions that are parked and were built on both."""
    bench = Bench(Settings(host_capacity_bytes=400 * MIB, topology=MEASURED, ahead_ns=-1))
    for executor in (ONE, TWO):
        bench.join(executor, capacity_mib=30)
    for name in ("a/1", "b/1", "c/1"):
        bench.park(name)
        for known in bench.state.executors.values():
            known.built.add(FunctionId(name))
    for executor, peer in ((ONE, TWO), (TWO, ONE)):
        bench.send(RouteOpened(executor, peer, detours=True))
    return bench


def running_on_one(bench: Bench, name: str = "a/1") -> Device:
    """A function that is resident on the first device and keeps it busy."""
    bench.ask(name)
    one = Device(bench, ONE)
    one.loaded()
    return one


def loads(commands: list[Command]) -> list[tuple[str, str, str | None, Path]]:
    return [(c.executor, c.function, c.source, c.path) for c in every(commands, Load)]


FROM_ONE = [("cuda:1", "a/1", "cuda:0", Path.PEER)]


# ------------------------------------------------------------------ when a function comes to a second device


def test_a_request_that_would_miss_its_deadline_behind_a_busy_device_gets_a_copy_from_there(bench: Bench) -> None:
    running_on_one(bench)
    commands = bench.ask("a/1", deadline_ms=2, after_ms=3)
    assert loads(commands) == FROM_ONE
    assert only(commands, Execute).executor == TWO


def test_a_request_in_time_waits_until_the_wait_is_long_beside_the_copy(bench: Bench) -> None:
    running_on_one(bench)
    running = bench.state.executors[ONE].executing
    assert running is not None
    began = bench.state.requests[running.request].started_ns
    commands = bench.ask("a/1")
    assert loads(commands) == []
    wake = only(commands, SetTimer).at_ns
    assert wake == began + 3 * 2 * MS + 1
    assert loads(bench.send(TimerFired(), after_ms=(wake - bench.now) / MS)) == FROM_ONE


def test_the_core_wakes_when_a_deadline_makes_the_wait_too_long(bench: Bench) -> None:
    running_on_one(bench)
    commands = bench.ask("a/1", deadline_ms=4, after_ms=0.5)
    wake = only(commands, SetTimer).at_ns
    assert wake == bench.now + 4 * MS
    assert loads(bench.send(TimerFired(), after_ms=4)) == FROM_ONE


def test_the_core_does_not_wake_for_a_device_that_is_lost(bench: Bench) -> None:
    """Found by the fault campaign: it woke again and again, at a time that had passed."""
    running_on_one(bench)
    bench.ask("a/1", deadline_ms=50)
    wake = bench.state.replicate_at_ns
    assert wake is not None
    bench.send(ExecutorLost(TWO, "killed"))
    commands = bench.send(TimerFired(), after_ms=100)
    assert all(timer.at_ns > bench.now for timer in every(commands, SetTimer))


def test_what_is_left_of_a_usual_run_is_known_and_a_short_rest_is_waited_for(bench: Bench) -> None:
    one = running_on_one(bench)
    (run,) = one.pending(Execute)
    assert isinstance(run, Execute)
    bench.send(ExecutionFinished(ONE, run.command, run.request, 20 * MS))
    bench.ask("a/1")
    assert loads(bench.ask("a/1", after_ms=19)) == [], "one millisecond is left"
    assert bench.state.replicate_at_ns is not None
    (run,) = one.pending(Execute)
    assert isinstance(run, Execute)
    bench.send(ExecutionFinished(ONE, run.command, run.request, 20 * MS))
    assert loads(bench.ask("a/1", after_ms=1)) == FROM_ONE, "nineteen are left"


def test_a_long_queue_counts_as_waiting(bench: Bench) -> None:
    one = running_on_one(bench)
    (run,) = one.pending(Execute)
    assert isinstance(run, Execute)
    bench.send(ExecutionFinished(ONE, run.command, run.request, 4 * MS))
    bench.ask("a/1")
    assert loads(bench.ask("a/1", after_ms=1)) == [], "three are left, and six would be worth it"
    assert loads(bench.ask("a/1", after_ms=0.5)) == FROM_ONE, "two and a half, and four more for the one before"


def test_a_function_that_waits_behind_another_is_copied_too() -> None:
    bench = Bench(Settings(host_capacity_bytes=400 * MIB, topology=MEASURED, ahead_ns=-1))
    bench.join(ONE, capacity_mib=30)
    one = Device(bench, ONE)
    for name in ("a/1", "b/1"):
        bench.park(name)
        one.serve(name)
    bench.join(TWO, capacity_mib=30)
    bench.send(RouteOpened(TWO, ONE))
    bench.ask("b/1")
    assert loads(bench.ask("a/1", deadline_ms=0, after_ms=3)) == [("cuda:1", "a/1", "cuda:0", Path.BUILD)]


def test_devices_that_wait_for_nothing_get_nothing(bench: Bench) -> None:
    one = running_on_one(bench)
    assert loads(bench.send(TimerFired(), after_ms=50)) == [], "nothing more was asked"
    one.executed()
    assert loads(bench.send(TimerFired(), after_ms=50)) == []


def test_the_core_wakes_for_the_device_that_is_worth_it_first(bench: Bench) -> None:
    bench.join("cuda:2", capacity_mib=20)
    bench.send(RouteOpened(ExecutorId("cuda:2"), ONE))
    bench.state.functions[FunctionId("a/1")].build_ns = 50 * MS
    running_on_one(bench)
    bench.ask("a/1")
    wake = bench.state.replicate_at_ns
    assert wake is not None
    assert wake < bench.now + 10 * MS, "the third device would have to build it"


def test_a_copy_needs_room_that_is_free(bench: Bench) -> None:
    two = Device(bench, TWO)
    bench.park("d/1", 28)
    running_on_one(bench)
    bench.ask("d/1")
    two.loaded()
    two.executed()
    assert loads(bench.ask("a/1", deadline_ms=0, after_ms=9)) == []
    assert every(bench.ask("a/1", deadline_ms=0, after_ms=9), Evict) == []


@pytest.mark.parametrize("hindrance", ["no route", "state", "pin"])
def test_without_a_way_there_is_no_copy(bench: Bench, hindrance: str) -> None:
    if hindrance == "no route":
        bench.state.executors[TWO].routes.clear()
    bench.deploy("x/1", state_mib=int(hindrance == "state"), pin=Pin.DEVICE if hindrance == "pin" else Pin.NONE)
    bench.send(ImageRead(FunctionId("x/1")))
    bench.ask("x/1")
    Device(bench, ONE).loaded()
    assert loads(bench.ask("x/1", deadline_ms=0, after_ms=9)) == []


def test_a_pair_that_was_measured_and_has_no_way_is_not_used(bench: Bench) -> None:
    running_on_one(bench, "a/1")
    bench.ask("b/1")
    Device(bench, TWO).loaded()
    Device(bench, ONE).executed()
    assert loads(bench.ask("b/1", deadline_ms=0, after_ms=9)) == []


def test_what_is_wanted_on_no_device_yet_comes_first(bench: Bench) -> None:
    bench.park("big/1", 30)
    one = running_on_one(bench)
    two = Device(bench, TWO)
    bench.ask("b/1")
    two.loaded()
    bench.ask("big/1")
    two.executed()
    assert two.pending(Load), "it takes the second device"
    two.loaded()
    one.executed()


def test_a_copy_that_has_come_serves_like_any_other_and_its_first_request_says_peer(bench: Bench) -> None:
    running_on_one(bench)
    bench.ask("a/1", deadline_ms=0, after_ms=3)
    two = Device(bench, TWO)
    two.loaded()
    replies = every(two.executed(), Reply)
    assert [reply.path for reply in replies] == [Path.PEER]
    ledger = bench.state.functions[FunctionId("a/1")].ledger
    assert (ledger.loads[Path.PEER], ledger.loads[Path.HOST]) == (1, 1)
    assert only(bench.ask("a/1"), Execute).executor == TWO


def test_building_counts_where_it_has_not_been_built(bench: Bench) -> None:
    bench.state.executors[TWO].built.clear()
    bench.state.executors[ONE].built.clear()
    bench.ask("a/1")
    (load,) = Device(bench, ONE).pending(Load)
    bench.send(LoadFinished(ONE, load.command, FunctionId("a/1"), 1, build_ns=50 * MS))
    assert loads(bench.ask("a/1", deadline_ms=0, after_ms=40)) == []
    assert loads(bench.ask("a/1", deadline_ms=0, after_ms=20)) == [("cuda:1", "a/1", "cuda:0", Path.BUILD)]


# ------------------------------------------------------------------ while it is copied


def test_the_source_of_a_copy_stays_until_the_copy_has_ended(bench: Bench) -> None:
    one, two = running_on_one(bench), Device(bench, TWO)
    bench.ask("a/1", deadline_ms=0, after_ms=3)
    one.executed()
    bench.park("big/1", 30)
    assert every(bench.ask("big/1"), Evict) == []
    bench.ask("big/1", deadline_ms=0)
    assert [c.function for c in every(two.loaded(), Evict)] == ["a/1"]


def test_an_unload_waits_for_the_copy(bench: Bench) -> None:
    one, two = running_on_one(bench), Device(bench, TWO)
    bench.ask("a/1", deadline_ms=0, after_ms=3)
    one.executed()
    two.executed()
    assert every(bench.send(UnloadRequested(bench.operation(), FunctionId("a/1"))), Evict) == []
    assert {c.executor for c in every(two.loaded(), Evict)} == {ONE, TWO}


def test_the_image_in_host_memory_is_not_needed_for_a_copy_between_devices(bench: Bench) -> None:
    one = running_on_one(bench)
    bench.ask("a/1", deadline_ms=0, after_ms=3)
    one.executed()
    function = bench.state.functions[FunctionId("a/1")]
    assert function.is_arriving
    assert not function.is_source_of_a_copy


# ------------------------------------------------------------------ when it goes wrong


def test_a_copy_that_fails_is_no_fault_of_function_or_request_and_the_next_way_is_the_plain_one(bench: Bench) -> None:
    one, two = running_on_one(bench), Device(bench, TWO)
    run = only(bench.ask("a/1", deadline_ms=0, after_ms=3), Execute)
    function = bench.state.functions[FunctionId("a/1")]
    bench.send(ExecutionFailed(TWO, run.command, run.request, Reason.LOAD_FAILED, "the peer is gone"))
    (load,) = two.pending(Load)
    commands = bench.send(LoadFailed(TWO, load.command, FunctionId("a/1"), "the peer is gone"))
    assert (loads(commands), function.load_failures, len(function.queue)) == ([], 0, 1)
    assert bench.state.requests[run.request].attempts == 0
    assert loads(bench.send(TimerFired(), after_ms=100)) == [], "not by peer for a while"
    assert only(one.executed(), Execute).request == run.request
    one.executed()
    bench.ask("a/1")
    assert loads(bench.ask("a/1", deadline_ms=0, after_ms=2000)) == FROM_ONE


def test_when_the_source_is_lost_its_requests_wait_for_the_copy_and_then_for_the_host(bench: Bench) -> None:
    running_on_one(bench)
    run = only(bench.ask("a/1", deadline_ms=0, after_ms=3), Execute)
    two = Device(bench, TWO)
    assert loads(bench.send(ExecutorLost(ONE, "killed"))) == []
    assert bench.state.functions[FunctionId("a/1")].residencies[TWO].source is None
    assert bench.state.executors[TWO].routes == {}
    bench.send(ExecutionFailed(TWO, run.command, run.request, Reason.LOAD_FAILED, "the peer is gone"))
    (load,) = two.pending(Load)
    commands = bench.send(LoadFailed(TWO, load.command, FunctionId("a/1"), "the peer is gone"))
    assert loads(commands) == [("cuda:1", "a/1", None, Path.HOST)]
    two.loaded()
    assert len(every(two.executed(), Reply)) == 1
    assert len(every(two.executed(), Reply)) == 1


def test_a_source_that_is_lost_and_back_is_not_held_by_the_copy_from_its_former_life(bench: Bench) -> None:
    running_on_one(bench)
    bench.ask("a/1", deadline_ms=0, after_ms=3)
    two = Device(bench, TWO)
    bench.send(ExecutorLost(ONE, "killed"))
    bench.join(ONE, capacity_mib=30)
    assert bench.state.executors[ONE].routes == {}
    two.loaded()
    assert bench.state.functions[FunctionId("a/1")].residencies[TWO].state is ResidencyState.RUNNING


def test_when_the_destination_is_lost_the_source_is_free_again(bench: Bench) -> None:
    one = running_on_one(bench)
    bench.ask("a/1", deadline_ms=0, after_ms=3)
    bench.send(ExecutorLost(TWO, "killed"))
    assert bench.state.functions[FunctionId("a/1")].residencies[ONE].feeds == set()
    one.executed()
    assert len(every(one.executed(), Reply)) == 1


# ------------------------------------------------------------------ borrowed links


def large(bench: Bench) -> list[Command]:
    """A function of 28 MiB is asked for: 28 ms over one link, 15.7 over two."""
    bench.park("large/1", 28)
    return bench.ask("large/1")


def test_a_large_image_takes_the_link_of_an_idle_neighbour_too(bench: Bench) -> None:
    load = only(large(bench), Load)
    assert (load.executor, load.helpers, load.path) == (ONE, (TWO,), Path.BUILD)
    assert bench.state.executors[TWO].lent_to == ONE
    assert loads(bench.ask("a/1")) == [], "its own link is lent"
    assert loads(Device(bench, ONE).loaded()) == [("cuda:1", "a/1", None, Path.HOST)]


def test_a_small_image_takes_one_link(bench: Bench) -> None:
    bench.park("small/1", 1)
    assert only(bench.ask("small/1"), Load).helpers == ()


def test_a_link_that_somebody_else_waits_for_is_not_borrowed(bench: Bench) -> None:
    running_on_one(bench)
    bench.park("large/1", 28)
    bench.state.executors[TWO].copying = FunctionId("a/1")  # nobody can load just now
    bench.state.executors[ONE].copying = FunctionId("a/1")
    bench.core.handle(bench.now, _asked(bench, "large/1", 5))
    bench.core.handle(bench.now, _asked(bench, "b/1", 9))
    bench.state.executors[TWO].copying = bench.state.executors[ONE].copying = None
    commands = bench.core.handle(bench.now, TimerFired())
    assert {(c.function, c.helpers) for c in every(commands, Load)} == {("large/1", ()), ("b/1", ())}


def _asked(bench: Bench, name: str, number: int) -> RequestArrived:
    return RequestArrived(RequestId(number), FunctionId(name), bench.now + number * MS)


@pytest.mark.parametrize("hindrance", ["busy", "no detour", "no rate"])
def test_a_link_that_cannot_be_lent_is_not_borrowed(bench: Bench, hindrance: str) -> None:
    if hindrance == "busy":
        bench.send(RouteOpened(TWO, ONE, detours=False))
        bench.ask("a/1")
        Device(bench, ONE).loaded()
        bench.ask("b/1")
        assert Device(bench, TWO).pending(Load)
    if hindrance == "no detour":
        bench.send(RouteOpened(ONE, TWO, detours=False))
    if hindrance == "no rate":
        bench = Bench(Settings(host_capacity_bytes=400 * MIB, topology=Topology(detour_bytes_per_s=0)))
        for executor in (ONE, TWO):
            bench.join(executor, capacity_mib=300)
        bench.send(RouteOpened(ONE, TWO, detours=True))
        bench.park("large/1", 280)
        assert only(bench.ask("large/1"), Load).helpers == ()
        return
    bench.park("large/1", 20)
    assert only(bench.ask("large/1"), Load).helpers == ()


def test_a_load_over_two_links_that_fails_is_tried_again_over_one(bench: Bench) -> None:
    run = only(large(bench), Execute)
    one = Device(bench, ONE)
    bench.send(ExecutionFailed(ONE, run.command, run.request, Reason.LOAD_FAILED, "a copy failed"))
    (load,) = one.pending(Load)
    again = only(bench.send(LoadFailed(ONE, load.command, FunctionId("large/1"), "a copy failed")), Load)
    assert (again.helpers, bench.state.executors[TWO].lent_to) == ((), None)
    assert bench.state.functions[FunctionId("large/1")].load_failures == 0
    assert bench.state.requests[run.request].attempts == 1


def test_a_helper_that_is_lost_and_back_is_lent_no_more(bench: Bench) -> None:
    large(bench)
    bench.send(ExecutorLost(TWO, "killed"))
    bench.join(TWO, capacity_mib=30)
    assert loads(bench.ask("a/1")) == [("cuda:1", "a/1", None, Path.BUILD)]
    Device(bench, ONE).loaded()
    assert bench.state.executors[TWO].copying == "a/1"


def test_a_helper_that_stays_away_is_missed_by_nobody(bench: Bench) -> None:
    large(bench)
    bench.send(ExecutorLost(TWO, "killed"))
    Device(bench, ONE).loaded()
    assert bench.state.functions[FunctionId("large/1")].residencies[ONE].helpers == ()


# ------------------------------------------------------------------ what is known of links


def test_links_and_pairs_that_nobody_measured_have_the_rates_assumed_for_all() -> None:
    assumed = Topology(links=(Link(DeviceId(ONE), 7),), pairs=(Pair(DeviceId(ONE), DeviceId(TWO), 9),))
    assert (assumed.host_rate(DeviceId(ONE)), assumed.host_rate(DeviceId(TWO))) == (7, assumed.host_bytes_per_s)
    assert assumed.pair(DeviceId(ONE), DeviceId(TWO)).peer_bytes_per_s == 9
    assert assumed.pair(DeviceId(TWO), DeviceId(ONE)).peer_bytes_per_s == assumed.peer_bytes_per_s
