"""The device contract on an NVIDIA GPU, through the driver's virtual memory management.

Theory of operation. Physical chunks are created once, at start, and released at the end; nothing on the swap path
allocates. A region is a reserved address range. ``map`` puts free chunks there and opens the new range with one
access call; ``unmap`` takes the range away with one call. Neither is ordered with streams: the driver changes the
page tables at once, so whoever unmaps has drained the streams that used the region.

    handles   | 0 | 1 | 2 | 3 | 4 | 5 |           cuMemCreate, once
    region A  | 3 | 0 | reserved only |           cuMemMap each, cuMemSetAccess once for what is new
    region B  | 1 | reserved only |

A chunk may be mapped in two places. So a function that is evicted to make room for another vacates its region, which
costs nothing; its chunks are mapped in the new region at once, and the old mapping is swept away while the copies
run. Nobody touches a vacated region.

Copies go to one stream of our own that does not wait for the default stream. A fence is an event recorded there;
events are reused when the last reference to their fence is gone.

Copies that take a detour end on another stream. As long as any of these may be under way, fences are recorded on a
third, which waits for each copy in the order asked and copies nothing; so neither link waits for the other, and who
waits for a fence waits for all that was queued before it:

    own link   | 0 |   | 2 |   | 4 |
    detour       | 1 |   | 3 |
    order           0 1     2 3   4               fences

What is measured. Because chunks outlive every mapping, the driver's free memory does not move when a function is
evicted, and "really free" means two things, asked of the driver separately:

- ``unaccounted_bytes``: for every slot of a region that was mapped or unmapped since the last call, the driver is
  asked which physical memory lies there. Bytes that it still maps, less those that the pool believes to be mapped.
- ``foreign_bytes``: how much of the driver's free memory has gone since the pool was made, less what the caller's
  own allocator (torch) reserves. That is contexts, libraries, graphs and other processes; it must not grow with
  the number of swaps.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import ClassVar

from dormouse.core.types import Bytes, round_up
from dormouse.device.base import Region
from dormouse.device.detour import Detour
from dormouse.device.driver import Driver
from dormouse.device.faults import FailedCopies, Faults
from dormouse.device.pool import ChunkPool
from dormouse.device.window import PeerWindow
from dormouse.errors import DeviceError

CHUNK_BYTES: Bytes = 32 * 1024 * 1024
SHARE_OF_FREE_PERCENT = 80
"""How much of the free memory becomes the pool if nobody says; the rest is for activations and contexts."""


class _Events:
    """Events that no fence uses now. Any thread may give one back, also the garbage collector's."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._spare: deque[int] = deque()
        self._all: list[int] = []

    def take(self) -> int:
        if self._spare:
            return self._spare.pop()
        self._all.append(self._driver.create_event())
        return self._all[-1]

    def give_back(self, event: int) -> None:
        self._spare.append(event)

    def destroy(self) -> None:
        for event in self._all:
            self._driver.destroy_event(event)


class StreamFence:
    """An event recorded on the copy stream, somebody else's or (``owned``) one of the device's."""

    def __init__(self, device: "VmmDevice", event: int, covered: range, owned: bool) -> None:
        self._device = device
        self._event = event
        self._covered = covered
        self._owned = owned

    def wait(self, stream: int) -> None:
        self._device.hold_back(stream, self._event, self._covered)

    def synchronize(self) -> None:
        self._device.block_until(self._event, self._covered)

    def __del__(self) -> None:
        # A stream that was told to wait keeps what the event marked then, so it may be recorded anew.
        if self._owned:
            self._device.reuse(self._event)


