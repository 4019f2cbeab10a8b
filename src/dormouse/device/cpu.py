"""The device contract over host memory, with real remapping: the embedded default on a machine without a GPU.

Theory of operation. The pool is one memfd, its pages allocated at start. A region is a reserved range that nothing
may touch; ``map`` places slices of the memfd at fixed addresses in it, ``unmap`` takes them away, so a function
keeps its addresses while its memory comes and goes:

    memfd     | 0 | 1 | 2 | 3 | 4 | 5 |            chunks
    region A  | 0 | 1 | 4 |  untouchable |         two calls: chunks 0-1 are neighbours, 4 stands alone
    region B  | 2 | 3 | untouchable |

A peer's pool is its memfd, mapped whole. There is one memory and so one link: no detours.

Copies are made by one lane thread. Page table entries are made at ``map``: that costs as much as taking the faults
later would, but it is paid beside the copies of the first groups, not inside a forward pass, and a copy into pages
without entries would be several times slower.
"""

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial

from dormouse.core.types import Bytes, round_up
from dormouse.device import pages
from dormouse.device.base import Region
from dormouse.device.faults import Faults
from dormouse.device.lane import CopyLane, LaneFence
from dormouse.device.pool import ChunkPool, runs
from dormouse.errors import DeviceError

CHUNK_BYTES: Bytes = 2 * 1024 * 1024
CAPACITY_BYTES: Bytes = 1024 * 1024 * 1024


