"""Reads pages of an image file into memory it is given, and refuses what is not what the index says.

Blocking; runs on the host store's threads. Reading and checking release the interpreter lock.
"""

import os
import zlib
from pathlib import Path

from dormouse.errors import RefusedSource
from dormouse.store.index import DATA_FILE, PAGE_BYTES, ImageIndex


def check_size(directory: Path, index: ImageIndex) -> None:
    """Raises RefusedSource unless the image file has as many pages as its index."""
    file = directory / DATA_FILE
    try:
        found = file.stat().st_size
    except OSError as fault:
        raise RefusedSource(f"{file} cannot be read: {fault.strerror}; deploy the source again") from None
    expected = len(index.page_crc32) * PAGE_BYTES
    if found != expected:
        raise _refusal(file, found // PAGE_BYTES, f"the file has {found} bytes, its index says {expected}")


def read_pages(directory: Path, index: ImageIndex, first_page: int, memory: memoryview) -> None:
    """Fill ``memory`` with whole pages from ``first_page`` on. Raises RefusedSource naming the file and the page."""
    file = directory / DATA_FILE
    try:
        with file.open("rb", buffering=0) as source:
            for number in range(len(memory) // PAGE_BYTES):
                page = first_page + number
                with memory[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] as view:
                    _read_page(file, source.fileno(), page, view)
                    if zlib.crc32(view) != index.page_crc32[page]:
                        raise _refusal(file, page, "its checksum is not the one in the index")
    except OSError as fault:
        raise RefusedSource(f"{file} cannot be read: {fault.strerror}; deploy the source again") from None


def _read_page(file: Path, fd: int, page: int, view: memoryview) -> None:
    done = 0
    while done < PAGE_BYTES:
        with view[done:] as rest:
            got = os.preadv(fd, [rest], page * PAGE_BYTES + done)
        if got == 0:
            raise _refusal(file, page, "the file ends inside it")
        done += got


def _refusal(file: Path, page: int, why: str) -> RefusedSource:
    return RefusedSource(f"{file}, page {page} is damaged: {why}; deploy the source again")
