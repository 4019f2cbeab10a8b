"""Shared memory through which tensors pass between the control process and an executor.

One side owns a slab: it allocates ranges, writes them, and frees them when the other side says that it has read
them. The other side only reads. Which side made the memory is another matter: the control process makes both slabs,
and owns the one for requests. Ranges start on 64-byte boundaries; the first gap that fits is taken.
"""

import mmap
import os
from bisect import bisect_left, insort
from typing import Self

from dormouse.core.types import Bytes, round_up

ALIGNMENT_BYTES: Bytes = 64


class Slab:
    """``fd`` may be inherited by the other side. Not for several threads at once."""

    def __init__(self, fd: int, size_bytes: Bytes, *, owner: bool) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if owner else 0)
        self._memory = mmap.mmap(fd, size_bytes, prot=protection)
        usable = size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._gaps: list[tuple[Bytes, Bytes]] = [(0, usable)] if owner else []
        """``(offset, bytes)`` in order of offset; no two touch. The reader's side has none to give."""
        self._allocated: dict[Bytes, Bytes] = {}

    @classmethod
    def create(cls, size_bytes: Bytes, *, owner: bool = True) -> Self:
        """New memory; its pages are taken from the system when they are first written."""
        assert size_bytes >= ALIGNMENT_BYTES, size_bytes
        fd = os.memfd_create("dormouse-slab")
        os.ftruncate(fd, size_bytes)
        return cls(fd, size_bytes, owner=owner)

    @classmethod
    def attach(cls, fd: int, size_bytes: Bytes, *, owner: bool = False) -> Self:
        """Memory that the other side made, and whose descriptor was inherited."""
        return cls(fd, size_bytes, owner=owner)

    @property
    def used_bytes(self) -> Bytes:
        """Allocated, with what alignment costs."""
        return sum(self._allocated.values())

    def allocate(self, size_bytes: Bytes) -> Bytes | None:
        """The offset of a new range, or None while no gap is long enough."""
        wanted = round_up(max(size_bytes, 1), ALIGNMENT_BYTES)
        for place, (offset, gap) in enumerate(self._gaps):
            if gap >= wanted:
                self._gaps[place : place + 1] = [(offset + wanted, gap - wanted)] if gap > wanted else []
                self._allocated[offset] = wanted
                return offset
        return None

    def free(self, offset: Bytes) -> None:
        """Give back a range by the offset that ``allocate`` gave."""
        size_bytes = self._allocated.pop(offset)
        place = bisect_left(self._gaps, (offset, 0))
        if place < len(self._gaps) and self._gaps[place][0] == offset + size_bytes:
            size_bytes += self._gaps.pop(place)[1]
        if place and sum(self._gaps[place - 1]) == offset:
            offset, before = self._gaps.pop(place - 1)
            size_bytes += before
        insort(self._gaps, (offset, size_bytes))

    def reset(self) -> None:
        """Free everything: the other side is gone and will read nothing more."""
        for offset in list(self._allocated):
            self.free(offset)

    def view(self, offset: Bytes, size_bytes: Bytes) -> memoryview:
        """The memory of a range; read-only on the reader's side. Release it before ``close``."""
        assert 0 <= offset <= offset + size_bytes <= self.size_bytes, (offset, size_bytes, self.size_bytes)
        with memoryview(self._memory) as whole:
            return whole[offset : offset + size_bytes]

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)