class VmmDevice:
    """One GPU. ``capacity_bytes`` is rounded down to chunks; None: 80 % of what is free now. ``maps_ahead``: what was
    found out about this machine, see the contract."""

    _made: ClassVar[int] = 0
    """Devices of this process so far: one in an executor."""

    def __init__(
        self,
        index: int = 0,
        capacity_bytes: Bytes | None = None,
        chunk_bytes: Bytes = CHUNK_BYTES,
        *,
        maps_ahead: bool = False,
        faults: Iterable[str] = (),
        driver: Driver | None = None,
    ) -> None:
        self._maps_ahead = maps_ahead
        self._driver = driver or Driver()
        self._index = index
        self._faults = Faults(faults)
        self._failed = FailedCopies()
        self._regions: set[Region] = set()
        self._changed: set[Region] = set()
        self._mapped_bytes: dict[Region, Bytes] = {}
        self._vacated: dict[Region, Bytes] = {}
        self._registered: dict[int, Bytes] = {}
        self._windows: dict[str, PeerWindow] = {}
        self._detours: dict[str, Detour] = {}
        self._unordered: set[int] = set()
        """Streams with copies that the order stream has not been told to wait for."""
        self._last_detoured = self._arrived = 0
        """Numbers of copies: the last that took a detour, and one up to which all are known to have ended."""
        self._handles: list[int] = []
        self._open = True
        self._entered = threading.local()
        with ExitStack() as undo:
            self._context = self._driver.retain_primary_context(index)
            undo.callback(self._driver.release_primary_context, index)
            self._driver.set_context(self._context)
            undo.callback(self._release_handles)
            self._pool = self._create_pool(capacity_bytes, chunk_bytes)
            self._stream = self._driver.create_stream()
            undo.callback(self._driver.destroy_stream, self._stream)
            self._order = self._driver.create_stream()
            undo.pop_all()
        self._events = _Events(self._driver)
        self._baseline_bytes = self._driver.free_memory()
        VmmDevice._made += 1

    @property
    def id(self) -> str:
        return f"cuda:{self._index}"

    @property
    def description(self) -> str:
        """Card and driver, for people."""
        return self._driver.description(self._index)

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
        return self._maps_ahead

    def unaccounted_bytes(self) -> Bytes:
        """What the driver maps in our regions, less what the pool gave out; see the top of this file."""
        self._enter()
        for region in self._changed:
            self._mapped_bytes[region] = self._measure(region)
        self._changed.clear()
        return sum(self._mapped_bytes.values()) - self._pool.used_bytes

    def foreign_bytes(self, allocator_bytes: Bytes) -> Bytes:
        """Device memory gone since the start that is neither the pool's nor ``allocator_bytes``."""
        self._enter()
        return self._baseline_bytes - self._driver.free_memory() - allocator_bytes

    # -------------------------------------------------------------- regions

    def reserve(self, size_bytes: Bytes) -> Region:
        self._enter()
        self._faults.strike("reserve")
        rounded = round_up(max(size_bytes, 1), self.chunk_bytes)
        region = Region(self._driver.reserve_addresses(rounded), rounded)
        self._regions.add(region)
        return region

    def release(self, region: Region) -> None:
        assert not region.chunks, "release of a region that is still mapped"
        self._enter()
        self._sweep(region)
        self._driver.free_addresses(region.address, region.reserved_bytes)
        self._regions.remove(region)
        self._changed.discard(region)
        self._mapped_bytes.pop(region, None)

    def map(self, region: Region, up_to_bytes: Bytes) -> None:
        assert up_to_bytes <= region.reserved_bytes, (up_to_bytes, region.reserved_bytes)
        missing = self._pool.chunks_for(up_to_bytes) - len(region.chunks)
        if missing <= 0:
            return
        self._enter()
        self._sweep(region)
        chunks = self._pool.take(missing)
        self._changed.add(region)
        try:
            self._faults.strike("map")
            self._place(region.address + len(region.chunks) * self.chunk_bytes, chunks)
        except DeviceError:
            self._pool.give_back(chunks)
            raise
        region.chunks.extend(chunks)

    def unmap(self, region: Region) -> None:
        if not region.chunks:
            return
        self._enter()
        self._faults.strike("unmap")
        self._changed.add(region)
        self._withdraw(region)

    def vacate(self, region: Region) -> None:
        if region.chunks:
            self._changed.add(region)
            self._vacated[region] = len(region.chunks) * self.chunk_bytes
            self._pool.give_back(region.chunks)
            region.chunks.clear()

    def sweep(self) -> None:
        self._enter()
        for region in list(self._vacated):
            self._sweep(region)

    # -------------------------------------------------------------- copies

    def register_host(self, address: int, size_bytes: Bytes) -> None:
        if self._registered.get(address, 0) >= size_bytes:
            return
        self._enter()
        self._faults.strike("register")
        self._driver.register_host(address, size_bytes)
        self._registered[address] = size_bytes

    def copy_in(
        self, region: Region, offset: Bytes, host_address: int, size_bytes: Bytes, detour: str | None = None
    ) -> None:
        target = self._mapped(region, offset, size_bytes)
        self._enter()
        if not self._is_sound_copy("copy"):
            return
        if detour is None:
            self._driver.copy_in(target, host_address, size_bytes, self._stream)
            self._unordered.add(self._stream)
        else:
            way = self._detours[detour]
            self._last_detoured = self._failed.last
            self._unordered.add(way.stream)
            way.copy_in(target, host_address, size_bytes)

    def copy_out(self, region: Region, offset: Bytes, host_address: int, size_bytes: Bytes) -> None:
        source = self._mapped(region, offset, size_bytes)
        self._enter()
        if self._is_sound_copy("copy"):
            self._driver.copy_out(host_address, source, size_bytes, self._stream)
            self._unordered.add(self._stream)

    def copy_peer(self, region: Region, offset: Bytes, peer: str, peer_offset: Bytes, size_bytes: Bytes) -> None:
        window = self._windows.get(peer)
        if window is None:
            raise DeviceError("copy from peer", "NOT_ADOPTED", peer)
        assert 0 <= peer_offset <= peer_offset + size_bytes <= window.size_bytes, (peer_offset, size_bytes)
        target = self._mapped(region, offset, size_bytes)
        self._enter()
        if self._is_sound_copy("peer-copy"):
            self._driver.copy_across(target, window.address + peer_offset, size_bytes, self._stream)
            self._unordered.add(self._stream)

    def fill(self, region: Region, value: int) -> None:
        if not region.chunks:
            return
        self._enter()
        self._driver.fill(region.address, value, len(region.chunks) * self.chunk_bytes, self._stream)
        self._driver.synchronize_stream(self._stream)

    def fence(self, *events: int) -> StreamFence:
        self._enter()
        marked = events or (self._events.take(),)
        self._driver.record_events(marked, self._end_of_all())
        return StreamFence(self, marked[-1], self._failed.covered(), owned=not events)

    def _end_of_all(self) -> int:
        """The stream that ends when all copies have."""
        if self._last_detoured <= self._arrived:
            return self._stream
        for stream in self._unordered:
            event = self._events.take()
            self._driver.record_events((event,), stream)
            self._driver.wait_event(self._order, event)
            self._events.give_back(event)  # the stream waits for what it marks now
        self._unordered.clear()
        return self._order

    def hold_back(self, stream: int, event: int, covered: range) -> None:
        """What ``StreamFence.wait`` does."""
        self._failed.report(covered)
        self._enter()
        self._driver.wait_event(stream, event)

    def block_until(self, event: int, covered: range) -> None:
        """What ``StreamFence.synchronize`` does."""
        self._enter()
        self._driver.synchronize_event(event)
        # Two threads may do this at once; the lower number is not wrong, and the lane's own next wait mends it.
        self._arrived = max(self._arrived, covered.stop - 1)
        self._failed.report(covered)

    def reuse(self, event: int) -> None:
        """What happens when a ``StreamFence`` is forgotten."""
        self._events.give_back(event)

    # -------------------------------------------------------------- other devices

    @property
    def part_bytes(self) -> Bytes:
        return self.chunk_bytes

    def share(self) -> Iterator[int]:
        self._enter()
        return map(self._driver.export_memory, tuple(self._handles))

    def adopt(self, peer: str, part_bytes: Bytes, parts: int, descriptors: Iterable[int]) -> None:
        assert peer not in self._windows, f"{peer} is adopted already"
        self._enter()
        self._faults.strike("adopt")
        self._windows[peer] = PeerWindow(self._driver, self._index, part_bytes, parts, descriptors)

    def forsake(self, peer: str) -> None:
        window = self._windows.pop(peer, None)
        if window is not None:
            self._enter()
            self._driver.synchronize_stream(self._stream)
            window.close()

    def open_detour(self, neighbour: str) -> None:
        kind, _, number = neighbour.partition(":")
        if neighbour in self._detours:
            return
        if kind != "cuda" or int(number) == self._index:
            raise DeviceError("open detour", "NO_NEIGHBOUR", f"{neighbour} is no neighbour of {self.id}")
        if not self._driver.can_access(self._index, int(number)):
            raise DeviceError("open detour", "NO_PEER_ACCESS", f"{self.id} cannot reach the memory of {neighbour}")
        self._enter()
        self._detours[neighbour] = Detour(self._driver, self._index, self._context, int(number))

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._enter()
        # In reverse: every step is tried, whatever became of the one before.
        with ExitStack() as steps:
            steps.callback(self._driver.release_primary_context, self._index)
            steps.callback(self._release_handles)
            for address in self._registered:
                steps.callback(self._driver.unregister_host, address)
            for region in self._regions:
                steps.callback(self._driver.free_addresses, region.address, region.reserved_bytes)
                steps.callback(self._withdraw, region)
                steps.callback(self._sweep, region)
            for window in self._windows.values():
                steps.callback(window.close)
            for detour in self._detours.values():
                steps.callback(detour.close)
            steps.callback(self._driver.destroy_stream, self._order)
            steps.callback(self._driver.destroy_stream, self._stream)
            steps.callback(self._events.destroy)
            steps.callback(self._driver.synchronize_stream, self._stream)

    # -------------------------------------------------------------- inside

    def _enter(self) -> None:
        """The context is current by thread, and the caller may be any; each thread is told once, unless it has to do
        with several devices."""
        if VmmDevice._made > 1 or not getattr(self._entered, "yes", False):
            self._driver.set_context(self._context)
            self._entered.yes = True

    def _create_pool(self, capacity_bytes: Bytes | None, chunk_bytes: Bytes) -> ChunkPool:
        granularity = self._driver.granularity(self._index)
        if chunk_bytes % granularity:
            raise DeviceError("create pool", "BAD_CHUNK", f"{chunk_bytes} bytes are no multiple of {granularity}")
        if capacity_bytes is None:
            capacity_bytes = self._driver.free_memory() * SHARE_OF_FREE_PERCENT // 100
        count = capacity_bytes // chunk_bytes
        if count == 0:
            raise DeviceError("create pool", "TOO_SMALL", f"{capacity_bytes} bytes do not hold one chunk")
        for _ in range(count):
            self._handles.append(self._driver.create_memory(self._index, chunk_bytes))
        return ChunkPool(count, chunk_bytes)

    def _release_handles(self) -> None:
        while self._handles:
            self._driver.release_memory(self._handles.pop())

    def _place(self, start: int, chunks: list[int]) -> None:
        """Map the chunks from ``start`` on and open them; nothing stays mapped if a call fails."""
        placed_bytes = 0
        try:
            for chunk in chunks:
                self._driver.map(start + placed_bytes, self.chunk_bytes, self._handles[chunk])
                placed_bytes += self.chunk_bytes
            self._driver.allow_access(self._index, start, placed_bytes)
        except DeviceError:
            if placed_bytes:
                self._driver.unmap(start, placed_bytes)
            raise

    def _withdraw(self, region: Region) -> None:
        if region.chunks:
            self._driver.unmap(region.address, len(region.chunks) * self.chunk_bytes)
            self._pool.give_back(region.chunks)
            region.chunks.clear()

    def _sweep(self, region: Region) -> None:
        if region in self._vacated:
            self._faults.strike("unmap")
            self._changed.add(region)
            self._driver.unmap(region.address, self._vacated[region])
            del self._vacated[region]

    def _measure(self, region: Region) -> Bytes:
        """Slots of the region where the driver has memory; one with memory other than the pool's book says is none."""
        believed = [self._handles[chunk] for chunk in region.chunks]
        total = 0
        for slot in range(region.reserved_bytes // self.chunk_bytes):
            found = self._driver.mapped_handle(region.address + slot * self.chunk_bytes)
            sound = slot >= len(believed) or found == believed[slot]
            total += self.chunk_bytes if found is not None and sound else 0
        return total

    def _mapped(self, region: Region, offset: Bytes, size_bytes: Bytes) -> int:
        mapped_bytes = len(region.chunks) * self.chunk_bytes
        assert 0 <= offset <= offset + size_bytes <= mapped_bytes, (offset, size_bytes, mapped_bytes)
        return region.address + offset

    def _is_sound_copy(self, call: str) -> bool:
        """Number a copy; False if it is the one that a test wants to fail."""
        number = self._failed.number()
        try:
            self._faults.strike(call)
        except DeviceError as failure:
            self._failed.record(number, failure)
            return False
        return True
