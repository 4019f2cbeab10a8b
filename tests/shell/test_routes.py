"""The ways of one load on the CPU device: what is asked of the device, and images that come from a peer's pool."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dormouse.core.messages import Load
from dormouse.core.types import FOREVER_NS, Bytes, CommandId, ExecutorId, FunctionId
from dormouse.core.types import Path as HowFound
from dormouse.device.base import Device, Region
from dormouse.device.cpu import CpuDevice
from dormouse.errors import DeviceError
from dormouse.executor.arrival import Arrival, ImageNotArrived
from dormouse.executor.compute import CpuCompute
from dormouse.executor.copying import Piece
from dormouse.executor.routes import FromHost, FromPeer, held_by, route_of
from dormouse.executor.runner import Runner
from dormouse.wire import Extent, LoadImage, PeerSource
from tests.shell.test_runner import CHUNK, GROUP, Bench, Make, make, same

__all__ = ["make"]

EXTENTS = (Extent(0, 5 * CHUNK),)
COMMAND = Load(ExecutorId("cpu:0"), CommandId(1), FunctionId("f/1"), HowFound.HOST, 0, FOREVER_NS)


class Asked(CpuDevice):
    """Keeps which link each copy was asked of."""

    def __init__(self) -> None:
        super().__init__(8 * CHUNK, CHUNK)
        self.links: list[str | None] = []

    def copy_in(
        self, region: Region, offset: Bytes, host_address: int, size_bytes: Bytes, detour: str | None = None
    ) -> None:
        del region, offset, host_address, size_bytes
        self.links.append(detour)


def test_the_control_side_chooses_the_way() -> None:
    assert route_of(LoadImage(COMMAND, "d", EXTENTS), 7) == FromHost(7, EXTENTS)
    assert route_of(LoadImage(COMMAND, "d", EXTENTS, detours=("cuda:1",)), 7) == FromHost(7, EXTENTS, ("cuda:1",))
    peer = LoadImage(COMMAND, "d", (), PeerSource("address", EXTENTS))
    assert route_of(peer, 7) == FromPeer("address", EXTENTS)


def test_links_take_turns() -> None:
    device = Asked()
    for detours, links in (((), [None] * 4), (("a",), [None, "a", None, "a"]), (("a", "b"), [None, "a", "b", None])):
        device.links.clear()
        route = FromHost(0, EXTENTS, detours)
        for number in range(4):
            route.queue(device, Region(0, CHUNK), number, Piece(0, 0, 1))
        assert device.links == links
    assert {FromHost(0, EXTENTS).kind, FromHost(0, EXTENTS, ("a",)).kind, FromPeer("p", EXTENTS).kind} == {
        "host",
        "host+a",
        "peer",
    }
    device.close()


def test_a_region_is_held_in_runs_of_neighbouring_chunks() -> None:
    region = Region(0, 9 * CHUNK, [4, 5, 1, 7, 8])
    assert held_by(region, CHUNK) == (Extent(4 * CHUNK, 2 * CHUNK), Extent(CHUNK, CHUNK), Extent(7 * CHUNK, 2 * CHUNK))


@pytest.fixture
def loaded(make: Make) -> Bench:
    """A function that is resident, to be copied from."""
    bench = make("gpt2")
    bench.load()
    return bench


Elsewhere = Callable[..., tuple[Runner, CpuDevice]]


@pytest.fixture
def elsewhere(loaded: Bench, tmp_path: Path, request: pytest.FixtureRequest) -> Elsewhere:
    """Another device with the same function, which has adopted the first one's pool."""

    def made(*faults: str) -> tuple[Runner, CpuDevice]:
        device = CpuDevice(4 * 1024 * 1024, CHUNK, index=1, faults=faults)
        request.addfinalizer(device.close)
        device.adopt("peer", loaded.device.part_bytes, 1, loaded.device.share())
        return Runner(device, CpuCompute(), tmp_path / "image", loaded.arena.address, GROUP, poison=True), device

    return made


def test_an_image_from_a_peer_answers_as_one_from_the_host(loaded: Bench, elsewhere: Elsewhere) -> None:
    runner, device = elsewhere()
    order: list[str] = []

    def note(arrival: Arrival) -> None:
        order.append("after" if arrival.complete else "beside")

    for _ in range(3):
        arrival = Arrival("peer")
        route = FromPeer("peer", loaded.runner.held)
        runner.load((), arrival, partial(note, arrival), route=route)
        answer = runner.run(arrival, loaded.example(), (), lambda _: True)
        assert same(answer, loaded.plain()(loaded.example()))
        runner.evict()
        arrival = Arrival()
        runner.load(loaded.extents, arrival, partial(note, arrival))
        assert same(runner.run(arrival, loaded.example(), (), lambda _: True), answer)
        runner.evict()
    assert order == ["after", "beside"] * 3
    assert (device.free_bytes, device.unaccounted_bytes()) == (device.capacity_bytes, 0)


def test_every_group_of_an_image_from_a_peer_has_its_fence(loaded: Bench, elsewhere: Elsewhere) -> None:
    runner, _ = elsewhere()
    arrival = Arrival("peer")
    runner.load((), arrival, route=FromPeer("peer", loaded.runner.held))
    assert arrival.announced == -(-loaded.index.image_bytes // GROUP) > FromPeer.groups_per_copy


def test_a_load_whose_peer_is_lost_midway_fails_and_gives_everything_back(loaded: Bench, elsewhere: Elsewhere) -> None:
    runner, device = elsewhere()
    arrival = Arrival("peer")

    class LostMidway(FromPeer):
        def queue(self, device: Device, region: Region, number: int, piece: Piece) -> None:
            super().queue(device, region, number, piece)
            if number == 1:
                arrival.fail("the peer is gone")

    with pytest.raises(ImageNotArrived, match="the peer is gone"):
        runner.load((), arrival, route=LostMidway("peer", loaded.runner.held))
    runner.discard()
    assert (device.free_bytes, device.unaccounted_bytes()) == (device.capacity_bytes, 0)
    again = Arrival()
    runner.load(loaded.extents, again)
    assert same(runner.run(again, loaded.example(), (), lambda _: True), loaded.plain()(loaded.example()))


def test_a_peer_that_is_lost_when_all_has_come_is_no_loss(loaded: Bench, elsewhere: Elsewhere) -> None:
    runner, _ = elsewhere()
    arrival = Arrival("peer")
    runner.load((), arrival, route=FromPeer("peer", loaded.runner.held))
    arrival.fail("the peer is gone")
    assert same(runner.run(arrival, loaded.example(), (), lambda _: True), loaded.plain()(loaded.example()))


def test_a_copy_from_a_peer_that_fails_is_told(loaded: Bench, elsewhere: Elsewhere) -> None:
    runner, device = elsewhere("peer-copy:2")
    with pytest.raises(DeviceError, match="INJECTED"):
        runner.load((), Arrival("peer"), route=FromPeer("peer", loaded.runner.held))
    runner.discard()
    assert device.unaccounted_bytes() == 0
