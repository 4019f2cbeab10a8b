"""One queue for all devices, as Torpor has it: whoever is idle takes the most urgent function that it can serve."""

import pytest

from dormouse.core.messages import (
    Evict,
    Execute,
    ExecutionFailed,
    ExecutionFinished,
    ImageRead,
    Load,
    LoadFailed,
    Refuse,
    RouteOpened,
)
from dormouse.core.placement import bound
from dormouse.core.rhythm import Rhythm
from dormouse.core.state import ImageState
from dormouse.core.types import DeviceId, ExecutorId, FunctionId, Link, Pair, Path, Pin, Reason, Settings, Topology
from tests.core.bench import MIB, MS, Bench, every, only
from tests.core.test_devices import Device

ONE, TWO, THREE = (ExecutorId(f"cuda:{n}") for n in range(3))
PAIRS = (
    Pair(DeviceId(ONE), DeviceId(TWO), peer_bytes_per_s=1000 * MIB),
    Pair(DeviceId(ONE), DeviceId(THREE), peer_bytes_per_s=5000 * MIB),
)
SECOND = 1_000


def node(devices: int = 2, **changes: object) -> Bench:
    """Devices that hold three of four functions each."""
    topology = Topology(links=(Link(DeviceId(ONE), 1000 * MIB),), pairs=PAIRS)
    settings = {"binding": "late", "queueing": "fifo", "placement": "torpor", "topology": topology, **changes}
    bench = Bench(Settings(400 * MIB, **settings))  # type: ignore[arg-type]
    for executor in (ONE, TWO, THREE)[:devices]:
        bench.join(executor, capacity_mib=30)
    for name in ("a/1", "b/1", "c/1", "d/1"):
        bench.park(name)
    return bench


def test_a_load_and_its_run_take_a_whole_device() -> None:
    bench = node(1)
    assert [type(c) for c in bench.ask("a/1")[:2]] == [Load, Execute]
    assert every(bench.ask("b/1"), Load) == []
    device = Device(bench, ONE)
    assert every(device.loaded(), Load) == []
    assert only(device.executed(), Load).function == "b/1"


def test_the_order_of_the_queue_holds_also_against_what_is_resident() -> None:
    bench = node(1)
    device = Device(bench, ONE)
    device.serve("b/1")
    bench.ask("a/1")
    device.loaded()
    bench.ask("c/1")
    bench.ask("b/1")
    assert only(device.executed(), Execute).function == "c/1"


def test_a_function_has_one_execution_under_way() -> None:
    bench = node()
    bench.ask("a/1")
    assert every(bench.ask("a/1"), Execute) == []
    assert only(Device(bench, ONE).loaded() + Device(bench, ONE).executed(), Execute).executor == ONE


def test_an_idle_device_that_holds_the_function_is_taken() -> None:
    bench = node()
    Device(bench, ONE).serve("a/1")
    run = only(bench.ask("a/1"), Execute)
    assert (run.executor, every([run], Load)) == (ONE, [])


def test_else_the_fastest_pair_of_a_holder_and_an_idle_device() -> None:
    bench = node(3)
    for other in (TWO, THREE):
        bench.send(RouteOpened(other, ONE, detours=True))
    one = Device(bench, ONE)
    one.serve("a/1")
    one.serve("b/1")
    bench.ask("b/1")
    load = only(bench.ask("a/1"), Load)
    assert (load.executor, load.source, load.path) == (THREE, ONE, Path.BUILD)


def test_else_host_memory_also_while_a_busy_device_holds_it() -> None:
    bench = node()
    one = Device(bench, ONE)
    one.serve("a/1")
    one.serve("b/1")
    bench.ask("b/1")
    load = only(bench.ask("a/1"), Load)
    assert (load.executor, load.source, load.helpers) == (TWO, None, ())


def test_a_function_with_state_waits_for_the_device_that_has_it() -> None:
    bench = node()
    bench.deploy("s/1", state_mib=2)
    bench.send(ImageRead(FunctionId("s/1")))
    one = Device(bench, ONE)
    one.serve("s/1")
    one.serve("b/1")
    bench.ask("b/1")
    assert every(bench.ask("s/1"), Load) == []
    assert only(bench.ask("c/1"), Load).executor == TWO, "others pass it"
    assert only(one.executed(), Execute).function == "s/1"


def test_after_a_copy_from_a_peer_has_failed_the_function_comes_from_host_memory() -> None:
    bench = node(3)
    bench.send(RouteOpened(THREE, ONE, detours=True))
    one = Device(bench, ONE)
    one.serve("a/1")
    one.serve("b/1")
    bench.ask("b/1")
    load = only(bench.ask("a/1"), Load)
    (run,) = Device(bench, THREE).pending(Execute)
    assert isinstance(run, Execute)
    bench.send(ExecutionFailed(THREE, run.command, run.request, Reason.LOAD_FAILED, "gone"))
    bench.send(LoadFailed(THREE, load.command, load.function, "gone"))
    loads = [c for device in (TWO, THREE) for c in Device(bench, device).pending(Load)]
    assert [(c.function, c.source) for c in loads if isinstance(c, Load)] == [("a/1", None)]


