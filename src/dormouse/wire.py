"""What crosses the socket between the control process and an executor, and how it is framed.

A core command or event, plus what only the shells know: where the image's pages lie, where tensors lie in the
slabs. Frames are a 4-byte little-endian length and a msgpack message.
"""

import socket
import struct
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from dormouse.core.messages import (
    Cancel,
    ChunkProduced,
    CommandRefused,
    Evict,
    EvictionFinished,
    Execute,
    ExecutionFailed,
    ExecutionFinished,
    Forget,
    ImageNearlyArrived,
    Load,
    LoadFailed,
    LoadFinished,
)
from dormouse.core.types import Bytes

LENGTH = struct.Struct("<I")
FRAME_LIMIT_BYTES: Bytes = 64 * 1024 * 1024


class TensorRef(Struct, frozen=True):
    """A tensor in a slab. BYTES tensors lie there in their V2 wire form."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    offset: Bytes
    size_bytes: Bytes


class Extent(Struct, frozen=True, array_like=True):
    """A run of host pages in the arena; an image is its extents in order."""

    offset: Bytes
    size_bytes: Bytes


class StartExecutor(Struct, frozen=True, tag=True):
    """The first frame to a new executor. Descriptors are inherited numbers."""

    executor: str
    device: str
    """``cpu``, ``cuda:0``, ..."""
    device_bytes: Bytes | None
    chunk_bytes: Bytes | None
    group_bytes: Bytes
    link_bytes_per_s: int | None
    """A limit on the copy lane of the CPU device; None: as fast as memory."""
    arena_fd: int
    arena_bytes: Bytes
    request_slab_fd: int
    request_slab_bytes: Bytes
    reply_slab_fd: int
    reply_slab_bytes: Bytes
    threads: int
    """Torch threads on the CPU device."""
    allow_code: tuple[str, ...] = ()
    poison: bool = False
    """Fill chunks with garbage before an image is copied in (tests)."""
    faults: tuple[str, ...] = ()
    """Injected faults (tests)."""
    graphs: str = "auto"
    """``auto``: capture CUDA graphs where that is possible; ``off``: never."""
    maps_ahead: bool = False
    """Mapping beside copies is slow on this device: map first, then copy."""
    peers: bool = False
    """There are others: listen for them, and say where images lie."""


class PeerSource(Struct, frozen=True):
    """An image in a peer's pool."""

    address: str
    extents: tuple[Extent, ...]


class LoadImage(Struct, frozen=True, tag=True):
    """Load, with the image's directory and its place in the arena, or (with ``source``) in a peer's pool."""

    command: Load
    directory: str
    extents: tuple[Extent, ...]
    source: PeerSource | None = None
    detours: tuple[str, ...] = ()
    """Devices over whose links a part of it comes."""


class ExecuteRequest(Struct, frozen=True, tag=True):
    """Execute, with inputs in the request slab. ``outputs`` empty: all."""

    command: Execute
    inputs: tuple[TensorRef, ...]
    outputs: tuple[str, ...]
    others: tuple[tuple[TensorRef, ...], ...] = ()
    """The inputs of the command's other requests, in order."""


class ArenaGrown(Struct, frozen=True, tag=True):
    """Host pages now exist up to ``size_bytes``: register them."""

    offset: Bytes
    size_bytes: Bytes


class ReplyRead(Struct, frozen=True, tag=True):
    """The control side has copied these tensors out of the reply slab."""

    offsets: tuple[Bytes, ...]


class Introduce(Struct, frozen=True, tag=True):
    """Another executor's pool can be mapped: its address gives the descriptors."""

    peer: str
    device: str
    address: str
    detours: bool
    """Open a way over its link too."""


class PeerLost(Struct, frozen=True, tag=True):
    """Nobody is behind an address any more: what is being copied from there is not to be trusted."""

    address: str


class Shutdown(Struct, frozen=True, tag=True):
    pass


