"""Deploy, load, unload, remove; images between disk and host memory."""

import pytest

from dormouse.core.messages import (
    Acknowledge,
    Command,
    DeleteImage,
    DropImage,
    Evict,
    EvictionFinished,
    Execute,
    ExecutionFailed,
    ExecutionFinished,
    Forget,
    FunctionDeployed,
    ImageRead,
    ImageReadFailed,
    Load,
    LoadFailed,
    LoadFinished,
    LoadRequested,
    ReadImage,
    Refuse,
    RemovalRequested,
    RequestCancelled,
    UnloadRequested,
)
from dormouse.core.state import ImageState, Service
from dormouse.core.types import FunctionId, FunctionSpec, Limits, Path, Pin, Reason, RequestId, Settings
from tests.core.bench import GPU, MIB, Bench, every, only

A, B, C = FunctionId("a/1"), FunctionId("b/1"), FunctionId("c/1")


@pytest.fixture
def bench() -> Bench:
    """Host memory for two functions of 10 MiB; a device for both."""
    bench = Bench(Settings(host_capacity_bytes=20 * MIB))
    bench.join()
    return bench


def serve(bench: Bench, name: str) -> None:
    """One request, with its load, from beginning to end."""
    bench.ask(name)
    for command in tuple(bench.state.executors[GPU].pending.values()):
        if isinstance(command, Load):
            bench.send(LoadFinished(GPU, command.command, command.function, 1))
    for command in tuple(bench.state.executors[GPU].pending.values()):
        if isinstance(command, Execute):
            bench.send(ExecutionFinished(GPU, command.command, command.request, 1))


def restore(bench: Bench, name: str, mib: int = 10, *, available: bool = True) -> list[Command]:
    spec = FunctionSpec(FunctionId(name), mib * MIB)
    return bench.send(FunctionDeployed(bench.operation(), spec, restored=True, available=available))


# ------------------------------------------------------------------ deploy


def test_a_deploy_is_acknowledged_when_the_image_is_in_host_memory(bench: Bench) -> None:
    assert only(bench.deploy("a/1"), ReadImage).function == A
    assert only(bench.send(ImageRead(A)), Acknowledge).reason is None
    assert bench.state.functions[A].service is Service.READY


def test_a_function_is_deployed_once(bench: Bench) -> None:
    bench.park("a/1")
    assert only(bench.deploy("a/1"), Acknowledge).reason is Reason.ALREADY_DEPLOYED


def test_a_function_larger_than_the_device_is_refused_with_the_numbers(bench: Bench) -> None:
    refusal = only(bench.deploy("a/1", 66), Acknowledge)
    assert refusal.reason is Reason.LARGER_THAN_DEVICE
    assert "66.0 MiB" in refusal.message
    assert "64.0 MiB" in refusal.message
    assert A not in bench.state.functions


def test_a_function_that_pins_leave_no_host_memory_for_is_refused_with_the_numbers(bench: Bench) -> None:
    bench.park("a/1", pin=Pin.HOST)
    refusal = only(bench.deploy("b/1", 12), Acknowledge)
    assert refusal.reason is Reason.HOST_MEMORY_FULL
    assert all(number in refusal.message for number in ("12.0 MiB", "20.0 MiB", "10.0 MiB"))


def test_a_deploy_drops_what_has_not_been_used_for_longest(bench: Bench) -> None:
    bench.park("a/1")
    bench.park("b/1")
    commands = bench.deploy("c/1")
    assert only(commands, DropImage).function == A
    assert only(commands, ReadImage).function == C


def test_a_preview_changes_nothing(bench: Bench) -> None:
    refusal = bench.core.preview(FunctionSpec(A, 66 * MIB))
    assert refusal is not None
    assert refusal.reason is Reason.LARGER_THAN_DEVICE
    assert bench.core.preview(FunctionSpec(A, 10 * MIB)) is None
    assert bench.state.functions == {}


def test_an_unreadable_image_leaves_nothing_of_its_deploy(bench: Bench) -> None:
    bench.deploy("a/1")
    commands = bench.send(ImageReadFailed(A, "page 3 is damaged"))
    refusal = only(commands, Acknowledge)
    assert (refusal.reason, refusal.message) == (Reason.IMAGE_UNREADABLE, "page 3 is damaged")
    assert only(commands, DeleteImage).function == A
    assert A not in bench.state.functions
    assert bench.state.host_used_bytes == 0


