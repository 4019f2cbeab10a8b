"""Loads, evictions and executors: what goes where, what makes room, what happens when things fail."""

import pytest

from dormouse.core.messages import (
    ChunkProduced,
    Command,
    CommandRefused,
    Event,
    Evict,
    EvictionFinished,
    Execute,
    ExecutionFailed,
    ExecutionFinished,
    ExecutorJoined,
    ExecutorLost,
    ImageRead,
    Load,
    LoadFailed,
    LoadFinished,
    Refuse,
    Reply,
    RequestCancelled,
)
from dormouse.core.types import DeviceId, ExecutorId, FunctionId, Path, Pin, Reason
from tests.core.bench import GPU, MIB, Bench, every, only


class Device:
    """Answers for one executor, in the order that it was commanded."""

    def __init__(self, bench: Bench, executor: str = "cuda:0") -> None:
        self.bench = bench
        self.id = ExecutorId(executor)

    def pending(self, kind: type[Load] | type[Evict] | type[Execute]) -> list[Load | Evict | Execute]:
        return [c for c in self.bench.state.executors[self.id].pending.values() if isinstance(c, kind)]

    def loaded(self) -> list[Command]:
        (load,) = self.pending(Load)
        assert isinstance(load, Load)
        return self.bench.send(LoadFinished(self.id, load.command, load.function, 1))

    def executed(self) -> list[Command]:
        (run,) = self.pending(Execute)
        assert isinstance(run, Execute)
        return self.bench.send(ExecutionFinished(self.id, run.command, run.request, 1))

    def evicted(self) -> list[Command]:
        evict = self.pending(Evict)[0]
        assert isinstance(evict, Evict)
        return self.bench.send(EvictionFinished(self.id, evict.command, evict.function))

    def serve(self, name: str) -> None:
        """One request from beginning to end."""
        self.bench.ask(name)
        if self.pending(Load):
            self.loaded()
        self.executed()
        while self.pending(Evict):
            self.evicted()


@pytest.fixture
def bench() -> Bench:
    """A device that holds three of the four functions that are parked."""
    bench = Bench()
    bench.join(capacity_mib=30)
    for name in ("a/1", "b/1", "c/1", "d/1"):
        bench.park(name)
    return bench


@pytest.fixture
def device(bench: Bench) -> Device:
    return Device(bench)


def test_a_sleeping_function_is_loaded_and_runs_while_it_arrives(bench: Bench) -> None:
    load, run = bench.ask("a/1")[:2]
    assert isinstance(load, Load)
    assert isinstance(run, Execute)
    assert load.function == run.function == "a/1"


def test_the_next_function_loads_while_one_runs(bench: Bench, device: Device) -> None:
    bench.ask("a/1")
    device.loaded()
    commands = bench.ask("b/1")
    assert only(commands, Load).function == "b/1"
    assert every(commands, Execute) == []


def test_a_load_is_done_once_however_many_ask(bench: Bench) -> None:
    bench.ask("a/1")
    assert every(bench.ask("a/1"), Load) == []


def test_one_copy_lane_loads_one_function_at_a_time(bench: Bench, device: Device) -> None:
    bench.ask("a/1")
    assert every(bench.ask("b/1"), Load) == []
    assert [c.function for c in device.loaded() if isinstance(c, Load)] == ["b/1"]


def test_a_resident_function_runs_before_one_that_is_arriving(bench: Bench, device: Device) -> None:
    device.serve("a/1")
    device.serve("b/1")
    bench.ask("a/1")
    bench.ask("c/1", deadline_ms=1)
    bench.ask("b/1", deadline_ms=900)
    assert [c.function for c in device.executed() if isinstance(c, Execute)] == ["b/1"]
    assert [c.function for c in device.executed() if isinstance(c, Execute)] == ["c/1"]


def test_the_least_recently_used_function_makes_room_and_no_other(bench: Bench, device: Device) -> None:
    for name in ("a/1", "b/1", "c/1", "a/1"):
        device.serve(name)
    commands = bench.ask("d/1")
    assert [c.function for c in every(commands, Evict)] == ["b/1"]
    assert only(commands, Load).function == "d/1"