ToExecutor = (
    StartExecutor
    | LoadImage
    | ExecuteRequest
    | Evict
    | Cancel
    | Forget
    | ArenaGrown
    | ReplyRead
    | Introduce
    | PeerLost
    | Shutdown
)


class ExecutorReady(Struct, frozen=True, tag=True):
    device: str
    capacity_bytes: Bytes
    chunk_bytes: Bytes
    pid: int
    description: str
    """For people: card, driver, library versions."""
    address: str = ""
    """Where peers ask for its pool; nowhere if it is alone."""


class ExecutorUnusable(Struct, frozen=True, tag=True):
    """The device cannot be had; one clear line."""

    message: str


class ChunkReady(Struct, frozen=True, tag=True):
    """A ChunkProduced or ExecutionFinished with its tensors in the reply slab."""

    event: ChunkProduced | ExecutionFinished
    outputs: tuple[TensorRef, ...]
    rows: tuple[int, ...] = ()
    """Of requests that ran together: how many rows of each output are whose, in order; empty: all is of one."""


class ImageHeld(Struct, frozen=True, tag=True):
    """Where a function that is being loaded lies in the pool; sent before the end of the load."""

    function: str
    extents: tuple[Extent, ...]


class PeerAdopted(Struct, frozen=True, tag=True):
    """The peer's memory can be copied from, and with ``detours`` its link used."""

    peer: str
    address: str
    detours: bool


class PeerNotAdopted(Struct, frozen=True, tag=True):
    """There is no way to the peer's memory; why, in one line."""

    peer: str
    address: str
    message: str


class GraphsHeld(Struct, frozen=True, tag=True):
    """How a function is run on an executor: so many shapes of input by graph, and why no others will be."""

    function: str
    shapes: int
    eager_because: str


FromExecutor = (
    ExecutorReady
    | ExecutorUnusable
    | GraphsHeld
    | ImageHeld
    | PeerAdopted
    | PeerNotAdopted
    | ChunkReady
    | ImageNearlyArrived
    | LoadFinished
    | LoadFailed
    | EvictionFinished
    | ExecutionFailed
    | CommandRefused
)

_encoder = msgspec.msgpack.Encoder()
_to_executor: msgspec.msgpack.Decoder[ToExecutor] = msgspec.msgpack.Decoder(ToExecutor)
_from_executor: msgspec.msgpack.Decoder[FromExecutor] = msgspec.msgpack.Decoder(FromExecutor)


def frame(message: ToExecutor | FromExecutor) -> bytes:
    """One message, ready for the socket."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_to_executor(body: bytes | bytearray) -> ToExecutor:
    return _to_executor.decode(body)


def decode_from_executor(body: bytes | bytearray) -> FromExecutor:
    return _from_executor.decode(body)


def whole_frames(unread: bytearray) -> Iterator[bytearray]:
    """The bodies of the frames that ``unread`` begins with; they are taken out of it. Raises msgspec.DecodeError for
    a frame that is too long to be one."""
    start, body = 0, LENGTH.size
    try:
        while len(unread) >= body:
            (size_bytes,) = LENGTH.unpack_from(unread, start)
            if size_bytes > FRAME_LIMIT_BYTES:
                raise msgspec.DecodeError(f"a frame of {size_bytes} bytes")
            if len(unread) < body + size_bytes:
                return
            start = body + size_bytes
            yield unread[body:start]
            body = start + LENGTH.size
    finally:
        del unread[:start]


def receive(connection: socket.socket) -> bytearray | None:
    """One frame's body from a blocking socket; None when the other side is gone."""
    head = _exactly(connection, LENGTH.size)
    return None if head is None else _exactly(connection, LENGTH.unpack(head)[0])


def _exactly(connection: socket.socket, count: int) -> bytearray | None:
    body = bytearray(count)
    view = memoryview(body)
    while view:
        got = connection.recv_into(view)
        if got == 0:
            return None
        view = view[got:]
    return body
