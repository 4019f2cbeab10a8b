"""The arena: host memory that every executor can map, in which sleeping images lie.

One sparse memfd of the whole budget, mapped once. Memory is taken from the system segment by segment, when images
need it, and never given back: each segment is registered with every device once, which is dear. Knows pages and
extents; what is in them is the host store's business. Any thread may call.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from dormouse.core.types import Bytes
from dormouse.errors import HostMemoryFull
from dormouse.store.freepages import FreePages
from dormouse.store.index import PAGE_BYTES
from dormouse.wire import Extent

SEGMENT_BYTES: Bytes = 256 * 1024 * 1024
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


class Arena:
    """``budget_bytes`` is rounded down to pages. ``grown(offset, bytes)`` is called from the thread that grew it."""

    def __init__(
        self,
        budget_bytes: Bytes,
        grown: Callable[[Bytes, Bytes], None],
        *,
        segment_bytes: Bytes = SEGMENT_BYTES,
        threads: int = 4,
    ) -> None:
        assert segment_bytes % PAGE_BYTES == 0, segment_bytes
        self.size_bytes: Bytes = budget_bytes // PAGE_BYTES * PAGE_BYTES
        if self.size_bytes == 0:
            raise HostMemoryFull(f"{budget_bytes} bytes of host memory do not hold one page of {PAGE_BYTES}")
        self.fd = os.memfd_create("dormouse-arena")
        os.ftruncate(self.fd, self.size_bytes)
        self._memory = mmap.mmap(self.fd, self.size_bytes)
        self._grown = grown
        self._segment_bytes = segment_bytes
        self._threads = threads
        self._free = FreePages(segment_bytes // PAGE_BYTES)
        self._lock = threading.Lock()
        self._growth = threading.Lock()
        self._grown_bytes: Bytes = 0
        self._used_bytes: Bytes = 0
        self._peak_bytes: Bytes = 0

    @property
    def used_bytes(self) -> Bytes:
        return self._used_bytes

    @property
    def free_bytes(self) -> Bytes:
        """What can still be allocated, whether it has been taken from the system yet or not."""
        return self.size_bytes - self._used_bytes

    @property
    def peak_bytes(self) -> Bytes:
        """The most that was ever used at once."""
        return self._peak_bytes

    def segments(self) -> tuple[Extent, ...]:
        """What has been taken from the system so far, as it was reported to ``grown``."""
        step, end = self._segment_bytes, self._grown_bytes
        return tuple(Extent(offset, min(step, end - offset)) for offset in range(0, end, step))

    def allocate(self, size_bytes: Bytes) -> tuple[Extent, ...]:
        """Whole pages for ``size_bytes``; may grow the arena, which takes a while. Raises HostMemoryFull."""
        pages = -(-size_bytes // PAGE_BYTES)
        if pages == 0:
            return ()
        if (extents := self._take(pages)) is not None:
            return extents
        with self._growth:
            while (extents := self._take(pages)) is None:
                self._grow()
            return extents

    def free(self, extents: Iterable[Extent]) -> None:
        """Give back what ``allocate`` gave; never waits for a growth."""
        with self._lock:
            for extent in extents:
                self._free.add(extent.offset // PAGE_BYTES, extent.size_bytes // PAGE_BYTES)
                self._used_bytes -= extent.size_bytes

    def view(self, extent: Extent) -> memoryview:
        """The extent's memory. Release it before ``close``."""
        with memoryview(self._memory) as whole:
            return whole[extent.offset : extent.offset + extent.size_bytes]

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)

    def _take(self, pages: int) -> tuple[Extent, ...] | None:
        """None: the arena must grow first."""
        with self._lock:
            wanted = pages * PAGE_BYTES
            if wanted > self.free_bytes:
                raise HostMemoryFull(
                    f"{wanted} bytes do not fit in host memory: {self.free_bytes} of {self.size_bytes} are free"
                )
            if pages > self._free.count:
                return None
            self._used_bytes += wanted
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            return tuple(Extent(first * PAGE_BYTES, count * PAGE_BYTES) for first, count in self._free.take(pages))

    def _grow(self) -> None:
        offset = self._grown_bytes
        size_bytes = min(self._segment_bytes, self.size_bytes - offset)
        assert size_bytes > 0, "pages are missing from a fully grown arena"
        self._populate(offset, size_bytes)
        # In this order: whoever asks for the segments from now on sees this one, and no page of it is handed out
        # before it has been reported.
        self._grown_bytes = offset + size_bytes
        self._grown(offset, size_bytes)
        with self._lock:
            self._free.add(offset // PAGE_BYTES, size_bytes // PAGE_BYTES)

    def _populate(self, offset: Bytes, size_bytes: Bytes) -> None:
        """Take the memory from the system now, by several threads: one makes about 1.5 GB/s."""
        anchor = ctypes.c_char.from_buffer(self._memory)
        try:
            start = ctypes.addressof(anchor)
            share = -(-size_bytes // self._threads // PAGE_BYTES) * PAGE_BYTES
            parts = [(at, min(share, offset + size_bytes - at)) for at in range(offset, offset + size_bytes, share)]
            with ThreadPoolExecutor(self._threads, "populate") as pool:
                list(pool.map(lambda part: self._populate_part(start, *part), parts))
        finally:
            del anchor  # it holds the mapping open

    def _populate_part(self, start: int, offset: Bytes, size_bytes: Bytes) -> None:
        if _libc.madvise(start + offset, size_bytes, _MADV_POPULATE_WRITE) == 0:
            return
        fault = ctypes.get_errno()
        if fault == errno.EINVAL:  # an older kernel: allocate, and let first touches make the page table entries
            os.posix_fallocate(self.fd, offset, size_bytes)
            return
        raise HostMemoryFull(f"the system has no {size_bytes} bytes of host memory left: {os.strerror(fault)}")