def test_victims_that_a_later_one_makes_needless_are_spared() -> None:
    bench = Bench()
    bench.join(capacity_mib=30)
    for name, mib in (("small/1", 4), ("large/1", 26), ("next/1", 26)):
        bench.park(name, mib)
    device = Device(bench)
    device.serve("small/1")
    device.serve("large/1")
    assert [c.function for c in every(bench.ask("next/1"), Evict)] == ["large/1"]


def test_a_running_function_is_not_evicted_and_the_load_waits(bench: Bench, device: Device) -> None:
    bench.park("big/1", 30)
    bench.ask("a/1")
    device.loaded()
    assert every(bench.ask("big/1"), Load) == []
    commands = device.executed()
    assert [type(c) for c in commands if isinstance(c, Evict | Load)] == [Evict, Load]


def test_a_function_with_queued_work_is_not_evicted_for_one_that_is_still_in_time(bench: Bench, device: Device) -> None:
    device.serve("a/1")
    bench.park("big/1", 28)
    device.serve("b/1")
    bench.ask("b/1")
    bench.ask("a/1", deadline_ms=500)
    assert every(bench.ask("big/1", deadline_ms=100), Evict) == []


def test_a_late_request_displaces_a_queue_that_can_wait() -> None:
    bench = Bench()
    bench.join(capacity_mib=30)
    device = Device(bench)
    for name in ("a/1", "b/1", "c/1"):
        bench.park(name)
        device.serve(name)
    bench.park("big/1", 20)
    bench.ask("a/1", deadline_ms=900)
    bench.ask("b/1", deadline_ms=800)
    bench.ask("c/1", deadline_ms=800)
    bench.ask("big/1", deadline_ms=2)
    evictions = every(bench.ask("a/1", after_ms=5), Evict)
    assert {e.function for e in evictions} == {"b/1", "c/1"}
    assert {e.cause for e in evictions} == {"big/1"}
    while device.pending(Evict):
        device.evicted()
    assert bench.state.functions[FunctionId("b/1")].id in bench.state.homeless


def test_a_function_pinned_to_the_device_is_loaded_unasked_and_stays(bench: Bench, device: Device) -> None:
    commands = bench.park("pinned/1", pin=Pin.DEVICE)
    assert only(commands, Load).function == "pinned/1"
    device.loaded()
    for name in ("a/1", "b/1", "c/1", "d/1", "a/1"):
        device.serve(name)
    assert FunctionId("pinned/1") in bench.state.executors[GPU].recency


def test_a_pin_waits_for_queued_work_to_end_before_it_takes_the_room() -> None:
    bench = Bench()
    bench.join(capacity_mib=20)
    device = Device(bench)
    for name in ("a/1", "b/1"):
        bench.park(name)
        device.serve(name)
    bench.ask("a/1")
    bench.ask("b/1")
    assert every(bench.park("pinned/1", 20, pin=Pin.DEVICE), Evict) == []
    device.executed()
    assert {c.function for c in device.executed() if isinstance(c, Evict)} == {"a/1", "b/1"}


def test_a_function_that_pins_leave_no_room_for_is_refused_with_the_numbers(bench: Bench, device: Device) -> None:
    bench.park("pinned/1", pin=Pin.DEVICE)
    device.loaded()
    bench.park("big/1", 20)
    bench.send(ExecutorLost(GPU, "gone"))
    bench.ask("big/1")
    commands = bench.join(capacity_mib=18)
    refusal = only(commands, Refuse)
    assert refusal.reason is Reason.LARGER_THAN_DEVICE
    assert "20.0 MiB" in refusal.message


def test_a_device_pin_that_no_device_can_keep_is_tried_again_when_one_joins(bench: Bench) -> None:
    bench.send(ExecutorLost(GPU, "gone"))
    bench.park("pinned/1", 20, pin=Pin.DEVICE)
    assert every(bench.join(capacity_mib=10), Load) == []
    assert only(bench.join("cuda:1", capacity_mib=20), Load).function == "pinned/1"


