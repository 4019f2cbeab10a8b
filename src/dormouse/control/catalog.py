"""What survives a restart: the deployed functions, in SQLite. An answer is given only after its row is committed."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from dormouse.core.types import Bytes
from dormouse.errors import ConfigurationFault, StateNotKept
from dormouse.functions import Manifest
from dormouse.tasks.description import Task
from dormouse.tensors import Signature

SCHEMA_VERSION = 1
ROOM_BYTES: Bytes = 64 * 1024
"""So much is kept ready in the file, and in its log, for when the disk is full."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS functions (
    name       TEXT NOT NULL,
    revision   INTEGER NOT NULL,
    available  INTEGER NOT NULL,
    record     BLOB NOT NULL,
    PRIMARY KEY (name, revision)
) STRICT;
CREATE TABLE IF NOT EXISTS revisions (
    name   TEXT PRIMARY KEY,
    latest INTEGER NOT NULL
) STRICT;
"""


class Deployed(Struct, frozen=True):
    """One revision of a function, as it was admitted."""

    manifest: Manifest
    revision: int
    image_bytes: Bytes
    state_bytes: Bytes
    signature: Signature
    platform: str
    available: bool = True
    durable: bool = True
    """Whether its image is on disk, and so survives a restart."""
    task: Task | None = None
    deployed_s: int = 0
    """When, in seconds since 1970; 0: by a version that did not note it."""

    @property
    def name(self) -> str:
        return self.manifest.name


class Catalog:
    """The table of deployed functions. Raises ConfigurationFault when the file is not ours or of another version."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            self._connection = sqlite3.connect(file, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.executescript(SCHEMA)
            self._check_version()
            self._keep_room()
        except sqlite3.DatabaseError as fault:
            raise ConfigurationFault(f"{file} cannot be used as the catalog: {fault}") from None

    def _check_version(self) -> None:
        version: int = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            raise ConfigurationFault(f"{self._file} has schema {version}, this version reads {SCHEMA_VERSION}")

    def _keep_room(self) -> None:
        """Removals must be possible on a full disk, since they are what gives room back; so what they are written to is
        there before: the log of writes, which is begun anew after each, and pages in the file itself."""
        free: int = self._connection.execute("PRAGMA freelist_count").fetchone()[0]
        page: int = self._connection.execute("PRAGMA page_size").fetchone()[0]
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute("CREATE TABLE room (bytes BLOB)")
        self._connection.execute("INSERT INTO room VALUES (zeroblob(?))", (max(ROOM_BYTES, free * page),))
        self._connection.execute("COMMIT")
        self._connection.execute("DROP TABLE room")
        self._begin_log_anew()

    def _begin_log_anew(self) -> None:
        with suppress(sqlite3.Error):  # then what is written next goes behind, if there is room
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def functions(self) -> list[Deployed]:
        """Every function, by name."""
        rows = self._connection.execute("SELECT record, available FROM functions ORDER BY name")
        return [
            msgspec.structs.replace(msgspec.json.decode(record, type=Deployed), available=bool(available))
            for record, available in rows
        ]

    def next_revision(self, name: str) -> int:
        """A number that no revision of this name has had, nor will have again. Raises StateNotKept."""
        statement = """INSERT INTO revisions VALUES (?, 1)
            ON CONFLICT (name) DO UPDATE SET latest = latest + 1 RETURNING latest"""
        with self._transaction() as connection:
            revision: int = connection.execute(statement, (name,)).fetchone()[0]
        return revision

    def add(self, deployed: Deployed) -> None:
        """From now on the name stands for this revision; the one before is gone. Raises StateNotKept."""
        row = (deployed.name, deployed.revision, deployed.available, msgspec.json.encode(deployed))
        with self._transaction() as connection:
            connection.execute("DELETE FROM functions WHERE name = ?", (deployed.name,))
            connection.execute("INSERT INTO functions VALUES (?, ?, ?, ?)", row)

    def set_available(self, name: str, revision: int, available: bool) -> None:
        """Raises StateNotKept."""
        statement = "UPDATE functions SET available = ? WHERE name = ? AND revision = ?"
        with self._transaction() as connection:
            connection.execute(statement, (available, name, revision))

    def remove(self, name: str, revision: int) -> None:
        """Raises StateNotKept."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM functions WHERE name = ? AND revision = ?", (name, revision))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All of what is done inside, or StateNotKept and none of it."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection
            self._connection.execute("COMMIT")
        except sqlite3.Error as fault:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise StateNotKept(f"{self._file} cannot be written: {fault}") from None
        self._begin_log_anew()

    def close(self) -> None:
        self._connection.close()
