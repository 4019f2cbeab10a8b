"""Writes changed runtime state home into an image on disk, so that a crash at any moment leaves a sound image.

The new state goes to a redo file first, whole or not at all; then into the image file and the index; then the redo
file goes. Who reads an image settles a redo file that a crash left behind. Blocking; runs on the store's threads.

    write state.redo.part, rename to state.redo    a crash before the rename: the old state
    state into image.bin, then the index           a crash from here on: done again from state.redo
    delete state.redo
"""

import os
import zlib
from pathlib import Path

import msgspec

from dormouse.store.index import DATA_FILE, PAGE_BYTES, ImageIndex, read_index, write_index

REDO_FILE = "state.redo"


def write_state(directory: Path, index: ImageIndex, pages: list[memoryview]) -> None:
    """``pages`` hold the image from ``weight_bytes`` on. Nothing is written if nothing changed. Raises OSError."""
    if _checksums(pages) == _stored_checksums(index):
        return
    part = directory / f"{REDO_FILE}.part"
    with part.open("wb") as file:
        file.writelines(pages)
        os.fsync(file.fileno())
    part.replace(directory / REDO_FILE)
    _flush_directory(directory)
    settle(directory)


def settle(directory: Path) -> ImageIndex:
    """Finish a write-back that was cut short, if there is one; the image's index. Raises RefusedSource, OSError."""
    index = read_index(directory)
    redo = directory / REDO_FILE
    if not redo.exists():
        return index
    state = redo.read_bytes()
    with (directory / DATA_FILE).open("r+b") as data:
        data.seek(index.weight_bytes)
        data.write(state)
        data.flush()
        os.fsync(data.fileno())
    first = index.weight_bytes // PAGE_BYTES
    parts = [memoryview(state)[at : at + PAGE_BYTES] for at in range(0, len(state), PAGE_BYTES)]
    index = msgspec.structs.replace(index, page_crc32=(*index.page_crc32[:first], *_checksums(parts)))
    write_index(directory, index)
    redo.unlink()
    return index


def _checksums(pages: list[memoryview]) -> tuple[int, ...]:
    return tuple(zlib.crc32(page) for page in pages)


def _stored_checksums(index: ImageIndex) -> tuple[int, ...]:
    return index.page_crc32[index.weight_bytes // PAGE_BYTES :]


def _flush_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