def test_a_deploy_that_a_later_pin_leaves_no_room_for_is_refused() -> None:
    one = Bench(Settings(host_capacity_bytes=20 * MIB, concurrent_reads=1))
    one.deploy("a/1")
    one.deploy("b/1", 12)
    one.deploy("c/1", 10, pin=Pin.HOST)
    commands = one.send(ImageRead(A))
    assert B not in one.state.functions
    assert [a.reason for a in every(commands, Acknowledge)] == [None, Reason.HOST_MEMORY_FULL]


@pytest.mark.parametrize("request_type", [UnloadRequested, RemovalRequested])
def test_nothing_else_may_be_asked_of_a_function_that_is_being_admitted(
    bench: Bench, request_type: type[UnloadRequested] | type[RemovalRequested]
) -> None:
    bench.deploy("a/1")
    assert only(bench.send(request_type(bench.operation(), A)), Acknowledge).reason is Reason.NOT_READY


# ------------------------------------------------------------------ restart


def test_restored_functions_are_parked_while_there_is_room_and_ready_at_once(bench: Bench) -> None:
    for name in ("a/1", "b/1"):
        assert only(restore(bench, name), ReadImage).function == name
    assert only(restore(bench, "c/1"), Acknowledge).reason is None
    assert bench.state.functions[C].service is Service.READY
    assert bench.state.functions[C].image is ImageState.DISK


def test_what_was_unavailable_comes_back_unavailable(bench: Bench) -> None:
    restore(bench, "a/1", available=False)
    assert bench.state.functions[A].service is Service.UNAVAILABLE


def test_a_restored_function_on_disk_is_read_when_asked_for(bench: Bench) -> None:
    for name in ("a/1", "b/1", "c/1"):
        restore(bench, name)
    bench.send(ImageRead(A))
    bench.send(ImageRead(B))
    commands = bench.ask("c/1")
    assert only(commands, DropImage).function == A
    assert only(commands, ReadImage).function == C


# ------------------------------------------------------------------ the disk tier


def test_a_request_brings_its_image_back_from_disk(bench: Bench) -> None:
    for name in ("a/1", "b/1", "c/1"):
        bench.park(name)
    serve(bench, "b/1")
    bench.ask("a/1")
    commands = bench.send(ImageRead(A))
    assert only(commands, Load).function == A


def test_a_second_load_of_a_dropped_image_takes_the_disk_path() -> None:
    bench = Bench(Settings(host_capacity_bytes=20 * MIB))
    bench.join(capacity_mib=10)
    bench.park("a/1")
    bench.park("b/1")
    serve(bench, "a/1")
    serve(bench, "b/1")
    (eviction,) = [c for c in bench.state.executors[GPU].pending.values() if isinstance(c, Evict)]
    bench.send(EvictionFinished(GPU, eviction.command, A))
    bench.park("c/1")
    assert bench.state.functions[A].image is ImageState.DISK
    bench.ask("a/1")
    assert only(bench.send(ImageRead(A)), Load).path is Path.DISK


def test_a_resident_function_runs_although_its_image_has_left_host_memory(bench: Bench) -> None:
    bench.park("a/1")
    serve(bench, "a/1")
    bench.park("b/1")
    bench.park("c/1")
    assert bench.state.functions[A].image is ImageState.DISK
    assert only(bench.ask("a/1"), Execute).function == A


def test_images_are_read_one_time_however_many_ask(bench: Bench) -> None:
    for name in ("a/1", "b/1", "c/1"):
        bench.park(name)
    bench.ask("a/1")
    assert every(bench.ask("a/1"), ReadImage) == []


def test_only_so_many_images_are_read_at_a_time() -> None:
    bench = Bench(Settings(host_capacity_bytes=100 * MIB, concurrent_reads=1))
    bench.deploy("a/1")
    assert every(bench.deploy("b/1"), ReadImage) == []
    assert only(bench.send(ImageRead(A)), ReadImage).function == B


def test_an_image_that_cannot_be_read_any_more_ends_the_requests_that_wait_for_it(bench: Bench) -> None:
    for name in ("a/1", "b/1", "c/1"):
        bench.park(name)
    bench.ask("a/1")
    assert only(bench.send(ImageReadFailed(A, "disk on fire")), Refuse).reason is Reason.IMAGE_UNREADABLE
    assert bench.state.functions[A].service is Service.READY, "the next request tries again"