def test_of_two_devices_the_one_with_room_is_loaded(bench: Bench, device: Device) -> None:
    for name in ("a/1", "b/1", "c/1"):
        device.serve(name)
    bench.join("cuda:1", capacity_mib=30)
    assert only(bench.ask("d/1"), Load).executor == "cuda:1"


def test_a_device_that_is_too_small_is_passed_over(bench: Bench) -> None:
    bench.park("big/1", 28)
    bench.join("cuda:1", capacity_mib=62)
    bench.send(ExecutorLost(GPU, "gone"))
    bench.join("cuda:0", capacity_mib=20)
    assert only(bench.ask("big/1"), Load).executor == "cuda:1"


def test_when_no_device_can_make_room_the_load_waits(bench: Bench, device: Device) -> None:
    bench.park("big/1", 30)
    bench.ask("a/1")
    device.loaded()
    assert every(bench.ask("big/1"), Load) == []
    assert FunctionId("big/1") in bench.state.homeless


def test_a_device_that_had_no_room_is_looked_at_again_when_something_ends_there() -> None:
    bench = Bench()
    for name in ("cuda:0", "cuda:1"):
        bench.join(name, capacity_mib=10)
    first, second = Device(bench), Device(bench, "cuda:1")
    for name in ("a/1", "b/1", "c/1"):
        bench.park(name)
    for name, device in (("a/1", first), ("b/1", second), ("b/1", second)):
        bench.ask(name)
        if device.pending(Load):
            device.loaded()
    assert every(bench.ask("c/1"), Load) == []
    full = bench.state.executors[GPU].full_for
    assert full is not None
    assert full.function == "c/1"
    assert every(second.executed(), Load) == []  # it runs the next at once; nothing has changed on the first
    assert bench.state.executors[GPU].full_for == full
    assert only(first.executed(), Load).executor == GPU


def test_after_a_build_the_path_is_host(bench: Bench, device: Device) -> None:
    for name in ("a/1", "b/1", "c/1", "d/1"):
        device.serve(name)
    assert only(bench.ask("a/1"), Load).path is Path.HOST


# ------------------------------------------------------------------ faults


def test_a_failed_load_is_tried_once_more_and_then_refused(bench: Bench, device: Device) -> None:
    for attempt in (1, 2):
        load, run = [*device.pending(Load), *device.pending(Execute)] if attempt == 2 else bench.ask("a/1")[:2]
        assert isinstance(load, Load)
        assert isinstance(run, Execute)
        bench.send(ExecutionFailed(GPU, run.command, run.request, Reason.LOAD_FAILED, "copy failed"))
        commands = bench.send(LoadFailed(GPU, load.command, load.function, "copy failed"))
    assert every(commands, Load) == []
    assert FunctionId("a/1") not in bench.state.executors[GPU].recency
    assert bench.state.executors[GPU].free_bytes == 30 * MIB


def test_requests_that_waited_for_a_load_that_fails_twice_are_refused(bench: Bench, device: Device) -> None:
    bench.ask("b/1")
    device.loaded()
    bench.ask("a/1")
    failure: Event
    for _ in range(2):
        (load,) = device.pending(Load)
        failure = LoadFailed(GPU, load.command, FunctionId("a/1"), "copy failed")
        commands = bench.send(failure)
    refusal = only(commands, Refuse)
    assert (refusal.reason, "copy failed" in refusal.message) == (Reason.LOAD_FAILED, True)


def test_a_load_that_came_too_late_is_given_again(bench: Bench) -> None:
    load, run = bench.ask("a/1")[:2]
    assert isinstance(load, Load)
    assert isinstance(run, Execute)
    assert every(bench.send(CommandRefused(GPU, load.command, Reason.TOO_LATE)), Load) == []
    commands = bench.send(ExecutionFailed(GPU, run.command, run.request, Reason.LOAD_FAILED, "not loaded"))
    assert only(commands, Load).function == "a/1"
    assert only(commands, Execute).request == run.request