def test_what_has_left_host_memory_waits_for_the_device_that_has_it() -> None:
    bench = Bench(Settings(20 * MIB, binding="late", queueing="fifo", placement="torpor"))
    for executor in (ONE, TWO):
        bench.join(executor, capacity_mib=30)
    one = Device(bench, ONE)
    bench.park("a/1")
    one.serve("a/1")
    bench.park("b/1")
    one.serve("b/1")
    bench.park("c/1")
    assert bench.state.functions[FunctionId("a/1")].image is ImageState.DISK
    bench.ask("b/1")
    assert every(bench.ask("a/1"), Load) == []
    assert only(one.executed(), Execute).function == "a/1"


def test_room_is_made_as_the_eviction_policy_says() -> None:
    bench = node(1)
    one = Device(bench, ONE)
    for name in ("a/1", "b/1", "c/1"):
        one.serve(name)
    commands = bench.ask("d/1")
    assert [c.function for c in every(commands, Evict)] == ["a/1"]
    assert [type(c) for c in commands[:3]] == [Evict, Load, Execute]


def test_what_is_pinned_to_a_device_loads_without_being_asked() -> None:
    bench = node()
    bench.deploy("p/1", pin=Pin.DEVICE)
    commands = bench.send(ImageRead(FunctionId("p/1")))
    assert only(commands, Load).function == "p/1"
    assert every(commands, Execute) == []


def test_what_fits_no_device_is_refused() -> None:
    bench = node()
    bench.park("big/1", mib=20)
    bench.deploy("p/1", mib=30, pin=Pin.DEVICE)
    bench.deploy("q/1", mib=30, pin=Pin.DEVICE)
    for name in ("p/1", "q/1"):
        bench.send(ImageRead(FunctionId(name)))
    for executor in (ONE, TWO):
        Device(bench, executor).loaded()
    assert only(bench.ask("big/1"), Refuse).reason is Reason.LARGER_THAN_DEVICE


@pytest.mark.parametrize("binding", ["late", "lanes"])
def test_bound_early_a_function_waits_for_its_own_device(binding: str) -> None:
    bench = node(placement="bound", eviction="never", binding=binding, load_ahead=False)
    assert only(bench.ask("a/1"), Load).executor == ONE
    assert only(bench.ask("b/1"), Load).executor == TWO
    Device(bench, TWO).loaded()
    Device(bench, TWO).executed()
    assert every(bench.ask("c/1"), Load) == []
    Device(bench, ONE).loaded()
    assert only(Device(bench, ONE).executed(), Load).executor == ONE


def test_without_devices_nothing_is_bound() -> None:
    bench = node(0)
    assert bound(bench.state, bench.state.functions[FunctionId("a/1")]) == []


def test_with_eviction_never_who_has_come_stays() -> None:
    bench = node(1, eviction="never")
    one = Device(bench, ONE)
    for name in ("a/1", "b/1", "c/1"):
        one.serve(name)
    assert bench.ask("d/1")[1:] == []
    assert only(bench.ask("a/1"), Execute).function == "a/1", "others pass what has no room"


def test_with_keep_alive_only_who_has_been_silent_for_longer_than_its_gaps_goes() -> None:
    bench = node(1, eviction="keep-alive", binding="lanes")
    one = Device(bench, ONE)
    for name in ("a/1", "b/1", "c/1") * 2:
        one.serve(name)
    for _ in range(2):
        one.serve("a/1")
        bench.now += 5 * SECOND * MS
    one.serve("a/1")
    bench.now += 3 * SECOND * MS
    commands = bench.ask("d/1")
    assert [c.function for c in every(commands, Evict)] == ["b/1"]
    assert only(commands, Load).function == "d/1"


def test_with_keep_alive_nobody_goes_before_the_time() -> None:
    bench = node(1, eviction="keep-alive", binding="lanes")
    one = Device(bench, ONE)
    for name in ("a/1", "b/1", "c/1"):
        one.serve(name)
    bench.now += 20 * SECOND * MS
    for name in ("a/1", "b/1", "c/1"):
        one.serve(name)
    assert every(bench.ask("d/1"), Load) == []
    bench.now += 30 * SECOND * MS
    assert only(bench.ask("a/1"), Evict).function == "b/1"


def test_a_rhythm_without_gaps_is_never_over() -> None:
    assert not Rhythm().is_over(10**18)


def test_a_fixed_threshold_splits_by_what_is_lacking() -> None:
    bench = node(1, queueing="torpor-fixed", alpha_ppm=500_000)
    one = Device(bench, ONE)
    for name, late in (("a/1", 1), ("b/1", 2), ("c/1", 0)):
        for _ in range(late):
            bench.ask(name, deadline_ms=0.1)
            for _ in every(list(one.pending(Load)), Load):
                one.loaded()
            one.executed()
        one.serve(name)
    bench.now += 5 * SECOND * MS
    bench.ask("c/1")
    assert bench.state.groups.low == {"b/1"}


def test_a_run_that_is_answered_makes_room_for_the_next_of_its_function() -> None:
    bench = node(1)
    bench.ask("a/1")
    bench.ask("a/1")
    one = Device(bench, ONE)
    one.loaded()
    (run,) = one.pending(Execute)
    assert isinstance(run, Execute)
    following = bench.send(ExecutionFinished(ONE, run.command, run.request, 1))
    assert only(following, Execute).request == bench.requests
