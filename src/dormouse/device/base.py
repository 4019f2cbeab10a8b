"""The contract of a device: move bytes, and know no policy.

A device is a pool of equal physical chunks, made once. A region is a range of addresses reserved for one
function; its address never changes, while chunks come (``map``) and go (``unmap``). One inbound copy lane copies
from host memory, or from the pool of a peer that was adopted, in the order asked; a fence marks a point in it. Where a
neighbour has a link of its own, copies may take the detour over it. All sizes are bytes, all addresses integers.

Threads: ``map``, ``unmap``, ``vacate``, ``sweep``, ``copy_in``, ``copy_out`` and ``fence`` are called by the one thread
that owns the copy lane, and so are ``copy_peer`` and ``forsake``; ``share``, ``adopt`` and ``open_detour`` by any one
other; ``Fence.wait`` and ``Fence.synchronize`` by any thread. Failures raise DeviceError and leave nothing half done.
Nothing here imports torch: a stream is the driver's integer handle (0 on devices without streams).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from dormouse.core.types import Bytes


@dataclass(eq=False, slots=True)
class Region:
    """A reserved address range. ``chunks`` are the pool's chunks mapped from its start, in order."""

    address: int
    reserved_bytes: Bytes
    chunks: list[int] = field(default_factory=list)


@runtime_checkable
class Fence(Protocol):
    """A point in the copy lane."""

    def wait(self, stream: int) -> None:
        """Make later work of ``stream`` wait for the point; on a device without streams, block until it is reached."""

    def synchronize(self) -> None:
        """Block the calling thread until the point is reached. Raises DeviceError if a copy before it failed,
        unless that had been reported when the fence was made; so the load after a broken one starts clean."""


class Device(Protocol):
    """One device's memory and its copy lane."""

    @property
    def id(self) -> str:
        """``cpu:0``, ``cuda:1``, ``simulated:0``."""

    @property
    def chunk_bytes(self) -> Bytes: ...

    @property
    def capacity_bytes(self) -> Bytes:
        """What the pool holds when nothing is mapped; a multiple of ``chunk_bytes``."""

    @property
    def free_bytes(self) -> Bytes:
        """What the pool can still map."""

    @property
    def maps_ahead(self) -> bool:
        """Whether a load should be mapped whole before its first copy, because mapping beside copies is slow here."""

    def unaccounted_bytes(self) -> Bytes:
        """The driver's view less the pool's: what is really mapped, minus what the pool believes is. 0 when sound."""

    def reserve(self, size_bytes: Bytes) -> Region:
        """Reserve addresses for ``size_bytes`` rounded up to chunks; no memory yet."""

    def release(self, region: Region) -> None:
        """Give the addresses back. The region must be unmapped."""

    def map(self, region: Region, up_to_bytes: Bytes) -> None:
        """Map free chunks until the first ``up_to_bytes`` of the region are backed. All or nothing: OutOfChunks."""

    def unmap(self, region: Region) -> None:
        """Give every chunk of the region back to the pool. Its streams must be drained. Unmapping nothing is fine."""

    def vacate(self, region: Region) -> None:
        """As ``unmap``, but the driver's part may be left to ``sweep``: the chunks can be mapped elsewhere at once."""

    def sweep(self) -> None:
        """Take away what vacated regions still have mapped; until then it counts as unaccounted."""

    def register_host(self, address: int, size_bytes: Bytes) -> None:
        """Make host memory fit for fast copies (pin it). Registering a range twice is fine."""

    def copy_in(
        self, region: Region, offset: Bytes, host_address: int, size_bytes: Bytes, detour: str | None = None
    ) -> None:
        """Queue a copy from host memory into mapped memory of the region, over the device's own link or a detour."""

    def copy_out(self, region: Region, offset: Bytes, host_address: int, size_bytes: Bytes) -> None:
        """Queue a copy from the region into host memory, on the same lane."""

    def copy_peer(self, region: Region, offset: Bytes, peer: str, peer_offset: Bytes, size_bytes: Bytes) -> None:
        """Queue a copy from a peer's pool into mapped memory of the region. ``peer_offset`` counts from the peer's
        first chunk. Raises DeviceError if the peer is not adopted."""

    # -------------------------------------------------------------- other devices

    @property
    def part_bytes(self) -> Bytes:
        """How much of the pool one descriptor of ``share`` stands for."""

    def share(self) -> Iterator[int]:
        """Descriptors through which another device can map the pool, part by part. Whoever takes one closes it."""

    def adopt(self, peer: str, part_bytes: Bytes, parts: int, descriptors: Iterable[int]) -> None:
        """Map a peer's whole pool, once, under a name. Descriptors are closed as they are taken."""

    def forsake(self, peer: str) -> None:
        """Let go of a peer's pool, after the copies from it. Forsaking a stranger is fine."""

    def open_detour(self, neighbour: str) -> None:
        """Prepare copies over the link of the device named ``neighbour`` (an id). Twice is fine. Raises DeviceError
        where there is no such way."""

    def fill(self, region: Region, value: int) -> None:
        """Set every mapped byte of the region (to poison memory in tests), and wait for it."""

    def fence(self, *events: int) -> Fence:
        """Mark the lane's present end. ``events``: the driver's events to mark it with where there are streams, so that
        others who know one of them can wait for it too; none: one of the device's own."""

    def close(self) -> None:
        """Stop the lane and give everything back to the driver."""
