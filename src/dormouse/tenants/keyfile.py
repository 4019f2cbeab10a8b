"""The keys made by command, in one file of the state directory: made, listed and revoked while a server reads it.

The file is replaced as a whole, and never has the time of the one before, so that a look at its time shows whether it
is another. Knows nothing of keys that come from elsewhere.
"""

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from dormouse.errors import ConfigurationFault
from dormouse.tenants.callers import Caller
from dormouse.tenants.keys import digest_of, new_key, parse_digest, shown

FILE = "keys.json"
LOCK = "keys.lock"

Stamp = tuple[int, int]
"""Differs between any two files that were here."""


class KeyRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """A key without the key."""

    id: str
    digest: str
    tenant: str = ""
    admin: bool = False
    name: str = ""
    """What it is for, in its owner's words."""
    created_s: int = 0
    """Seconds since 1970."""

    @property
    def caller(self) -> Caller:
        return Caller(self.tenant, self.admin)


class _Kept(Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[KeyRecord, ...] = ()


class KeyFile:
    """The file of one state directory; it need not be there."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / FILE
        self._look = partial(os.stat, str(self.path))  # for every request: a Path would double its cost

    def stamp(self) -> Stamp | None:
        """Of the file as it is now; None: there is none."""
        try:
            found = self._look()
        except FileNotFoundError:
            return None
        except OSError as fault:
            raise ConfigurationFault(f"{self.path} cannot be read: {fault.strerror}") from None
        return found.st_ino, found.st_mtime_ns

    def records(self) -> tuple[KeyRecord, ...]:
        """All keys, oldest first. Raises ConfigurationFault naming file and, where there is one, line."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return ()
        except OSError as fault:
            raise ConfigurationFault(f"{self.path} cannot be read: {fault.strerror}") from None
        try:
            records = msgspec.json.decode(text, type=_Kept).keys
        except (msgspec.DecodeError, UnicodeDecodeError) as fault:
            raise ConfigurationFault(f"{self.path} is damaged ({fault}); remove it, and make the keys anew") from None
        for record in records:
            if parse_digest(record.digest) is None:
                raise ConfigurationFault(f"{self.path} is damaged (key {record.id} has no digest); revoke that key")
        return records

    def create(self, tenant: str, *, admin: bool, name: str) -> tuple[str, KeyRecord]:
        """A new key, which nobody can tell again, and what is kept of it. Raises ConfigurationFault."""
        key = new_key()
        record = KeyRecord(secrets.token_hex(4), shown(digest_of(key.encode())), tenant, admin, name, int(time.time()))
        with self._locked():
            self._replace((*self.records(), record))
        return key, record

    def revoke(self, key_id: str) -> KeyRecord:
        """From now on the key is none. Raises ConfigurationFault if there is none of that ID."""
        with self._locked():
            records = self.records()
            found = [record for record in records if record.id == key_id]
            if not found:
                raise ConfigurationFault(f"there is no key {key_id!r} in {self.path}; see `dormouse keys list`")
            self._replace(tuple(record for record in records if record.id != key_id))
        return found[0]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One change at a time, whoever makes it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = (self.path.parent / LOCK).open("wb")
        except OSError as fault:
            raise ConfigurationFault(f"{self.path.parent} cannot be written: {fault.strerror}") from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _replace(self, records: tuple[KeyRecord, ...]) -> None:
        unfinished = self.path.with_suffix(".new")
        text = msgspec.json.format(msgspec.json.encode(_Kept(records))) + b"\n"
        before = self.stamp()
        try:
            unfinished.unlink(missing_ok=True)
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            written_ns = time.time_ns() if before is None else max(time.time_ns(), before[1] + 1)
            os.utime(unfinished, ns=(written_ns, written_ns))
            unfinished.replace(self.path)
        except OSError as fault:
            raise ConfigurationFault(f"{self.path} cannot be written: {fault.strerror}") from None
