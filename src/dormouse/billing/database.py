"""The ledger in SQLite: its tables, and the one way that entries come into them, exactly once.

Entries are taken from segments, and how far that has come is written in the same transaction. So anybody may do it, the
server in the background or whoever wants a bill, at the same time, and after any crash. What is taken in is deleted.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dormouse.billing.entering import Entering
from dormouse.billing.records import decoded
from dormouse.billing.segments import file_of, numbers_in, pages_of
from dormouse.core.types import Ns
from dormouse.errors import ConfigurationFault, StateNotKept

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS progress (
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, pruned_ns INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS lives (
    number INTEGER PRIMARY KEY, began_ns INTEGER NOT NULL, last_ns INTEGER NOT NULL, ended TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS names (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE IF NOT EXISTS functions (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, revision INTEGER NOT NULL, owner TEXT NOT NULL,
    image_bytes INTEGER NOT NULL, device_bytes INTEGER NOT NULL, deadline_ns INTEGER NOT NULL,
    share_ppm INTEGER NOT NULL, pinned INTEGER NOT NULL, UNIQUE (name, revision)) STRICT;
CREATE TABLE IF NOT EXISTS requests (
    id INTEGER PRIMARY KEY, function INTEGER NOT NULL, tenant INTEGER NOT NULL, ended_ns INTEGER NOT NULL,
    latency_ns INTEGER NOT NULL, queued_ns INTEGER NOT NULL, device_ns INTEGER NOT NULL, path INTEGER NOT NULL,
    in_time INTEGER NOT NULL, in_bytes INTEGER NOT NULL, out_bytes INTEGER NOT NULL, reason INTEGER NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS requests_by_end ON requests (ended_ns);
CREATE TABLE IF NOT EXISTS intervals (
    id INTEGER PRIMARY KEY, life INTEGER NOT NULL, kind TEXT NOT NULL, function INTEGER NOT NULL, place TEXT NOT NULL,
    size_bytes INTEGER NOT NULL, began_ns INTEGER NOT NULL, ended_ns INTEGER, how TEXT NOT NULL, why TEXT) STRICT;
CREATE INDEX IF NOT EXISTS intervals_by_function ON intervals (function, kind, ended_ns);
CREATE INDEX IF NOT EXISTS intervals_by_end ON intervals (ended_ns);
CREATE TABLE IF NOT EXISTS occurrences (
    at_ns INTEGER NOT NULL, what TEXT NOT NULL, function INTEGER NOT NULL, place TEXT NOT NULL, other INTEGER NOT NULL,
    how TEXT NOT NULL, size_bytes INTEGER NOT NULL, duration_ns INTEGER NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS occurrences_by_time ON occurrences (at_ns);
CREATE TABLE IF NOT EXISTS tariffs (
    valid_from_ns INTEGER PRIMARY KEY, set_ns INTEGER NOT NULL, tariff TEXT NOT NULL) STRICT;
INSERT INTO progress SELECT 0, 0, 0 WHERE NOT EXISTS (SELECT * FROM progress);
INSERT OR IGNORE INTO names VALUES (0, '');
"""
NUMBER_BITS = 40
"""Of a request's id, below the number of the life: a thousand requests a second for 34 years."""
BUSY_S = 30
AT_ONCE_BYTES = 1024 * 1024
"""So much is taken from segments in one transaction, so that nobody waits long for the lock."""


def request_key(life: int, number: int) -> int:
    return life << NUMBER_BITS | number


def request_of(key: int) -> tuple[int, int]:
    """Life and number."""
    return key >> NUMBER_BITS, key & ((1 << NUMBER_BITS) - 1)