def test_an_execution_that_came_too_late_for_its_request_is_a_timeout(bench: Bench) -> None:
    run = only(bench.ask("a/1", timeout_ms=5), Execute)
    commands = bench.send(CommandRefused(GPU, run.command, Reason.TOO_LATE), after_ms=6)
    assert only(commands, Refuse).reason is Reason.TIMEOUT
    assert bench.state.executors[GPU].executing is None


def test_an_execution_refused_before_its_time_is_given_again(bench: Bench) -> None:
    run = only(bench.ask("a/1"), Execute)
    again = only(bench.send(CommandRefused(GPU, run.command, Reason.TOO_EARLY)), Execute)
    assert again.request == run.request


def test_an_eviction_cannot_be_refused(bench: Bench, device: Device) -> None:
    for name in ("a/1", "b/1", "c/1"):
        device.serve(name)
    eviction = only(bench.ask("d/1"), Evict)
    with pytest.raises(AssertionError, match="never closes"):
        bench.core.handle(bench.now, CommandRefused(GPU, eviction.command, Reason.TOO_LATE))


def test_a_lost_executors_request_starts_over_elsewhere(bench: Bench) -> None:
    run = only(bench.ask("a/1"), Execute)
    bench.send(ExecutorLost(GPU, "killed"))
    commands = bench.join()
    assert only(commands, Load).path is Path.BUILD
    assert only(commands, Execute).request == run.request


def test_a_request_that_loses_its_executor_twice_is_refused(bench: Bench) -> None:
    bench.ask("a/1")
    bench.send(ExecutorLost(GPU, "killed"))
    bench.join()
    refusal = only(bench.send(ExecutorLost(GPU, "killed again")), Refuse)
    assert (refusal.reason, "killed again" in refusal.message) == (Reason.EXECUTOR_LOST, True)


def test_an_answer_that_has_begun_cannot_start_over(bench: Bench) -> None:
    run = only(bench.ask("a/1"), Execute)
    bench.send(ChunkProduced(GPU, run.command, run.request))
    assert only(bench.send(ExecutorLost(GPU, "killed")), Refuse).reason is Reason.EXECUTOR_LOST


def test_an_abandoned_request_dies_with_its_executor(bench: Bench) -> None:
    run = only(bench.ask("a/1"), Execute)
    bench.send(RequestCancelled(run.request))
    assert every(bench.send(ExecutorLost(GPU, "killed")), Refuse) == []
    assert bench.state.requests == {}


def test_an_idle_executor_is_lost_quietly(bench: Bench, device: Device) -> None:
    device.serve("a/1")
    assert every(bench.send(ExecutorLost(GPU, "killed")), Reply) == []


def test_an_executor_joins_once(bench: Bench) -> None:
    with pytest.raises(AssertionError, match="joined already"):
        bench.core.handle(bench.now, ExecutorJoined(GPU, DeviceId("cuda:0"), 1, 1))


def test_an_execution_may_end_before_the_rest_of_its_image_has_come(bench: Bench, device: Device) -> None:
    bench.ask("a/1")
    device.executed()
    device.loaded()
    run = only(bench.ask("a/1"), Execute)
    assert only(bench.send(ExecutionFinished(GPU, run.command, run.request, 1)), Reply).path is Path.RESIDENT


def test_unaccounted_bytes_are_kept_for_the_inventory(bench: Bench, device: Device) -> None:
    for name in ("a/1", "b/1", "c/1"):
        device.serve(name)
    eviction = only(bench.ask("d/1"), Evict)
    bench.send(EvictionFinished(GPU, eviction.command, eviction.function, 4096))
    assert bench.state.functions[FunctionId("a/1")].ledger.unaccounted_bytes == 4096


def test_an_image_that_is_being_read_again_counts_as_disk_path(bench: Bench) -> None:
    small = Bench(bench.state.settings)
    small.join(capacity_mib=30)
    for number in range(11):
        small.park(f"f{number}/1")
    commands = small.ask("f0/1")
    assert every(commands, Load) == []
    assert only(small.send(ImageRead(FunctionId("f0/1"))), Load).path is Path.BUILD
