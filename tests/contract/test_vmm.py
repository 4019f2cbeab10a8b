"""The CUDA device beyond the contract: what it asks of the driver, and what it does when the driver refuses.

Run over a stand-in for the driver; the tests that need the real one are marked.
"""

import ctypes
import subprocess
import sys
import threading
from typing import Any, Protocol

import pytest

from dormouse.device.base import Device
from dormouse.device.driver import Driver, device_count
from dormouse.device.vmm import VmmDevice
from dormouse.errors import DeviceError

MIB = 1024 * 1024
CHUNK = 2 * MIB


class Maker(Protocol):
    stand_in: Any

    def __call__(self, *faults: str) -> Device: ...


@pytest.fixture
def kind() -> str:
    return "stand-in"


def build(make: Maker, capacity_bytes: int | None, chunk_bytes: int = CHUNK) -> VmmDevice:
    return VmmDevice(0, capacity_bytes, chunk_bytes, driver=Driver(make.stand_in))


def test_without_a_size_the_pool_is_80_percent_of_what_is_free(make: Maker) -> None:
    device = build(make, None)
    assert device.capacity_bytes == 64 * MIB * 80 // 100 // CHUNK * CHUNK
    assert make.stand_in.cuMemGetInfo()[1] == 64 * MIB - device.capacity_bytes
    device.close()


