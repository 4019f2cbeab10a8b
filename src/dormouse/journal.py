"""The core's diary: every event with its time, and the commands it brought forth, so that it can be replayed.

A file is a header line and then frames: a 4-byte little-endian length, then msgpack of (now, event, commands).
"""

import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from dormouse.core.messages import Command, Event
from dormouse.core.types import Ns, Settings
from dormouse.errors import ConfigurationFault

_LOG = logging.getLogger("dormouse.control")
FORMAT = 3
"""Counts the vocabulary, too: entries with other events or commands are another format."""
LENGTH = struct.Struct("<I")


class Header(Struct, frozen=True):
    format: int
    settings: Settings


class Entry(Struct, frozen=True, array_like=True):
    now: Ns
    event: Event
    commands: list[Command]


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def encode_commands(commands: list[Command]) -> bytes:
    """Commands as the journal writes them, for comparing byte for byte."""
    return _encoder.encode(commands)


class JournalWriter:
    """Appends entries; a crash loses at most what the operating system had not yet taken.

    What an earlier start has recorded there is kept beside it, as FILE.1, FILE.2 and so on in their order. When the
    disk is full the journal ends, with a line in the log; what it would have recorded goes on.
    """

    def __init__(self, file: Path, settings: Settings) -> None:
        self._ended = False
        try:
            _set_aside(file)
            self._file: BinaryIO = file.open("wb")
        except OSError as fault:
            raise ConfigurationFault(f"journal {file} cannot be written: {fault.strerror}") from None
        self._file.write(msgspec.json.encode(Header(FORMAT, settings)) + b"\n")

    def append(self, now: Ns, event: Event, commands: list[Command]) -> None:
        body = _encoder.encode(Entry(now, event, commands))
        try:
            if not self._ended:
                self._file.write(LENGTH.pack(len(body)) + body)
        except OSError as fault:
            self._end(fault)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as fault:
            self._end(fault)

    def _end(self, fault: OSError) -> None:
        if not self._ended:
            _LOG.error("the journal %s ends early: %s", self._file.name, fault.strerror)
        self._ended = True


def _set_aside(file: Path) -> None:
    """Make room for a new file of that name. Devices and pipes are written as they are."""
    if file.is_file():
        numbers = [other.name.removeprefix(f"{file.name}.") for other in file.parent.iterdir()]
        last = max((int(number) for number in numbers if number.isdecimal()), default=0)
        file.rename(file.with_name(f"{file.name}.{last + 1}"))


class Record:
    """A journal that is being read. ``cut_off`` is known once ``entries`` has come to its end."""

    def __init__(self, settings: Settings, source: BinaryIO) -> None:
        self.settings = settings
        self.cut_off = False
        self._source = source

    @property
    def entries(self) -> Iterator[Entry]:
        """Every entry that is there whole. Only once."""
        with self._source as source:
            while head := source.read(LENGTH.size):
                length = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 1
                body = source.read(length)
                if len(body) < length:
                    self.cut_off = True
                    return
                yield _decoder.decode(body)


def read_journal(file: Path) -> Record:
    """A journal, as far as it goes. Raises ConfigurationFault for other files and other versions."""
    source = file.open("rb")
    try:
        header = msgspec.json.decode(source.readline(), type=Header)
    except msgspec.DecodeError as fault:
        source.close()
        raise ConfigurationFault(f"{file} is no journal: {fault}") from None
    if header.format != FORMAT:
        source.close()
        raise ConfigurationFault(f"{file} has journal format {header.format}, this version reads {FORMAT}")
    return Record(header.settings, source)