def test_a_function_that_a_pin_leaves_no_host_memory_for_ends_its_requests(bench: Bench) -> None:
    restore(bench, "a/1", 12)
    bench.send(ImageRead(A))
    bench.park("b/1", 10, pin=Pin.HOST)
    refusal = only(bench.ask("a/1"), Refuse)
    assert refusal.reason is Reason.HOST_MEMORY_FULL


def test_an_image_is_not_dropped_while_it_is_copied(bench: Bench) -> None:
    bench.park("a/1")
    bench.park("b/1")
    bench.ask("a/1")
    assert only(bench.deploy("c/1"), DropImage).function == B


def test_when_nothing_can_be_dropped_the_read_waits(bench: Bench) -> None:
    bench.park("a/1", 20)
    bench.ask("a/1")
    assert every(bench.deploy("b/1"), ReadImage) == []
    serve_pending(bench)
    assert bench.state.functions[B].image is ImageState.READING


def serve_pending(bench: Bench) -> None:
    for command in tuple(bench.state.executors[GPU].pending.values()):
        if isinstance(command, Load):
            bench.send(LoadFinished(GPU, command.command, command.function, 1))
        elif isinstance(command, Execute):
            bench.send(ExecutionFinished(GPU, command.command, command.request, 1))


def test_runtime_state_is_brought_home_before_its_image_makes_room(bench: Bench) -> None:
    bench.deploy("a/1", 20, state_mib=2)
    bench.send(ImageRead(A))
    serve(bench, "a/1")
    eviction = only(bench.deploy("b/1"), Evict)
    assert eviction.function == A
    commands = bench.send(EvictionFinished(GPU, eviction.command, A))
    assert [type(c) for c in commands] == [DropImage, ReadImage]


# ------------------------------------------------------------------ unload and load


def test_an_unload_is_acknowledged_when_the_memory_is_free(bench: Bench) -> None:
    bench.park("a/1")
    serve(bench, "a/1")
    commands = bench.send(UnloadRequested(bench.operation(), A))
    eviction = only(commands, Evict)
    assert every(commands, Acknowledge) == []
    commands = bench.send(EvictionFinished(GPU, eviction.command, A))
    assert [type(c) for c in commands] == [DropImage, Acknowledge]
    assert bench.state.host_used_bytes == 0
    assert bench.state.functions[A].service is Service.UNAVAILABLE


def test_an_unload_serves_what_is_queued_first(bench: Bench) -> None:
    bench.park("a/1")
    bench.ask("a/1")
    bench.ask("a/1")
    assert every(bench.send(UnloadRequested(bench.operation(), A)), Acknowledge) == []
    serve_pending(bench)
    serve_pending(bench)
    assert bench.state.requests == {}
    assert [type(c) for c in bench.state.executors[GPU].pending.values()] == [Evict]


def test_an_unload_goes_on_when_the_last_request_is_cancelled() -> None:
    bench = Bench()
    bench.park("a/1")
    bench.ask("a/1")
    bench.send(UnloadRequested(bench.operation(), A))
    commands = bench.send(RequestCancelled(RequestId(1)))
    assert [type(c) for c in commands] == [DropImage, Acknowledge]


def test_unloading_twice_and_unloading_what_is_unloaded_are_both_fine(bench: Bench) -> None:
    bench.park("a/1")
    serve(bench, "a/1")
    eviction = only(bench.send(UnloadRequested(bench.operation(), A)), Evict)
    assert bench.send(UnloadRequested(bench.operation(), A)) == []
    assert len(every(bench.send(EvictionFinished(GPU, eviction.command, A)), Acknowledge)) == 2
    assert only(bench.send(UnloadRequested(bench.operation(), A)), Acknowledge).reason is None


def test_a_load_brings_an_unloaded_function_back(bench: Bench) -> None:
    bench.park("a/1")
    bench.send(UnloadRequested(bench.operation(), A))
    assert only(bench.send(LoadRequested(bench.operation(), A)), ReadImage).function == A
    assert bench.send(LoadRequested(bench.operation(), A)) == []
    assert len(every(bench.send(ImageRead(A)), Acknowledge)) == 2
    assert bench.state.functions[A].service is Service.READY


