"""Executors that map each other's pools: descriptors go from process to process over a Unix socket of their own.

The one that is to be read listens at an address that the control side passes on; whoever connects, from the same user,
is sent the descriptors of the whole pool, a batch at a time, each batch acknowledged before the next. All of it is
done by threads of this file; the copy lane only hears that a peer can be copied from, or that it is gone.

An address stands for one life of a process: one that has died and is back has another, and what was mapped of its
former life is let go. That matters beyond tidiness, since a mapping keeps the dead one's memory from its successor.
"""

import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial

from msgspec import Struct, msgpack

from dormouse import wire
from dormouse.core.types import Bytes
from dormouse.device.base import Device
from dormouse.errors import DeviceError, DormouseError

BATCH = 128
"""Descriptors on their way at a time; the system allows 253 a message, and few hundred unreceived ones a user."""
LIMIT_S = 60
"""How long one side waits for the other."""


class _Offer(Struct, frozen=True):
    """What the descriptors that follow stand for."""

    part_bytes: Bytes
    parts: int


class Peers:
    """Listens from the start. ``on_copy_lane`` has work done by the device's copy lane, in order."""

    def __init__(
        self,
        device: Device,
        send: Callable[[wire.FromExecutor], None],
        on_copy_lane: Callable[[Callable[[], None]], None],
    ) -> None:
        self._device = device
        self._send = send
        self._on_copy_lane = on_copy_lane
        self._adopted: set[str] = set()
        """Addresses; known to the copy lane alone."""
        self._gone: set[str] = set()
        self._adopting = threading.Lock()
        self.address = f"dormouse/{os.getpid()}/{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_name_of(self.address))
        self._listener.listen()
        _in_background(self._accept, "peers-listening")

    def introduce(self, asked: wire.Introduce) -> None:
        """Map a peer's pool in the background; PeerAdopted or PeerNotAdopted follows."""
        _in_background(lambda: self._introduce(asked))

    def lost(self, address: str) -> None:
        """The process that listened there is gone: let go of its memory as soon as no copy reads it."""
        self._gone.add(address)
        self._on_copy_lane(lambda: self._forsake(address))

    # -------------------------------------------------------------- the side that reads

    def _introduce(self, asked: wire.Introduce) -> None:
        try:
            with self._adopting:
                self._adopt(asked.address)
                detours = asked.detours and self._opens_detour(asked.device)
        except (DormouseError, OSError) as fault:
            message = fault.message if isinstance(fault, DormouseError) else str(fault)
            self._send(wire.PeerNotAdopted(asked.peer, asked.address, message))
            return
        self._on_copy_lane(lambda: self._report(asked, detours))

    def _adopt(self, address: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(LIMIT_S)
            connection.connect(_name_of(address))
            _check_user(connection)
            body = wire.receive(connection)
            if body is None:
                raise DeviceError("adopt", "NO_OFFER", f"{address} offers nothing")
            offer = msgpack.decode(body, type=_Offer)
            descriptors = _received(connection, offer.parts)
            try:
                self._device.adopt(address, offer.part_bytes, offer.parts, descriptors)
            finally:
                descriptors.close()

    def _opens_detour(self, device: str) -> bool:
        try:
            self._device.open_detour(device)
        except DeviceError as fault:
            print(f"no detours over {device}: {fault.message}", file=sys.stderr, flush=True)
            return False
        return True

    def _report(self, asked: wire.Introduce, detours: bool) -> None:
        self._adopted.add(asked.address)
        if asked.address in self._gone:
            self._forsake(asked.address)
        else:
            self._send(wire.PeerAdopted(asked.peer, asked.address, detours))

    def _forsake(self, address: str) -> None:
        if address in self._adopted:
            self._adopted.remove(address)
            self._device.forsake(address)

    # -------------------------------------------------------------- the side that is read

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            _in_background(partial(self._offer, connection))

    def _offer(self, connection: socket.socket) -> None:
        """Somebody who breaks off gets nothing more; it is for them to say why."""
        with connection:
            connection.settimeout(LIMIT_S)
            try:
                _check_user(connection)
                parts = self._device.capacity_bytes // self._device.part_bytes
                body = msgpack.encode(_Offer(self._device.part_bytes, parts))
                connection.sendall(wire.LENGTH.pack(len(body)) + body)
                _send_all(connection, self._device.share())
            except (DeviceError, OSError) as fault:
                print(f"a peer was not given this pool: {fault}", file=sys.stderr, flush=True)


def _send_all(connection: socket.socket, descriptors: Iterator[int]) -> None:
    batch: list[int] = []
    try:
        for fd in descriptors:
            batch.append(fd)
            if len(batch) == BATCH:
                _send_batch(connection, batch)
        if batch:
            _send_batch(connection, batch)
    finally:
        _close_all(batch)


def _send_batch(connection: socket.socket, batch: list[int]) -> None:
    socket.send_fds(connection, [b"\0"], batch)
    _close_all(batch)
    if not connection.recv(1):
        raise ConnectionError("the peer is gone")


def _received(connection: socket.socket, parts: int) -> Generator[int, None, None]:
    """The descriptors, each to be closed by whoever takes it; those that nobody took are closed with the iterator."""
    missing = parts
    batch: list[int] = []
    try:
        while missing:
            said, batch, _, _ = socket.recv_fds(connection, 1, BATCH)
            if not said or not batch:
                raise ConnectionError("the peer is gone")
            missing -= len(batch)
            while batch:
                yield batch.pop(0)
            connection.sendall(b"\0")
    finally:
        _close_all(batch)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _check_user(connection: socket.socket) -> None:
    """The address can be connected to by any user of the machine; memory is for our own."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.geteuid():
        raise ConnectionError(f"the other side belongs to user {user}")


def _name_of(address: str) -> str:
    """In the abstract namespace: no file is left behind by a process that is killed."""
    return f"\0{address}"


def _in_background(work: Callable[[], None], name: str = "peers") -> None:
    threading.Thread(target=work, name=name, daemon=True).start()
