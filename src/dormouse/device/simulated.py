"""The device contract over virtual time: what things would cost, with no memory behind it and no data kept.

Mapping advances the clock it is given; copies occupy the link one after another; a fence that somebody waits for
advances the clock to the moment it is reached. Deterministic, and for one thread.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dormouse.core.types import Bytes, Ns, round_up
from dormouse.device.base import Region
from dormouse.device.faults import FailedCopies, Faults
from dormouse.device.pool import ChunkPool
from dormouse.errors import DeviceError

_BILLION = 1_000_000_000
_FIRST_ADDRESS = 1 << 40


@dataclass(slots=True)
class VirtualClock:
    """Time that passes only when somebody says so."""

    now_ns: Ns = 0

    def advance(self, duration_ns: Ns) -> None:
        self.now_ns += duration_ns

    def reach(self, at_ns: Ns) -> None:
        """Go to a point in time, unless it has passed."""
        self.now_ns = max(self.now_ns, at_ns)


class SimulatedFence:
    def __init__(self, clock: VirtualClock, due_ns: Ns, failed: FailedCopies) -> None:
        self._clock = clock
        self._failed = failed
        self._covered = failed.covered()
        self.due_ns = due_ns

    def wait(self, stream: int) -> None:
        del stream  # there is none to hold back
        self.synchronize()

    def synchronize(self) -> None:
        self._clock.reach(self.due_ns)
        self._failed.report(self._covered)


class SimulatedDevice:
    """``map_ns`` and ``unmap_ns`` are the cost of one chunk; ``peer_bytes_per_s`` 0: as fast as the host's link."""

    def __init__(
        self,
        clock: VirtualClock,
        capacity_bytes: Bytes,
        chunk_bytes: Bytes,
        *,
        link_bytes_per_s: int,
        peer_bytes_per_s: int = 0,
        map_ns: Ns = 0,
        unmap_ns: Ns = 0,
        index: int = 0,
        faults: Iterable[str] = (),
    ) -> None:
        self._id = f"simulated:{index}"
        self._clock = clock
        self._pool = ChunkPool(capacity_bytes // chunk_bytes, chunk_bytes)
        self._link_bytes_per_s = link_bytes_per_s
        self._peer_bytes_per_s = peer_bytes_per_s or link_bytes_per_s
        self._peers: dict[str, Bytes] = {}
        self._map_ns = map_ns
        self._unmap_ns = unmap_ns
        self._faults = Faults(faults)
        self._failed = FailedCopies()
        self._regions: set[Region] = set()
        self._next_address = _FIRST_ADDRESS
        self._link_free_ns: Ns = 0

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
        """There is no driver to ask; the regions' chunks stand for what is mapped."""
        return sum(len(region.chunks) for region in self._regions) * self.chunk_bytes - self._pool.used_bytes

    def reserve(self, size_bytes: Bytes) -> Region:
        self._faults.strike("reserve")
        region = Region(self._next_address, round_up(max(size_bytes, 1), self.chunk_bytes))
        self._next_address += region.reserved_bytes
        self._regions.add(region)
        return region

    def release(self, region: Region) -> None:
        assert not region.chunks, "release of a region that is still mapped"
        self._regions.remove(region)

    def map(self, region: Region, up_to_bytes: Bytes) -> None:
        assert up_to_bytes <= region.reserved_bytes, (up_to_bytes, region.reserved_bytes)
        missing = self._pool.chunks_for(up_to_bytes) - len(region.chunks)
        if missing <= 0:
            return
        chunks = self._pool.take(missing)
        try:
            self._faults.strike("map")
        except DeviceError:
            self._pool.give_back(chunks)
            raise
        region.chunks.extend(chunks)
        self._clock.advance(missing * self._map_ns)

    def unmap(self, region: Region) -> None:
        if not region.chunks:
            return
        self._faults.strike("unmap")
        self._clock.advance(len(region.chunks) * self._unmap_ns)
        self._pool.give_back(region.chunks)
        region.chunks.clear()

    def vacate(self, region: Region) -> None:
        """Unmapping is cheap here: nothing is left for later."""
        self.unmap(region)

    def sweep(self) -> None:
        """Nothing is ever left to take away."""

    def register_host(self, address: int, size_bytes: Bytes) -> None:
        assert address > 0 and size_bytes > 0, (address, size_bytes)
        self._faults.strike("register")

    def copy_in(
        self, region: Region, offset: Bytes, host_address: int, size_bytes: Bytes, detour: str | None = None
    ) -> None:
        assert detour is None, f"a detour over {detour}, which was never opened"
        del host_address
        self._copy(region, offset, size_bytes)

    def copy_out(self, region: Region, offset: Bytes, host_address: int, size_bytes: Bytes) -> None:
        del host_address
        self._copy(region, offset, size_bytes)

    def copy_peer(self, region: Region, offset: Bytes, peer: str, peer_offset: Bytes, size_bytes: Bytes) -> None:
        if peer not in self._peers:
            raise DeviceError("copy from peer", "NOT_ADOPTED", peer)
        assert 0 <= peer_offset <= peer_offset + size_bytes <= self._peers[peer], (peer_offset, size_bytes)
        self._copy(region, offset, size_bytes, "peer-copy", self._peer_bytes_per_s)

    @property
    def part_bytes(self) -> Bytes:
        """Nothing is behind the pool, so one descriptor stands for all of nothing."""
        return self._pool.capacity_bytes

    def share(self) -> Iterator[int]:
        yield os.open(os.devnull, os.O_RDONLY)

    def adopt(self, peer: str, part_bytes: Bytes, parts: int, descriptors: Iterable[int]) -> None:
        assert peer not in self._peers, f"{peer} is adopted already"
        self._faults.strike("adopt")
        for fd in descriptors:
            os.close(fd)
        self._peers[peer] = part_bytes * parts

    def forsake(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def open_detour(self, neighbour: str) -> None:
        raise DeviceError("open detour", "ONE_LINK", f"{self.id} knows no link of {neighbour}")

    def fill(self, region: Region, value: int) -> None:
        del region
        assert 0 <= value < 256, value
        self.fence().synchronize()

    def fence(self, *events: int) -> SimulatedFence:
        assert not events, "there are no streams, so nobody has events"
        return SimulatedFence(self._clock, self._link_free_ns, self._failed)

    def close(self) -> None:
        for region in self._regions:
            region.chunks.clear()
        self._regions.clear()

    def _copy(self, region: Region, offset: Bytes, size_bytes: Bytes, call: str = "copy", bytes_per_s: int = 0) -> None:
        mapped_bytes = len(region.chunks) * self.chunk_bytes
        assert 0 <= offset <= offset + size_bytes <= mapped_bytes, (offset, size_bytes, mapped_bytes)
        number = self._failed.number()
        try:
            self._faults.strike(call)
        except DeviceError as failure:
            self._failed.record(number, failure)
        start_ns = max(self._link_free_ns, self._clock.now_ns)
        self._link_free_ns = start_ns + size_bytes * _BILLION // (bytes_per_s or self._link_bytes_per_s)