def test_asking_twice_for_a_load_that_has_not_begun_promises_its_memory_once() -> None:
    bench = Bench(Settings(host_capacity_bytes=40 * MIB, concurrent_reads=1))
    bench.park("a/1")
    bench.send(UnloadRequested(bench.operation(), A))
    bench.deploy("b/1")
    bench.send(LoadRequested(bench.operation(), A))
    bench.send(LoadRequested(bench.operation(), A))
    assert bench.state.parking_bytes == 10 * MIB


def test_a_function_on_a_device_whose_image_was_dropped_is_read_when_its_load_is_asked_for(bench: Bench) -> None:
    """Found by the fault campaign: nobody would have read it while it stayed on the device."""
    for name in (A, B, C):
        bench.park(name)
        serve(bench, name)
    assert bench.state.functions[A].image is ImageState.DISK
    assert bench.state.functions[A].residencies
    load = bench.operation()
    commands = bench.send(LoadRequested(load, A))
    assert only(commands, ReadImage).function == A
    assert only(bench.send(ImageRead(A)), Acknowledge).operation == load


def test_loading_what_is_in_host_memory_is_done_at_once(bench: Bench) -> None:
    bench.park("a/1")
    assert only(bench.send(LoadRequested(bench.operation(), A)), Acknowledge).reason is None


def test_a_load_that_cannot_fit_is_refused_and_changes_nothing(bench: Bench) -> None:
    bench.park("a/1", 12)
    bench.send(UnloadRequested(bench.operation(), A))
    bench.park("b/1", pin=Pin.HOST)
    assert only(bench.send(LoadRequested(bench.operation(), A)), Acknowledge).reason is Reason.HOST_MEMORY_FULL
    assert bench.state.functions[A].service is Service.UNAVAILABLE


def test_a_load_whose_image_is_unreadable_leaves_the_function_unavailable(bench: Bench) -> None:
    bench.park("a/1")
    bench.send(UnloadRequested(bench.operation(), A))
    bench.send(LoadRequested(bench.operation(), A))
    assert only(bench.send(ImageReadFailed(A, "gone")), Acknowledge).reason is Reason.IMAGE_UNREADABLE
    assert bench.state.functions[A].service is Service.UNAVAILABLE


def test_a_load_is_refused_while_the_function_leaves(bench: Bench) -> None:
    bench.park("a/1")
    serve(bench, "a/1")
    bench.send(UnloadRequested(bench.operation(), A))
    assert only(bench.send(LoadRequested(bench.operation(), A)), Acknowledge).reason is Reason.NOT_READY


def test_an_unload_ends_the_loads_that_have_not_begun() -> None:
    bench = Bench(Settings(host_capacity_bytes=40 * MIB, concurrent_reads=1))
    bench.park("a/1")
    bench.send(UnloadRequested(bench.operation(), A))
    bench.deploy("b/1")
    bench.send(LoadRequested(bench.operation(), A))
    commands = bench.send(UnloadRequested(bench.operation(), A))
    assert [a.reason for a in every(commands, Acknowledge)] == [Reason.NOT_READY, None]


def test_an_unload_waits_for_a_read_that_is_under_way(bench: Bench) -> None:
    restore(bench, "a/1")
    assert bench.send(UnloadRequested(bench.operation(), A)) == []
    commands = bench.send(ImageRead(A))
    assert [type(c) for c in commands] == [Acknowledge, DropImage, Acknowledge]


# ------------------------------------------------------------------ removal


def test_a_removed_function_is_forgotten_everywhere(bench: Bench) -> None:
    bench.park("a/1")
    serve(bench, "a/1")
    eviction = only(bench.send(RemovalRequested(bench.operation(), A)), Evict)
    commands = bench.send(EvictionFinished(GPU, eviction.command, A))
    assert [type(c) for c in commands] == [DropImage, Forget, DeleteImage, Acknowledge]
    assert bench.state.functions == {}


def test_a_function_whose_load_failed_is_forgotten_too(bench: Bench) -> None:
    bench.park("a/1")
    load, run = bench.ask("a/1")[:2]
    assert isinstance(load, Load)
    assert isinstance(run, Execute)
    bench.send(RequestCancelled(run.request))
    bench.send(ExecutionFailed(GPU, run.command, run.request, Reason.LOAD_FAILED, "copy failed"))
    bench.send(LoadFailed(GPU, load.command, A, "copy failed"))
    commands = bench.send(RemovalRequested(bench.operation(), A))
    assert only(commands, Forget).function == A


