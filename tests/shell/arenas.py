"""Host memory with images in it, as the control side makes it for an executor: for the tests of this folder."""

import mmap
import os
from pathlib import Path

import torch

from dormouse.core.types import Bytes
from dormouse.store.index import PAGE_BYTES, ImageIndex
from dormouse.store.reading import read_pages
from dormouse.wire import Extent


class MappedArena:
    """A memfd of pages; every image is laid into it backwards, page by page, so that no two are neighbours."""

    def __init__(self, size_bytes: Bytes) -> None:
        self.fd = os.memfd_create("test-arena")
        self.size_bytes = size_bytes
        os.ftruncate(self.fd, size_bytes)
        self._memory = mmap.mmap(self.fd, size_bytes)
        self._free = size_bytes

    @property
    def address(self) -> int:
        return torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()

    def read(self, directory: Path, index: ImageIndex) -> tuple[Extent, ...]:
        extents = []
        for page in range(len(index.page_crc32)):
            self._free -= PAGE_BYTES
            with memoryview(self._memory)[self._free : self._free + PAGE_BYTES] as view:
                read_pages(directory, index, page, view)
            extents.append(Extent(self._free, PAGE_BYTES))
        return tuple(extents)

    def bytes_of(self, extents: tuple[Extent, ...]) -> bytes:
        return b"".join(self._memory[extent.offset : extent.offset + extent.size_bytes] for extent in extents)

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)