class CpuDevice:
    """A device in host memory. ``capacity_bytes`` is rounded down to chunks."""

    def __init__(
        self,
        capacity_bytes: Bytes = CAPACITY_BYTES,
        chunk_bytes: Bytes = CHUNK_BYTES,
        *,
        index: int = 0,
        link_bytes_per_s: int | None = None,
        faults: Iterable[str] = (),
    ) -> None:
        assert chunk_bytes % os.sysconf("SC_PAGE_SIZE") == 0, chunk_bytes
        if capacity_bytes < chunk_bytes:
            raise DeviceError("create pool", "TOO_SMALL", f"{capacity_bytes} bytes do not hold one chunk")
        self._id = f"cpu:{index}"
        self._pool = ChunkPool(capacity_bytes // chunk_bytes, chunk_bytes)
        self._faults = Faults(faults)
        self._regions: set[Region] = set()
        self._peers: dict[str, tuple[int, Bytes]] = {}
        """By name: where a peer's pool is mapped, and its size."""
        self._fd = _allocated(f"dormouse-{self._id}", self._pool.capacity_bytes)
        self._lane = CopyLane(f"copy-{self._id}", link_bytes_per_s)
        self._open = True

    @property
    def id(self) -> str:
        return self._id

    @property
    def chunk_bytes(self) -> Bytes:
        return self._pool.chunk_bytes

    @property
    def capacity_bytes(self) -> Bytes:
        return self._pool.capacity_bytes

    @property
    def free_bytes(self) -> Bytes:
        return self._pool.free_bytes

    @property
    def maps_ahead(self) -> bool:
        return False

    def unaccounted_bytes(self) -> Bytes:
        """The kernel's list of mappings of the pool, less what the pool gave out."""
        return pages.mapped_bytes(self._fd) - self._pool.used_bytes

    def reserve(self, size_bytes: Bytes) -> Region:
        self._faults.strike("reserve")
        rounded = round_up(max(size_bytes, 1), self.chunk_bytes)
        region = Region(pages.reserve(rounded), rounded)
        self._regions.add(region)
        return region

    def release(self, region: Region) -> None:
        assert not region.chunks, "release of a region that is still mapped"
        self._regions.remove(region)
        pages.release(region.address, region.reserved_bytes)

    def map(self, region: Region, up_to_bytes: Bytes) -> None:
        assert up_to_bytes <= region.reserved_bytes, (up_to_bytes, region.reserved_bytes)
        missing = self._pool.chunks_for(up_to_bytes) - len(region.chunks)
        if missing <= 0:
            return
        chunks = self._pool.take(missing)
        start = region.address + len(region.chunks) * self.chunk_bytes
        try:
            self._faults.strike("map")
            self._place(start, chunks)
        except DeviceError:
            pages.withdraw(start, missing * self.chunk_bytes)
            self._pool.give_back(chunks)
            raise
        region.chunks.extend(chunks)

    def unmap(self, region: Region) -> None:
        if not region.chunks:
            return
        self._faults.strike("unmap")
        pages.withdraw(region.address, len(region.chunks) * self.chunk_bytes)
        self._pool.give_back(region.chunks)
        region.chunks.clear()

    def vacate(self, region: Region) -> None:
        """Unmapping is cheap here: nothing is left for later."""
        self.unmap(region)

    def sweep(self) -> None:
        """Nothing is ever left to take away."""

    def register_host(self, address: int, size_bytes: Bytes) -> None:
        """Nothing to do but to count: every host page can be copied from as it is."""
        assert address > 0 and size_bytes > 0, (address, size_bytes)
        self._faults.strike("register")

    def copy_in(
        self, region: Region, offset: Bytes, host_address: int, size_bytes: Bytes, detour: str | None = None
    ) -> None:
        assert detour is None, f"a detour over {detour}, which was never opened"
        target = self._mapped(region, offset, size_bytes)
        self._copy(partial(ctypes.memmove, target, host_address, size_bytes), size_bytes)

    def copy_out(self, region: Region, offset: Bytes, host_address: int, size_bytes: Bytes) -> None:
        source = self._mapped(region, offset, size_bytes)
        self._copy(partial(ctypes.memmove, host_address, source, size_bytes), size_bytes)

    def copy_peer(self, region: Region, offset: Bytes, peer: str, peer_offset: Bytes, size_bytes: Bytes) -> None:
        if peer not in self._peers:
            raise DeviceError("copy from peer", "NOT_ADOPTED", peer)
        address, pool_bytes = self._peers[peer]
        assert 0 <= peer_offset <= peer_offset + size_bytes <= pool_bytes, (peer_offset, size_bytes, pool_bytes)
        target = self._mapped(region, offset, size_bytes)
        self._copy(partial(ctypes.memmove, target, address + peer_offset, size_bytes), size_bytes, "peer-copy")

    @property
    def part_bytes(self) -> Bytes:
        """One descriptor is enough for all."""
        return self._pool.capacity_bytes

    def share(self) -> Iterator[int]:
        yield os.dup(self._fd)

    def adopt(self, peer: str, part_bytes: Bytes, parts: int, descriptors: Iterable[int]) -> None:
        assert peer not in self._peers, f"{peer} is adopted already"
        size_bytes = part_bytes * parts
        with ExitStack() as undo:
            address = pages.reserve(size_bytes)
            undo.callback(pages.release, address, size_bytes)
            self._faults.strike("adopt")
            for part, fd in enumerate(descriptors):
                try:
                    pages.place(address + part * part_bytes, part_bytes, fd, 0)
                finally:
                    os.close(fd)
            undo.pop_all()
        self._peers[peer] = (address, size_bytes)

    def forsake(self, peer: str) -> None:
        if peer in self._peers:
            self.fence().drain()
            pages.release(*self._peers.pop(peer))

    def open_detour(self, neighbour: str) -> None:
        raise DeviceError("open detour", "ONE_LINK", f"{self.id} and {neighbour} share the host's memory")

    def fill(self, region: Region, value: int) -> None:
        size_bytes = len(region.chunks) * self.chunk_bytes
        self.fence().synchronize()
        ctypes.memset(region.address, value, size_bytes)

    def fence(self, *events: int) -> LaneFence:
        assert not events, "there are no streams, so nobody has events"
        return self._lane.fence()

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._lane.stop()
        for region in self._regions:
            pages.release(region.address, region.reserved_bytes)
            region.chunks.clear()
        self._regions.clear()
        for address, size_bytes in self._peers.values():
            pages.release(address, size_bytes)
        self._peers.clear()
        os.close(self._fd)

    def _place(self, address: int, chunks: list[int]) -> None:
        for first, count in runs(chunks):
            size_bytes = count * self.chunk_bytes
            pages.place(address, size_bytes, self._fd, first * self.chunk_bytes)
            address += size_bytes

    def _mapped(self, region: Region, offset: Bytes, size_bytes: Bytes) -> int:
        mapped_bytes = len(region.chunks) * self.chunk_bytes
        assert 0 <= offset <= offset + size_bytes <= mapped_bytes, (offset, size_bytes, mapped_bytes)
        return region.address + offset

    def _copy(self, move: Callable[[], object], size_bytes: Bytes, call: str = "copy") -> None:
        def work() -> None:
            self._faults.strike(call)
            move()

        self._lane.copy(work, size_bytes)


def _allocated(name: str, size_bytes: Bytes) -> int:
    """A memfd whose pages exist already, so that none is allocated or cleared on the swap path."""
    fd = os.memfd_create(name)
    with ExitStack() as undo:
        undo.callback(os.close, fd)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as fault:
            detail = f"{size_bytes} bytes of host memory: {fault.strerror}"
            raise DeviceError("create pool", "NO_MEMORY", detail) from None
        # The kernel clears an allocated page when it is first mapped: have that done now.
        address = pages.reserve(size_bytes)
        pages.place(address, size_bytes, fd, 0)
        pages.release(address, size_bytes)
        undo.pop_all()
    return fd
