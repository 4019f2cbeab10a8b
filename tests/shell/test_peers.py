"""Descriptors from executor to executor, in one process: what is adopted, refused, broken off and let go."""

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import pytest
from msgspec import msgpack

from dormouse import wire
from dormouse.core.types import Bytes
from dormouse.device.cpu import CpuDevice
from dormouse.executor import peers
from dormouse.executor.peers import BATCH, Peers

KIB = 1024
CHUNK: Bytes = 64 * KIB
PARTS = 2 * BATCH + 3


class Side:
    """One executor's peers; its copy lane does what it is given when the test says so."""

    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        self.messages: queue.SimpleQueue[wire.FromExecutor] = queue.SimpleQueue()
        self.lane: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.peers = Peers(device, self.messages.put, self.lane.put)

    def introduce(self, address: str, *, detours: bool = False) -> None:
        self.peers.introduce(wire.Introduce("cpu:1", "cpu:1", address, detours))

    def work(self) -> None:
        """The next thing for the copy lane."""
        self.lane.get(timeout=30)()

    def told(self) -> wire.FromExecutor:
        return self.messages.get(timeout=30)

    def adopted(self, address: str) -> None:
        self.introduce(address)
        self.work()
        assert self.told() == wire.PeerAdopted("cpu:1", address, False)


class InParts(CpuDevice):
    """Shares its pool in many parts, as a GPU does, and keeps what it adopts as descriptors do."""

    taken: int = 0

    @property
    def part_bytes(self) -> Bytes:
        return CHUNK

    def share(self) -> Iterator[int]:
        for _ in range(PARTS):
            yield os.memfd_create("part")

    def adopt(self, peer: str, part_bytes: Bytes, parts: int, descriptors: Iterable[int]) -> None:
        del peer, part_bytes
        for fd in descriptors:
            os.close(fd)
            self.taken += 1
        assert self.taken == parts


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def sides(closing: ExitStack) -> tuple[Side, Side]:
    devices = CpuDevice(8 * CHUNK, CHUNK), CpuDevice(8 * CHUNK, CHUNK, index=1)
    for device in devices:
        closing.callback(device.close)
    return Side(devices[0]), Side(devices[1])


def copied(side: Side, address: str) -> None:
    region = side.device.reserve(CHUNK)
    side.device.map(region, CHUNK)
    side.device.copy_peer(region, 0, address, 0, CHUNK)
    side.device.fence().synchronize()
    side.device.unmap(region)
    side.device.release(region)


def test_an_introduced_peer_can_be_copied_from_until_it_is_lost(sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.adopted(other.peers.address)
    copied(one, other.peers.address)
    one.peers.lost(other.peers.address)
    one.work()
    with pytest.raises(Exception, match="NOT_ADOPTED"):
        copied(one, other.peers.address)


def test_a_peer_that_is_lost_while_it_is_being_adopted_is_let_go_at_once(sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.introduce(other.peers.address)
    report = one.lane.get(timeout=30)
    one.peers.lost(other.peers.address)
    report()
    one.work()
    assert one.messages.empty()
    with pytest.raises(Exception, match="NOT_ADOPTED"):
        copied(one, other.peers.address)


def test_where_nobody_listens_there_is_no_way_and_a_line_says_so(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    one.introduce("dormouse/0/nobody")
    told = one.told()
    assert isinstance(told, wire.PeerNotAdopted)
    assert "refused" in told.message


def test_a_pool_of_many_parts_goes_in_batches(closing: ExitStack) -> None:
    before = open_descriptors()
    source, device = InParts(PARTS * CHUNK, CHUNK), InParts(CHUNK, CHUNK)
    for made in (source, device):
        closing.callback(made.close)
    one, other = Side(device), Side(source)
    one.adopted(other.peers.address)
    assert device.taken == PARTS
    assert open_descriptors() - before == 4, "two pools and two listeners"


@pytest.mark.parametrize("parts", [0, 1])
def test_a_peer_that_breaks_off_is_not_adopted(sides: tuple[Side, Side], parts: int) -> None:
    one, _ = sides
    before = open_descriptors()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0dormouse/test")
        listener.listen()
        one.introduce("dormouse/test")
        connection, _address = listener.accept()
        with connection:
            if parts:
                body = msgpack.encode(peers._Offer(CHUNK, 2))
                connection.sendall(wire.LENGTH.pack(len(body)) + body)
        told = one.told()
    assert isinstance(told, wire.PeerNotAdopted)
    assert told.message in ("adopt failed: NO_OFFER (dormouse/test offers nothing)", "the peer is gone")
    assert open_descriptors() == before


def test_one_that_breaks_off_while_it_is_given_a_pool_hurts_nobody(
    sides: tuple[Side, Side], capfd: pytest.CaptureFixture[str]
) -> None:
    one, other = sides
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(f"\0{other.peers.address}")
    one.adopted(other.peers.address)
    del capfd  # it may say why, on its log
    copied(one, other.peers.address)


def test_a_stranger_is_given_nothing(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = sides
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    one.introduce(other.peers.address)
    told = one.told()
    assert isinstance(told, wire.PeerNotAdopted)
    assert told.message == f"the other side belongs to user {os.getuid()}"


def test_where_there_is_one_link_a_peer_is_adopted_without_detours(sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.introduce(other.peers.address, detours=True)
    one.work()
    assert one.told() == wire.PeerAdopted("cpu:1", other.peers.address, False)


def open_descriptors() -> int:
    """When those who send and receive have ended."""
    for thread in threading.enumerate():
        if thread.name == "peers":
            thread.join(timeout=30)
    return len(list(os.scandir("/proc/self/fd")))
