"""Append-only files of pages, each with its length and CRC-32: where entries are durable before they reach SQLite.

A page that is not there as a whole is not there. A writer always begins a file of its own, so what a crash has torn is
always at the end of a file that nobody writes any more. Knows no record.
"""

import contextlib
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from zlib import crc32

from dormouse.core.types import Bytes

Sync = Literal["process", "power"]
"""What an entry survives: the end of the process, or of the machine's power too."""

SEGMENT_BYTES: Bytes = 8 * 1024 * 1024
_HEAD = struct.Struct("<II")
_NAME = "{:012}.entries"


def numbers_in(directory: Path) -> list[int]:
    """The segments that are there, oldest first."""
    return sorted(int(file.stem) for file in directory.glob("*.entries"))


def file_of(directory: Path, number: int) -> Path:
    return directory / _NAME.format(number)


def pages_of(data: bytes, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Every whole page from an offset on, and where the next one begins."""
    while offset + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, offset)
        begin, offset = offset + _HEAD.size, offset + _HEAD.size + length
        page = data[begin:offset]
        if not length or len(page) < length or crc32(page) != checksum:
            return
        yield page, offset


class SegmentWriter:
    """Appends pages. ``append`` and ``close`` belong to one thread; ``sync`` may run beside them in another."""

    def __init__(self, directory: Path, sync: Sync, *, after: int = 0, segment_bytes: Bytes = SEGMENT_BYTES) -> None:
        """Begins a segment with a number above ``after`` and above all that are there. Raises OSError."""
        self._directory = directory
        self._sync = sync
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._retired: list[int] = []
        directory.mkdir(parents=True, exist_ok=True)
        self.number = max([after, *numbers_in(directory)])
        self._open_next()

    def _open_next(self) -> None:
        number = self.number + 1
        fd = os.open(file_of(self._directory, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self.number, self._fd, self._size, self._torn = number, fd, 0, False
        self._unnamed = True
        """The directory's entry for it may not have reached the disk."""

    def append(self, page: bytes) -> None:
        """When this returns the page outlives the process. Raises OSError, and then the page is not there."""
        if self._torn or self._size >= self._segment_bytes:
            self._rotate()
        data = _HEAD.pack(len(page), crc32(page)) + page
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:] if written else data)
        except OSError:
            self._cut_back()
            raise
        self._size += len(data)

    def _cut_back(self) -> None:
        """Take away a part of a page, so that the next one is found; if that cannot be, a new file is begun."""
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self._torn = True

    def _rotate(self) -> None:
        before = self._fd
        self._open_next()
        if self._sync == "power":
            with self._lock:
                self._retired.append(before)
        else:
            os.close(before)

    def sync(self) -> None:
        """When this returns all that was appended before it was called outlives the power. Raises OSError."""
        with self._lock:
            retired, self._retired = self._retired, []
        for fd in retired:
            os.fdatasync(fd)
            os.close(fd)
        os.fdatasync(self._fd)
        if self._unnamed:
            self._unnamed = False
            self._sync_directory()

    def _sync_directory(self) -> None:
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        except OSError:
            self._unnamed = True
            raise
        finally:
            os.close(directory)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            for fd in (*self._retired, self._fd):
                os.close(fd)
