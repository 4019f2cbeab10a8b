"""Lays an image out, writes its data file, and publishes its directory: whole, or not at all.

Knows entries and bytes; what a tensor is and in which order a model uses it is decided by the importer.
"""

import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dormouse.core.types import Bytes, round_up
from dormouse.errors import Conflict
from dormouse.store.index import ALIGNMENT_BYTES, DATA_FILE, PAGE_BYTES, TensorEntry


def laid_out(
    weights: Sequence[TensorEntry], state: Sequence[TensorEntry]
) -> tuple[tuple[TensorEntry, ...], Bytes, Bytes]:
    """The entries with their offsets, the bytes of the weights (with the gap, if state follows), and of everything."""
    placed, end = _placed(weights, 0)
    if not state:
        return placed, end, end
    weight_bytes = round_up(end, PAGE_BYTES)
    changing, end = _placed(state, weight_bytes)
    return placed + changing, weight_bytes, end


def write_data(
    directory: Path, tensors: Iterable[tuple[TensorEntry, bytes | memoryview]], *, durable: bool = True
) -> tuple[int, ...]:
    """Write the data file from entries in order of offset; the CRC-32 of every page. If ``durable``, it is on disk when
    this returns."""
    with (directory / DATA_FILE).open("wb") as file:
        writer = _PageWriter(file.fileno())
        for entry, content in tensors:
            writer.pad_to(entry.offset)
            writer.write(content)
        writer.pad_to(round_up(writer.written, PAGE_BYTES))
        writer.flush()
        if durable:
            os.fsync(file.fileno())
    return tuple(writer.checksums)


@contextmanager
def staged(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """A directory beside ``target`` to fill; it becomes ``target`` in one step, or nothing stays of it. If not
    ``durable``, a crash of the machine may leave anything."""
    if target.exists():
        raise Conflict(f"{target} exists already")
    staging = _staging(target)
    remove_staging(target)  # of a process that was killed
    staging.mkdir(parents=True)
    try:
        yield staging
        if durable:
            for path in (*staging.rglob("*"), staging):
                _flush(path)
        staging.rename(target)
        if durable:
            _flush(target.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _staging(target: Path) -> Path:
    return target.with_name(f".{target.name}.staging")


def remove_staging(target: Path) -> None:
    """What a killed process has left of ``staged``; the process must have ended."""
    shutil.rmtree(_staging(target), ignore_errors=True)


class _PageWriter:
    """Writes in order, page by page, and keeps each page's checksum."""

    def __init__(self, fd: int) -> None:
        self.checksums: list[int] = []
        self.written: Bytes = 0
        self._fd = fd
        self._page = bytearray()

    def write(self, content: bytes | memoryview) -> None:
        with memoryview(content).cast("B") as view:
            self.written += len(view)
            done = 0
            while done < len(view):
                taken = view[done : done + PAGE_BYTES - len(self._page)]
                done += len(taken)
                if len(taken) == PAGE_BYTES:
                    self._write_page(taken)
                    continue
                self._page += taken
                if len(self._page) == PAGE_BYTES:
                    self.flush()

    def pad_to(self, offset: Bytes) -> None:
        assert offset >= self.written, (offset, self.written)
        while self.written < offset:
            self.write(bytes(min(offset - self.written, PAGE_BYTES)))

    def flush(self) -> None:
        if self._page:
            with memoryview(self._page) as page:
                self._write_page(page)
            self._page.clear()

    def _write_page(self, page: memoryview) -> None:
        self.checksums.append(zlib.crc32(page))
        done = 0
        while done < len(page):
            done += os.write(self._fd, page[done:])


def _placed(entries: Sequence[TensorEntry], start: Bytes) -> tuple[tuple[TensorEntry, ...], Bytes]:
    placed: list[TensorEntry] = []
    end = start
    for entry in entries:
        offset = round_up(end, ALIGNMENT_BYTES)
        placed.append(msgspec.structs.replace(entry, offset=offset))
        end = offset + entry.size_bytes
    return tuple(placed), end


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
