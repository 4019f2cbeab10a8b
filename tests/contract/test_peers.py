"""The part of the device contract that takes two: pools that are shared, copies from them, and detours."""

import os
import random
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from dormouse.device.base import Device
from dormouse.device.driver import device_count
from dormouse.device.vmm import VmmDevice
from dormouse.errors import DeviceError
from tests.contract.test_device import CHUNKS, KINDS, MIB, Host, kinds, mapped, noise, read, write

PEER = "the other"


class Maker(Protocol):
    kind: str
    stand_in: Any

    def __call__(self, *faults: str, link_bytes_per_s: int | None = None, index: int = 0) -> Device: ...


keeps_data = pytest.mark.parametrize("kind", kinds("cpu", "stand-in", "cuda"))
over_a_driver = pytest.mark.parametrize("kind", kinds("stand-in", "cuda"))


@pytest.fixture(params=kinds(*KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def introduce(device: Device, source: Device, name: str = PEER) -> None:
    """As two processes do it, less the socket."""
    device.adopt(name, source.part_bytes, source.capacity_bytes // source.part_bytes, source.share())


def open_descriptors() -> int:
    return len(list(os.scandir("/proc/self/fd")))


# ------------------------------------------------------------------ peers


@keeps_data
def test_what_a_peer_holds_is_copied_from_its_chunks_and_left_there(make: Maker) -> None:
    source, device = make(index=1), make()
    introduce(device, source)
    filler, held = mapped(source, 3), mapped(source, 4)
    host = noise(4 * source.chunk_bytes)
    write(source, held, 0, host)
    source.fill(filler, 0xEE)
    region = mapped(device, 4)
    device.fill(region, 0xFF)
    for place, chunk in enumerate(held.chunks):
        offset = place * source.chunk_bytes
        device.copy_peer(region, offset, PEER, chunk * source.chunk_bytes, source.chunk_bytes)
    device.fence().synchronize()
    assert read(device, region, 0, host.size_bytes) == host.content
    assert read(source, held, 0, host.size_bytes) == host.content
    device.forsake(PEER)  # in one process the CPU device sees the other's window as mappings of its own pool
    assert (device.unaccounted_bytes(), source.unaccounted_bytes()) == (0, 0)


@keeps_data
def test_a_copy_may_begin_in_one_chunk_of_a_peer_and_end_in_another(make: Maker) -> None:
    source, device = make(index=1), make()
    introduce(device, source)
    host = noise(3 * MIB)
    held = mapped(source, CHUNKS)
    write(source, held, MIB - 7, host)
    region = mapped(device, 2)
    device.copy_peer(region, 11, PEER, MIB - 7, host.size_bytes)
    device.fence().synchronize()
    assert read(device, region, 11, host.size_bytes) == host.content


def test_two_peers_adopt_each_other_and_nothing_is_left_behind(make: Maker) -> None:
    before = open_descriptors()
    one, other = make(), make(index=1)
    opened = open_descriptors() - before
    introduce(one, other)
    introduce(other, one)
    assert open_descriptors() - before == opened, "descriptors are closed when their memory is mapped"
    for device in (one, other):
        region = mapped(device, CHUNKS)
        device.copy_peer(region, 0, PEER, 0, device.capacity_bytes)
        device.fence().synchronize()
        device.unmap(region)
    for device in (one, other):
        device.forsake(PEER)
    assert one.unaccounted_bytes() == other.unaccounted_bytes() == 0


def test_a_peer_is_forsaken_once_and_copied_from_no_more(make: Maker) -> None:
    source, device = make(index=1), make()
    region = mapped(device, 1)
    device.forsake(PEER)
    introduce(device, source)
    device.copy_peer(region, 0, PEER, 0, MIB)
    device.forsake(PEER)
    with pytest.raises(DeviceError, match="copy from peer failed: NOT_ADOPTED \\(the other\\)"):
        device.copy_peer(region, 0, PEER, 0, MIB)
    introduce(device, source)
    device.copy_peer(region, 0, PEER, 0, MIB)
    device.fence().synchronize()
    assert device.unaccounted_bytes() == 0


@keeps_data
def test_a_peer_that_closes_leaves_its_memory_to_those_who_adopted_it(make: Maker) -> None:
    source, device = make(index=1), make()
    introduce(device, source)
    held = mapped(source, 1)
    host = noise(MIB)
    write(source, held, 0, host)
    source.close()
    region = mapped(device, 1)
    device.copy_peer(region, 0, PEER, 0, MIB)
    device.fence().synchronize()
    assert read(device, region, 0, MIB) == host.content


def test_an_injected_fault_of_a_peer_copy_surfaces_at_its_fences_and_the_next_load_is_clean(make: Maker) -> None:
    source, device = make(index=1), make("peer-copy:2")
    introduce(device, source)
    region = mapped(device, 2)
    device.copy_peer(region, 0, PEER, 0, MIB)
    sound = device.fence()
    device.copy_peer(region, MIB, PEER, MIB, MIB)
    broken = device.fence()
    sound.synchronize()
    with pytest.raises(DeviceError, match="INJECTED"):
        broken.synchronize()
    device.copy_peer(region, 0, PEER, 0, 2 * MIB)
    device.fence().synchronize()


def test_an_adoption_that_fails_leaves_no_addresses_behind(make: Maker) -> None:
    source, device = make(index=1), make("adopt:1")
    descriptors = source.share()
    with pytest.raises(DeviceError, match="INJECTED"):
        device.adopt(PEER, source.part_bytes, source.capacity_bytes // source.part_bytes, descriptors)
    for fd in descriptors:
        os.close(fd)
    introduce(device, source)


@pytest.mark.parametrize("kind", ["stand-in"])
@pytest.mark.parametrize(
    ("call", "good"),
    [("cuMemAddressReserve", 0), ("cuMemImportFromShareableHandle", 3), ("cuMemMap", 2), ("cuMemSetAccess", 0)],
)
def test_an_adoption_that_the_driver_refuses_midway_is_rolled_back(make: Maker, call: str, good: int) -> None:
    source, device = make(index=1), make()
    before = open_descriptors()
    make.stand_in.good_calls[call] = good
    with pytest.raises(DeviceError, match=call):
        introduce(device, source)
    assert (make.stand_in.mapped, make.stand_in.reserved, open_descriptors()) == ({}, {}, before)
    introduce(device, source)


# ------------------------------------------------------------------ detours


@pytest.fixture
def devices(make: Maker) -> Iterator[tuple[Device, str]]:
    """A device, and the neighbour that a detour of its copies was opened over."""
    if make.kind == "cuda" and device_count() < 2:
        pytest.skip("this machine has no second NVIDIA GPU")
    device = make()
    device.open_detour("cuda:1")
    device.open_detour("cuda:1")
    yield device, "cuda:1"


@over_a_driver
def test_copies_over_both_links_arrive_and_a_fence_stands_behind_all_of_them(devices: tuple[Device, str]) -> None:
    device, neighbour = devices
    region = mapped(device, CHUNKS)
    for seed in range(3):
        host = noise(CHUNKS * device.chunk_bytes, seed)
        device.fill(region, 0xFF)
        fences = []
        for place, offset in enumerate(range(0, host.size_bytes, MIB)):
            detour = neighbour if place % 2 else None
            device.copy_in(region, offset, host.address + offset, MIB, detour)
            fences.append(device.fence())
        random.Random(seed).choice(fences).synchronize()
        fences[-1].synchronize()
        assert read(device, region, 0, host.size_bytes) == host.content
    assert device.unaccounted_bytes() == 0


@over_a_driver
def test_a_copy_longer_than_all_slots_takes_the_detour_whole(devices: tuple[Device, str]) -> None:
    device, neighbour = devices
    assert isinstance(device, VmmDevice)
    region = mapped(device, CHUNKS)
    host = noise(CHUNKS * device.chunk_bytes - 5)
    device.copy_in(region, 5, host.address, host.size_bytes, neighbour)
    device.fence().synchronize()
    assert read(device, region, 5, host.size_bytes) == host.content


@over_a_driver
def test_a_fault_on_a_detour_is_a_fault_of_the_copy(make: Maker) -> None:
    if make.kind == "cuda" and device_count() < 2:
        pytest.skip("this machine has no second NVIDIA GPU")
    device = make("copy:2")
    device.open_detour("cuda:1")
    region, host = mapped(device, 1), Host(bytes(MIB))
    device.copy_in(region, 0, host.address, MIB)
    device.copy_in(region, MIB, host.address, MIB, "cuda:1")
    with pytest.raises(DeviceError, match="INJECTED"):
        device.fence().synchronize()
    write(device, region, 0, host)


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
def test_where_there_is_one_link_there_is_no_detour(make: Maker) -> None:
    with pytest.raises(DeviceError, match="open detour failed: ONE_LINK"):
        make().open_detour("cpu:1")


@pytest.mark.parametrize("kind", ["stand-in"])
@pytest.mark.parametrize(
    ("neighbour", "apart", "message"),
    [("cuda:0", False, "NO_NEIGHBOUR"), ("cpu:0", False, "NO_NEIGHBOUR"), ("cuda:1", True, "NO_PEER_ACCESS")],
)
def test_a_detour_that_does_not_exist_is_refused(make: Maker, neighbour: str, apart: bool, message: str) -> None:
    make.stand_in.apart = apart
    with pytest.raises(DeviceError, match=message):
        make().open_detour(neighbour)


@pytest.mark.parametrize("kind", ["stand-in"])
@pytest.mark.parametrize(
    ("call", "good"),
    [("cuMemCreate", 0), ("cuMemMap", 0), ("cuMemSetAccess", 1), ("cuStreamCreate", 1), ("cuEventCreate", 6)],
)
def test_a_detour_that_cannot_be_made_leaves_nothing_behind(make: Maker, call: str, good: int) -> None:
    device = make()
    made = make.stand_in
    before = [len(kept) for kept in (made.memory, made.reserved, made.mapped, made.streams, made.events)]
    contexts = made.contexts
    made.good_calls[call] = good
    with pytest.raises(DeviceError, match=call):
        device.open_detour("cuda:1")
    assert [len(kept) for kept in (made.memory, made.reserved, made.mapped, made.streams, made.events)] == before
    assert made.contexts == contexts
    device.open_detour("cuda:1")
