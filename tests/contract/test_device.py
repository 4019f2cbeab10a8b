"""One contract for every device: what device/base.py promises, asked of each kind in turn.

Memory of a region is read with ``copy_out``; only the tests that are about the CPU device look at addresses.
"""

import ctypes
import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from dormouse.device import pages
from dormouse.device.base import Device, Region
from dormouse.device.cpu import CpuDevice
from dormouse.device.faults import Faults
from dormouse.device.lane import CopyLane
from dormouse.errors import ConfigurationFault, DeviceError, OutOfChunks

CHUNKS = 8
MIB = 1024 * 1024


class MakeDevice(Protocol):
    """Makes a device of ``CHUNKS`` chunks of the kind under test; the fixture ``make`` of conftest.py."""

    def __call__(self, *faults: str, link_bytes_per_s: int | None = None) -> Device: ...


KEEPS_DATA = ("cpu", "stand-in", "cuda")
"""``stand-in`` is the CUDA device over a stand-in for the driver."""
KINDS = (*KEEPS_DATA, "simulated")


def kinds(*names: str) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.gpu if name == "cuda" else ()) for name in names]


keeps_data = pytest.mark.parametrize("kind", kinds(*KEEPS_DATA))
only_cpu = pytest.mark.parametrize("kind", kinds("cpu"))