@pytest.mark.parametrize(
    ("capacity_bytes", "chunk_bytes", "message"),
    [
        (CHUNK - 1, CHUNK, "create pool failed: TOO_SMALL"),
        (8 * MIB, MIB, "create pool failed: BAD_CHUNK"),
        (1 << 40, CHUNK, "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_a_pool_that_cannot_be_made_leaves_nothing_behind(
    make: Maker, capacity_bytes: int, chunk_bytes: int, message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        build(make, capacity_bytes, chunk_bytes)
    assert make.stand_in.is_empty()


@pytest.mark.parametrize(("call", "good"), [("cuMemMap", 0), ("cuMemMap", 2), ("cuMemSetAccess", 0)])
def test_a_map_that_the_driver_refuses_midway_is_rolled_back(make: Maker, call: str, good: int) -> None:
    device = make()
    region = device.reserve(4 * CHUNK)
    device.map(region, CHUNK)
    make.stand_in.good_calls[call] = good
    with pytest.raises(DeviceError, match=f"{call} failed: CUDA_ERROR_OUT_OF_MEMORY \\(stand-in says 2\\)"):
        device.map(region, 4 * CHUNK)
    assert (len(region.chunks), len(make.stand_in.mapped), device.unaccounted_bytes()) == (1, 1, 0)
    device.map(region, 4 * CHUNK)
    assert (len(region.chunks), len(make.stand_in.open), device.unaccounted_bytes()) == (4, 4, 0)


def test_access_is_opened_by_one_call_for_what_is_new(make: Maker) -> None:
    device = make()
    region = device.reserve(6 * CHUNK)
    device.map(region, CHUNK)
    make.stand_in.good_calls["cuMemSetAccess"] = 1
    device.map(region, 6 * CHUNK)
    assert make.stand_in.good_calls["cuMemSetAccess"] == 0
    assert len(make.stand_in.open) == 6


def test_an_unmap_that_the_driver_refuses_keeps_the_book(make: Maker) -> None:
    device = make()
    region = device.reserve(2 * CHUNK)
    device.map(region, 2 * CHUNK)
    make.stand_in.good_calls["cuMemUnmap"] = 0
    with pytest.raises(DeviceError, match="cuMemUnmap"):
        device.unmap(region)
    assert (len(region.chunks), device.unaccounted_bytes()) == (2, 0)


def test_memory_that_the_driver_maps_and_the_pool_does_not_know_is_unaccounted(make: Maker) -> None:
    device = make()
    region = device.reserve(3 * CHUNK)
    device.map(region, 2 * CHUNK)
    stray = make.stand_in.mapped[region.address]
    make.stand_in.cuMemMap(region.address + 2 * CHUNK, CHUNK, 0, stray, 0)
    assert device.unaccounted_bytes() == CHUNK
    make.stand_in.cuMemUnmap(region.address + 2 * CHUNK, CHUNK)


def test_another_chunk_than_the_book_says_is_missing_from_the_account(make: Maker) -> None:
    device = make()
    region = device.reserve(2 * CHUNK)
    device.map(region, 2 * CHUNK)
    first = make.stand_in.mapped[region.address]
    make.stand_in.cuMemUnmap(region.address + CHUNK, CHUNK)
    make.stand_in.cuMemMap(region.address + CHUNK, CHUNK, 0, first, 0)
    assert device.unaccounted_bytes() == -CHUNK


def test_counting_what_is_mapped_leaks_no_reference(make: Maker) -> None:
    device = make()
    region = device.reserve(8 * CHUNK)
    for _ in range(3):
        device.map(region, 8 * CHUNK)
        assert device.unaccounted_bytes() == 0
        device.unmap(region)
        assert device.unaccounted_bytes() == 0
    assert set(make.stand_in.references.values()) == {1}


def test_swapping_costs_no_driver_memory_and_what_others_take_is_told(make: Maker) -> None:
    device = build(make, 16 * MIB)
    region = device.reserve(8 * CHUNK)
    for _ in range(3):
        device.map(region, 8 * CHUNK)
        device.unmap(region)
    assert device.foreign_bytes(allocator_bytes=0) == 0
    driver = Driver(make.stand_in)
    other = driver.create_memory(0, 4 * MIB)
    assert device.foreign_bytes(allocator_bytes=0) == 4 * MIB
    assert device.foreign_bytes(allocator_bytes=4 * MIB) == 0
    driver.release_memory(other)
    device.close()


def test_every_thread_gets_the_context(make: Maker) -> None:
    device = make()
    region = device.reserve(CHUNK)
    faults: list[BaseException] = []

    def swap() -> None:
        try:
            device.map(region, CHUNK)
            device.fence().synchronize()
            device.unmap(region)
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=swap)
    thread.start()
    thread.join()
    assert faults == []


def test_events_are_reused_when_their_fence_is_forgotten(make: Maker) -> None:
    device = make()
    kept = device.fence()
    for _ in range(100):
        device.fence().synchronize()
    assert len(make.stand_in.events) == 2
    kept.synchronize()


def test_a_fence_with_somebodys_event_leaves_it_to_them(make: Maker) -> None:
    device = make()
    driver = Driver(make.stand_in)
    with_context = device.reserve(CHUNK)  # the calling thread has the context from now on
    event = driver.create_event()
    for _ in range(3):
        fence = device.fence(event)
        assert make.stand_in.events[event]
        fence.synchronize()
        del fence
    others = [device.fence() for _ in range(3)]
    assert len(make.stand_in.events) == 1 + len(others), "the event was not taken into the pool"
    driver.destroy_event(event)
    device.release(with_context)


def test_a_sweep_that_the_driver_refuses_is_told_and_counted(make: Maker) -> None:
    device = make()
    region = device.reserve(2 * CHUNK)
    device.map(region, 2 * CHUNK)
    device.vacate(region)
    make.stand_in.good_calls["cuMemUnmap"] = 0
    with pytest.raises(DeviceError, match="cuMemUnmap"):
        device.sweep()
    assert device.unaccounted_bytes() == 2 * CHUNK
    device.sweep()
    assert device.unaccounted_bytes() == 0


def test_a_host_range_is_registered_once(make: Maker) -> None:
    device = make()
    host = ctypes.create_string_buffer(64)
    for _ in range(2):
        device.register_host(ctypes.addressof(host), 64)
    assert make.stand_in.registered == {ctypes.addressof(host): 64}
    with pytest.raises(DeviceError, match="CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"):
        device.register_host(ctypes.addressof(host) + 32, 64)


def test_the_card_describes_itself(make: Maker) -> None:
    device = build(make, CHUNK)
    assert (device.id, device.description) == ("cuda:0", "stand-in 0, CUDA driver 13.2")
    device.close()


WITHOUT = """
import sys
{hide}
from dormouse.device.driver import Driver, device_count
from dormouse.errors import DeviceError
assert device_count() == 0
try:
    Driver()
except DeviceError as fault:
    print(fault)
"""


def message_without(hide: str) -> list[str]:
    child = subprocess.run([sys.executable, "-c", WITHOUT.format(hide=hide)], stdout=subprocess.PIPE, check=True)
    return child.stdout.decode().splitlines()


def test_without_the_bindings_the_error_says_what_to_install() -> None:
    expected = "cuInit failed: NO_BINDINGS (the package cuda-bindings is missing; install dormouse-serve[gpu])"
    assert message_without("sys.modules['cuda'] = None") == [expected]


def test_without_a_driver_the_error_is_one_line() -> None:
    pytest.importorskip("cuda.bindings", reason="the bindings look for the driver")
    if device_count():
        pytest.skip("this machine has a driver")
    (line,) = message_without("")
    assert line.startswith("cuInit failed: ")


@pytest.mark.gpu
def test_on_a_card_chunks_are_created_once_and_the_drivers_free_memory_stays() -> None:
    if device_count() == 0:
        pytest.skip("this machine has no NVIDIA GPU")
    device = VmmDevice(0, 1024 * MIB)
    region = device.reserve(1024 * MIB)
    foreign = []
    for _ in range(6):
        device.map(region, 1024 * MIB)
        device.fill(region, 1)
        assert device.unaccounted_bytes() == 0
        device.unmap(region)
        assert device.unaccounted_bytes() == 0
        foreign.append(device.foreign_bytes(allocator_bytes=0))
    assert len(set(foreign[1:])) == 1, "the first fill may load a kernel; after that nothing may be taken"
    device.close()