class Database:
    """One connection, to be used by one thread at a time."""

    def __init__(self, state_dir: Path) -> None:
        """Raises ConfigurationFault for what is no ledger, and if it cannot be written."""
        self.state_dir = state_dir
        self.file = state_dir / "ledger.sqlite"
        self.directory = state_dir / "ledger"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.connection = sqlite3.connect(
                self.file, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=64
            )
            self.connection.execute("PRAGMA journal_mode = WAL")
            # What has been taken in is deleted from the segments, so it must not be lost here with the power.
            self.connection.execute("PRAGMA synchronous = FULL")
            self._create()
        except OSError as fault:
            raise ConfigurationFault(f"ledger {self.directory} cannot be made: {fault.strerror}") from None
        except sqlite3.Error as fault:
            raise ConfigurationFault(f"{self.file} cannot be used as the ledger: {fault}") from None

    def _create(self) -> None:
        version: int = self.connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self.connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            message = f"{self.file} has schema {version}, this version reads {SCHEMA_VERSION}"
            raise ConfigurationFault(message)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of what is done inside, or StateNotKept and none of it."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield self.connection
            self.connection.execute("COMMIT")
        except sqlite3.Error as fault:
            raise StateNotKept(f"{self.file} cannot be written: {fault}") from None
        finally:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    # ------------------------------------------------------------------ entries

    def take_in(self, busy_s: float = BUSY_S) -> None:
        """All that is in the segments now, waiting so long for others. Raises StateNotKept; then it stays there."""
        self.connection.execute(f"PRAGMA busy_timeout = {round(busy_s * 1_000)}")
        while self._take_some():
            pass

    def _take_some(self) -> bool:
        """One transaction's worth; whether there may be more."""
        with self.transaction() as connection:
            segment, offset = connection.execute("SELECT segment, offset FROM progress").fetchone()
            present = [number for number in numbers_in(self.directory) if number >= segment]
            if not present:
                return False
            begun_after = len(present) > 1  # looked at before it is read: so nobody adds to the first any more
            if present[0] != segment:
                segment, offset = present[0], 0
            offset, read = self._enter_pages(connection, segment, offset)
            finished = begun_after and not read
            if finished:
                segment, offset = present[1], 0
            connection.execute("UPDATE progress SET segment = ?, offset = ?", (segment, offset))
        if finished:
            self._delete_before(segment)
        return read or finished

    def _enter_pages(self, connection: sqlite3.Connection, segment: int, offset: int) -> tuple[int, bool]:
        """From an offset on; where that ends, and whether there was anything."""
        with file_of(self.directory, segment).open("rb") as source:
            source.seek(offset)
            data = source.read()
        entering = Entering(connection, NUMBER_BITS)
        done = 0
        for body, end in pages_of(data):
            page = decoded(body)
            entering.enter(page.life, page.records)
            done = end
            if done >= AT_ONCE_BYTES:
                break
        entering.finish()
        return offset + done, done > 0

    def _delete_before(self, segment: int) -> None:
        for number in numbers_in(self.directory):
            if number < segment:
                with contextlib.suppress(FileNotFoundError):  # somebody else was as quick
                    file_of(self.directory, number).unlink()

    # ------------------------------------------------------------------ lives

    def begin_life(self, now_ns: Ns) -> tuple[int, Ns, int]:
        """A number that no life has had; when it begins, which is never before the last one's end; and the number of
        the last segment. What the last life has left open ends with what it has recorded last. Raises StateNotKept."""
        self.take_in()
        with self.transaction() as connection:
            connection.execute(
                """UPDATE intervals SET why = 'crashed', ended_ns = MAX(began_ns,
                (SELECT last_ns FROM lives WHERE lives.number = intervals.life)) WHERE ended_ns IS NULL"""
            )
            connection.execute("UPDATE lives SET ended = 'crashed' WHERE ended = ''")
            number, last_ns = connection.execute(
                "SELECT COALESCE(MAX(number), 0) + 1, MAX(last_ns) FROM lives"
            ).fetchone()
            began_ns = max(now_ns, last_ns or 0)
            connection.execute("INSERT INTO lives VALUES (?, ?, ?, '')", (number, began_ns, began_ns))
            segment: int = connection.execute("SELECT segment FROM progress").fetchone()[0]
        return number, began_ns, segment

    def prune(self, before_ns: Ns) -> tuple[int, int]:
        """Forget requests, and intervals that ended, before then. How many of each. Raises StateNotKept."""
        with self.transaction() as connection:
            requests = connection.execute("DELETE FROM requests WHERE ended_ns < ?", (before_ns,)).rowcount
            intervals = connection.execute("DELETE FROM intervals WHERE ended_ns < ?", (before_ns,)).rowcount
            connection.execute("DELETE FROM occurrences WHERE at_ns < ?", (before_ns,))
            connection.execute("UPDATE progress SET pruned_ns = MAX(pruned_ns, ?)", (before_ns,))
        try:
            self.connection.execute("VACUUM")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as fault:
            raise StateNotKept(f"old records are forgotten, but their room was not given back: {fault}") from None
        return requests, intervals

    def close(self) -> None:
        self.connection.close()