@pytest.fixture(params=kinds(*KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def device(make: MakeDevice) -> Device:
    return make()


class Host:
    """A buffer in host memory that a device copies from and to."""

    def __init__(self, content: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(content, len(content))
        self.size_bytes = len(content)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._buffer)

    @property
    def content(self) -> bytes:
        return self._buffer.raw


def noise(size_bytes: int, seed: int = 0) -> Host:
    return Host(random.Random(seed).randbytes(size_bytes))


def mapped(device: Device, chunks: int) -> Region:
    region = device.reserve(chunks * device.chunk_bytes)
    device.map(region, chunks * device.chunk_bytes)
    return region


def write(device: Device, region: Region, offset: int, host: Host) -> None:
    device.copy_in(region, offset, host.address, host.size_bytes)
    device.fence().synchronize()


def read(device: Device, region: Region, offset: int, size_bytes: int) -> bytes:
    host = Host(bytes(size_bytes))
    device.copy_out(region, offset, host.address, size_bytes)
    device.fence().synchronize()
    return host.content


# ------------------------------------------------------------------ mapping


def test_a_new_device_is_empty_and_accounted_for(device: Device) -> None:
    assert device.capacity_bytes == device.free_bytes == CHUNKS * device.chunk_bytes
    assert device.unaccounted_bytes() == 0


def test_the_address_stays_while_chunks_come_and_go(device: Device) -> None:
    region = device.reserve(3 * device.chunk_bytes)
    address = region.address
    for _ in range(3):
        device.map(region, 3 * device.chunk_bytes)
        assert (region.address, len(region.chunks)) == (address, 3)
        device.unmap(region)
        assert (region.address, region.chunks) == (address, [])


def test_chunks_of_a_vacated_region_serve_another_at_once_and_the_sweep_takes_the_rest(device: Device) -> None:
    leaving, coming = mapped(device, CHUNKS), device.reserve(CHUNKS * device.chunk_bytes)
    device.vacate(leaving)
    assert (leaving.chunks, device.free_bytes) == ([], device.capacity_bytes)
    device.map(coming, CHUNKS * device.chunk_bytes)
    device.sweep()
    device.sweep()
    assert device.unaccounted_bytes() == 0
    device.unmap(coming)
    device.release(leaving)
    device.release(coming)
    assert (device.free_bytes, device.unaccounted_bytes()) == (device.capacity_bytes, 0)


def test_a_vacated_region_can_be_mapped_again_or_released_unswept(device: Device) -> None:
    region = mapped(device, 3)
    for _ in range(2):
        device.vacate(region)
        device.map(region, 2 * device.chunk_bytes)
        assert device.unaccounted_bytes() == 0
    device.vacate(region)
    device.vacate(region)
    device.release(region)
    assert (device.free_bytes, device.unaccounted_bytes()) == (device.capacity_bytes, 0)


def test_a_reservation_is_rounded_up_to_chunks_and_holds_no_memory(device: Device) -> None:
    region = device.reserve(device.chunk_bytes + 1)
    assert region.reserved_bytes == 2 * device.chunk_bytes
    assert device.free_bytes == device.capacity_bytes
    assert device.unaccounted_bytes() == 0


def test_more_addresses_than_memory_can_be_reserved(device: Device) -> None:
    regions = [device.reserve(device.capacity_bytes) for _ in range(4)]
    starts = sorted(region.address for region in regions)
    assert all(b - a >= device.capacity_bytes for a, b in itertools.pairwise(starts))


def test_a_map_takes_only_the_chunks_that_are_missing(device: Device) -> None:
    region = device.reserve(4 * device.chunk_bytes)
    device.map(region, 1)
    assert len(region.chunks) == 1
    first = region.chunks[0]
    device.map(region, device.chunk_bytes + 1)
    device.map(region, device.chunk_bytes)
    assert len(region.chunks) == 2
    assert region.chunks[0] == first
    assert device.free_bytes == (CHUNKS - 2) * device.chunk_bytes
    assert device.unaccounted_bytes() == 0


def test_a_map_that_does_not_fit_maps_nothing(device: Device) -> None:
    holder = mapped(device, CHUNKS - 2)
    region = device.reserve(3 * device.chunk_bytes)
    device.map(region, device.chunk_bytes)
    with pytest.raises(OutOfChunks, match="OUT_OF_CHUNKS"):
        device.map(region, 3 * device.chunk_bytes)
    assert len(region.chunks) == 1
    assert device.free_bytes == device.chunk_bytes
    assert device.unaccounted_bytes() == 0
    device.unmap(holder)
    device.map(region, 3 * device.chunk_bytes)
    assert len(region.chunks) == 3


def test_an_unmap_frees_every_chunk_for_another_region(device: Device) -> None:
    first = mapped(device, CHUNKS)
    device.unmap(first)
    device.unmap(first)
    assert device.free_bytes == device.capacity_bytes
    assert device.unaccounted_bytes() == 0
    second = mapped(device, CHUNKS)
    assert sorted(second.chunks) == list(range(CHUNKS))
    assert device.unaccounted_bytes() == 0


def test_a_released_region_gives_its_addresses_back(device: Device) -> None:
    region = mapped(device, 2)
    device.unmap(region)
    device.release(region)
    assert device.unaccounted_bytes() == 0
    assert len(mapped(device, CHUNKS).chunks) == CHUNKS


def test_a_device_closes_with_regions_still_mapped_and_closes_twice(device: Device) -> None:
    mapped(device, 3)
    device.close()
    device.close()


# ------------------------------------------------------------------ copies


@keeps_data
@pytest.mark.parametrize("offset", [0, 5, 2 * MIB - 3])
def test_what_is_copied_in_comes_out_the_same(device: Device, offset: int) -> None:
    region = mapped(device, 4)
    host = noise(3 * MIB + 1)
    write(device, region, offset, host)
    assert read(device, region, offset, host.size_bytes) == host.content


@keeps_data
def test_a_region_of_scattered_chunks_reads_in_order(device: Device) -> None:
    small = [mapped(device, 1) for _ in range(CHUNKS)]
    for region in small[::2]:
        device.unmap(region)
    scattered = mapped(device, CHUNKS // 2)
    assert scattered.chunks[1] != scattered.chunks[0] + 1
    host = noise(CHUNKS // 2 * device.chunk_bytes)
    write(device, scattered, 0, host)
    for region in small[1::2]:
        device.fill(region, 0xEE)
    assert read(device, scattered, 0, host.size_bytes) == host.content
    assert device.unaccounted_bytes() == 0


@keeps_data
def test_what_is_copied_in_over_a_vacated_region_stays_when_that_is_swept(device: Device) -> None:
    leaving, coming = mapped(device, CHUNKS), device.reserve(CHUNKS * device.chunk_bytes)
    device.fill(leaving, 0xEE)
    device.vacate(leaving)
    device.map(coming, CHUNKS * device.chunk_bytes)
    host = noise(CHUNKS * device.chunk_bytes)
    device.copy_in(coming, 0, host.address, host.size_bytes)
    device.sweep()
    device.fence().synchronize()
    assert read(device, coming, 0, host.size_bytes) == host.content


@keeps_data
def test_mapping_more_keeps_what_was_copied(device: Device) -> None:
    region = device.reserve(3 * device.chunk_bytes)
    device.map(region, device.chunk_bytes)
    host = noise(device.chunk_bytes)
    device.copy_in(region, 0, host.address, host.size_bytes)
    device.map(region, 3 * device.chunk_bytes)
    device.fence().synchronize()
    assert read(device, region, 0, host.size_bytes) == host.content


@keeps_data
def test_copies_happen_in_the_order_they_were_asked_for(device: Device) -> None:
    region = mapped(device, 1)
    writes = [noise(64 * 1024, seed) for seed in range(20)]
    reads = [Host(bytes(64 * 1024)) for _ in writes]
    for source, target in zip(writes, reads, strict=True):
        device.copy_in(region, 0, source.address, source.size_bytes)
        device.copy_out(region, 0, target.address, target.size_bytes)
    device.fence().synchronize()
    assert [host.content for host in reads] == [host.content for host in writes]


@keeps_data
def test_a_fence_passed_means_the_copies_before_it_are_done(device: Device) -> None:
    region = mapped(device, 4)
    device.fill(region, 1)
    hosts = [Host(bytes(MIB)) for _ in range(4)]
    fences = []
    for part, host in enumerate(hosts):
        device.copy_out(region, part * MIB, host.address, MIB)
        fences.append(device.fence())
    for fence, host in zip(fences, hosts, strict=True):
        fence.synchronize()
        assert host.content == b"\x01" * MIB


def test_many_fences_pass_from_any_thread_in_any_order(device: Device) -> None:
    region = mapped(device, 1)
    host = noise(4096)
    fences = []
    for _ in range(500):
        device.copy_in(region, 0, host.address, host.size_bytes)
        fences.append(device.fence())
    waiters = [threading.Thread(target=fence.synchronize) for fence in reversed(fences[::50])]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    for fence in fences:
        fence.wait(0)
        fence.synchronize()


@keeps_data
def test_fill_sets_every_mapped_byte(device: Device) -> None:
    region = mapped(device, 2)
    write(device, region, 0, noise(MIB))
    device.fill(region, 0xA5)
    assert read(device, region, 0, 2 * device.chunk_bytes) == b"\xa5" * (2 * device.chunk_bytes)


@keeps_data
def test_host_memory_registered_twice_is_copied_from(device: Device) -> None:
    host = noise(2 * MIB)
    device.register_host(host.address, host.size_bytes)
    device.register_host(host.address, host.size_bytes)
    region = mapped(device, 1)
    write(device, region, 0, host)
    assert read(device, region, 0, MIB) == host.content[:MIB]


@only_cpu
def test_a_link_limit_sets_the_time_that_copies_take(make: MakeDevice) -> None:
    rate = 256 * MIB
    device = make(link_bytes_per_s=rate)
    region = mapped(device, 4)
    host = noise(MIB)
    began = time.monotonic()
    for _ in range(64):
        device.copy_in(region, 0, host.address, host.size_bytes)
    device.fence().synchronize()
    assert 64 * MIB / (time.monotonic() - began) == pytest.approx(rate, rel=0.15)


# ------------------------------------------------------------------ faults


def test_a_failed_map_leaves_nothing_mapped_and_the_device_usable(make: MakeDevice) -> None:
    device = make("map:2")
    region = device.reserve(3 * device.chunk_bytes)
    device.map(region, device.chunk_bytes)
    with pytest.raises(DeviceError, match="map failed: INJECTED"):
        device.map(region, 3 * device.chunk_bytes)
    assert len(region.chunks) == 1
    assert device.free_bytes == (CHUNKS - 1) * device.chunk_bytes
    assert device.unaccounted_bytes() == 0
    device.map(region, 3 * device.chunk_bytes)
    assert len(region.chunks) == 3


def test_a_failed_copy_is_told_by_every_fence_after_it_and_none_before(make: MakeDevice) -> None:
    device = make("copy:2")
    region = mapped(device, 1)
    host = noise(4096)
    fences = []
    for _ in range(3):
        device.copy_in(region, 0, host.address, host.size_bytes)
        fences.append(device.fence())
    fences[0].synchronize()
    for fence in fences[1:]:
        with pytest.raises(DeviceError, match="copy failed: INJECTED"):
            fence.synchronize()
    with pytest.raises(DeviceError):
        fences[1].wait(0)


@keeps_data
def test_a_device_works_on_after_a_failed_copy(make: MakeDevice) -> None:
    device = make("copy:1")
    region = mapped(device, 2)
    host = noise(MIB)
    with pytest.raises(DeviceError):
        write(device, region, 0, host)
    device.unmap(region)
    assert device.unaccounted_bytes() == 0
    device.map(region, 2 * device.chunk_bytes)
    write(device, region, 0, host)
    assert read(device, region, 0, MIB) == host.content


def test_a_failed_unmap_keeps_the_book_true(make: MakeDevice) -> None:
    device = make("unmap:1")
    region = mapped(device, 2)
    with pytest.raises(DeviceError, match="unmap failed: INJECTED"):
        device.unmap(region)
    assert len(region.chunks) == 2
    assert device.unaccounted_bytes() == 0
    device.unmap(region)
    assert device.free_bytes == device.capacity_bytes


def test_a_fault_without_a_number_is_refused_and_one_for_somebody_else_is_not_ours() -> None:
    with pytest.raises(ConfigurationFault, match=r"fault 'copy:' cannot be injected"):
        Faults(["copy:"])
    Faults(["execute:boom"]).strike("copy")


# ------------------------------------------------------------------ the CPU device in particular


@only_cpu
def test_a_region_is_ordinary_memory_at_its_address(device: Device) -> None:
    region = mapped(device, 2)
    host = noise(3 * MIB)
    write(device, region, 0, host)
    assert ctypes.string_at(region.address, host.size_bytes) == host.content


@only_cpu
def test_what_the_kernel_maps_is_measured_not_believed(device: Device) -> None:
    region = mapped(device, 3)
    pages.withdraw(region.address, device.chunk_bytes)
    assert device.unaccounted_bytes() == -device.chunk_bytes


TOUCH = """
import ctypes
from dormouse.device.cpu import CpuDevice
device = CpuDevice(16 << 20)
region = device.reserve(4 << 20)
device.map(region, 4 << 20)
ctypes.memset(region.address, 1, 4 << 20)
device.unmap(region)
print("unmapped", flush=True)
print(ctypes.string_at(region.address + {offset}, 1))
"""


@pytest.mark.parametrize("offset", [0, 4 * MIB - 1])
def test_touching_an_unmapped_region_kills_the_process(offset: int) -> None:
    child = subprocess.run([sys.executable, "-c", TOUCH.format(offset=offset)], stdout=subprocess.PIPE, check=False)
    assert (child.stdout, child.returncode) == (b"unmapped\n", -signal.SIGSEGV)


def test_a_bug_in_a_copy_does_not_leave_its_waiters_hanging() -> None:
    def broken() -> None:
        raise ValueError("no such address")

    lane = CopyLane("broken")
    lane.copy(broken, 1)
    with pytest.raises(DeviceError, match="copy failed: ValueError"):
        lane.fence().synchronize()
    lane.fence().synchronize()
    lane.stop()


@only_cpu
def test_a_pool_smaller_than_a_chunk_is_refused(kind: str) -> None:
    assert kind == "cpu"
    with pytest.raises(DeviceError, match="do not hold one chunk"):
        CpuDevice(1000)


# ------------------------------------------------------------------ any order of calls


class AnyOrder(RuleBasedStateMachine):
    """Regions come, grow, shrink and go; a model of two numbers a region says what must hold."""

    make: Callable[..., Device]
    reads: bool
    regions = Bundle("regions")

    def __init__(self) -> None:
        super().__init__()
        self.device = self.make()
        self.model: dict[int, tuple[Region, int]] = {}
        self.stamps: dict[int, int] = {}

    @rule(target=regions, chunks=st.integers(1, CHUNKS + 2))
    def reserve(self, chunks: int) -> Region:
        region = self.device.reserve(chunks * self.device.chunk_bytes)
        self.model[region.address] = (region, 0)
        return region

    @rule(region=regions, share=st.floats(0, 1))
    def map(self, region: Region, share: float) -> None:
        size = int(region.reserved_bytes * share)
        has = self.model[region.address][1]
        wanted = max(has, -(-size // self.device.chunk_bytes))
        free = CHUNKS - sum(count for _, count in self.model.values())
        if wanted - has > free:
            with pytest.raises(OutOfChunks):
                self.device.map(region, size)
            return
        self.device.map(region, size)
        self.model[region.address] = (region, wanted)
        if wanted > has and self.reads:
            self.stamps[region.address] = stamp = (self.stamps.get(region.address, 0) + region.address // MIB) % 255 + 1
            self.device.fill(region, stamp)

    @rule(region=regions)
    def unmap(self, region: Region) -> None:
        self.device.unmap(region)
        self.model[region.address] = (region, 0)

    @rule(region=consumes(regions))
    def release(self, region: Region) -> None:
        self.device.unmap(region)
        self.device.release(region)
        del self.model[region.address]

    @invariant()
    def every_chunk_is_in_one_place(self) -> None:
        held = [chunk for region, _ in self.model.values() for chunk in region.chunks]
        assert len(held) == len(set(held))
        assert set(held) <= set(range(CHUNKS))
        assert self.device.free_bytes == (CHUNKS - len(held)) * self.device.chunk_bytes
        assert all(len(region.chunks) == count for region, count in self.model.values())
        assert self.device.unaccounted_bytes() == 0

    @invariant()
    def nobody_writes_into_anothers_memory(self) -> None:
        if self.reads:
            for region, count in self.model.values():
                for chunk in range(count):
                    stamp = self.stamps[region.address]
                    assert read(self.device, region, chunk * self.device.chunk_bytes, 1) == bytes([stamp])

    def teardown(self) -> None:
        self.device.close()


def test_any_order_of_calls_loses_no_chunk_and_maps_none_twice(kind: str, make: MakeDevice) -> None:
    machine = type("AnyOrderOf", (AnyOrder,), {"make": staticmethod(make), "reads": kind in KEEPS_DATA})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
