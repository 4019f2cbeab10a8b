"""Virtual time on the simulated device: mapping takes its time, the link its own, and waiting joins them."""

import pytest

from dormouse.device.simulated import SimulatedDevice, VirtualClock
from dormouse.errors import DeviceError

CHUNK = 1000


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(now_ns=5)


@pytest.fixture
def device(clock: VirtualClock) -> SimulatedDevice:
    return SimulatedDevice(clock, 10 * CHUNK, CHUNK, link_bytes_per_s=10**9, map_ns=7, unmap_ns=3)


def test_mapping_takes_its_time_by_the_chunk(device: SimulatedDevice, clock: VirtualClock) -> None:
    region = device.reserve(3 * CHUNK)
    device.map(region, 3 * CHUNK)
    assert clock.now_ns == 5 + 3 * 7
    device.unmap(region)
    assert clock.now_ns == 5 + 3 * 7 + 3 * 3


def test_copies_follow_each_other_on_the_link_while_mapping_goes_on(
    device: SimulatedDevice, clock: VirtualClock
) -> None:
    region = device.reserve(3 * CHUNK)
    device.map(region, CHUNK)
    device.copy_in(region, 0, 1, CHUNK)
    first = device.fence()
    device.map(region, 3 * CHUNK)
    device.copy_in(region, CHUNK, 1, 2 * CHUNK)
    second = device.fence()
    assert (first.due_ns, second.due_ns) == (12 + 1000, 12 + 3000)
    assert clock.now_ns == 26
    second.wait(0)
    first.synchronize()
    assert clock.now_ns == 12 + 3000


def test_an_idle_link_starts_when_it_is_asked(device: SimulatedDevice, clock: VirtualClock) -> None:
    region = device.reserve(CHUNK)
    device.map(region, CHUNK)
    clock.reach(10_000)
    device.copy_in(region, 0, 1, 500)
    device.fence().synchronize()
    assert clock.now_ns == 10_500


def test_a_fault_takes_the_time_of_the_copy(clock: VirtualClock) -> None:
    device = SimulatedDevice(clock, CHUNK, CHUNK, link_bytes_per_s=10**9, faults=("copy:1",))
    region = device.reserve(CHUNK)
    device.map(region, CHUNK)
    device.copy_in(region, 0, 1, CHUNK)
    with pytest.raises(DeviceError, match="INJECTED"):
        device.fence().synchronize()
    assert clock.now_ns == 1005