def test_a_pin_does_not_try_for_ever_what_fails(bench: Bench) -> None:
    commands = bench.park("a/1", pin=Pin.DEVICE)
    for _ in range(bench.state.settings.attempts):
        load = only(commands, Load)
        commands = bench.send(LoadFailed(GPU, load.command, A, "copy failed"))
    assert every(commands, Load) == []
    assert only(bench.ask("a/1"), Load).function == A


def test_unloading_what_is_being_removed_waits_for_the_removal(bench: Bench) -> None:
    bench.park("a/1")
    serve(bench, "a/1")
    eviction = only(bench.send(RemovalRequested(bench.operation(), A)), Evict)
    assert bench.send(UnloadRequested(bench.operation(), A)) == []
    assert len(every(bench.send(EvictionFinished(GPU, eviction.command, A)), Acknowledge)) == 2


@pytest.mark.parametrize("request_type", [LoadRequested, UnloadRequested, RemovalRequested])
def test_operations_on_an_unknown_function_are_refused(
    bench: Bench, request_type: type[LoadRequested] | type[UnloadRequested] | type[RemovalRequested]
) -> None:
    commands = bench.send(request_type(bench.operation(), FunctionId("nobody/1")))
    assert only(commands, Acknowledge).reason is Reason.UNKNOWN_FUNCTION


def test_a_function_that_was_never_on_a_device_is_removed_at_once(bench: Bench) -> None:
    bench.deploy("a/1", pin=Pin.NONE, limits=Limits(), slo_ms=1)
    bench.send(ImageRead(A))
    commands = bench.send(RemovalRequested(bench.operation(), A))
    assert [type(c) for c in commands] == [DropImage, DeleteImage, Acknowledge]


def test_a_leaving_device_pin_is_not_loaded_again() -> None:
    bench = Bench()
    bench.join()
    load = only(bench.park("a/1", pin=Pin.DEVICE), Load)
    assert bench.send(UnloadRequested(bench.operation(), A)) == []
    eviction = only(bench.send(LoadFinished(GPU, load.command, A, 1)), Evict)
    assert every(bench.send(EvictionFinished(GPU, eviction.command, A)), Load) == []


# ------------------------------------------------------------------ images that live in memory only


@pytest.fixture
def memory_only() -> Bench:
    bench = Bench(Settings(host_capacity_bytes=20 * MIB, host_is_last=True))
    bench.join()
    return bench


def test_in_memory_only_a_deploy_that_finds_no_room_is_refused_with_the_numbers(memory_only: Bench) -> None:
    memory_only.park("a/1", 12)
    refusal = only(memory_only.deploy("b/1", 10), Acknowledge)
    assert refusal.reason is Reason.HOST_MEMORY_FULL
    assert all(number in refusal.message for number in ("10.0 MiB", "20.0 MiB", "8.0 MiB"))
    assert memory_only.state.functions[A].image is ImageState.HOST


def test_in_memory_only_room_is_promised_to_one_deploy(memory_only: Bench) -> None:
    memory_only.deploy("a/1", 8)
    memory_only.deploy("b/1", 8)
    assert only(memory_only.deploy("c/1", 8), Acknowledge).reason is Reason.HOST_MEMORY_FULL
    for name in (A, B):
        assert only(memory_only.send(ImageRead(name)), Acknowledge).reason is None


def test_in_memory_only_nothing_is_unloaded_but_anything_can_be_removed(memory_only: Bench) -> None:
    memory_only.park("a/1")
    refusal = only(memory_only.send(UnloadRequested(memory_only.operation(), A)), Acknowledge)
    assert refusal.reason is Reason.IN_MEMORY_ONLY
    assert memory_only.state.functions[A].accepts
    assert only(memory_only.send(RemovalRequested(memory_only.operation(), A)), Acknowledge).reason is None
    assert memory_only.state.host_used_bytes == 0


def test_in_memory_only_a_function_that_is_on_disk_still_is_refused_when_it_finds_no_room(memory_only: Bench) -> None:
    restore(memory_only, "a/1")
    memory_only.send(ImageRead(A))
    restore(memory_only, "b/1", 12)
    assert only(memory_only.ask("b/1"), Refuse).reason is Reason.HOST_MEMORY_FULL
    assert memory_only.state.functions[A].image is ImageState.HOST
