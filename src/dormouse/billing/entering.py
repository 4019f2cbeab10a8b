"""Records into rows, within somebody else's transaction. Knows what each record means, and not where it comes from."""

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dormouse.billing.records import (
    NOT_RECORDED,
    AdmissionRefused,
    Beat,
    Began,
    Displaced,
    Ended,
    FunctionKnown,
    Loaded,
    Record,
    RequestEnded,
    RequestVoided,
    Unbilled,
)
from dormouse.core.types import FunctionId, Ns

_INSERT_REQUESTS = "INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_FUNCTION = """INSERT INTO functions (name, revision, owner, image_bytes, device_bytes, deadline_ns, share_ppm,
    pinned) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name, revision) DO UPDATE SET owner = excluded.owner,
    image_bytes = excluded.image_bytes, device_bytes = excluded.device_bytes, deadline_ns = excluded.deadline_ns,
    share_ppm = excluded.share_ppm, pinned = excluded.pinned"""
_INSERT_INTERVAL = """INSERT INTO intervals (life, kind, function, place, size_bytes, began_ns, how)
    VALUES (?, ?, ?, ?, ?, ?, ?)"""
_END_INTERVAL = """UPDATE intervals SET ended_ns = ?, why = ?
    WHERE ended_ns IS NULL AND function = ? AND kind = ? AND place = ?"""


class Entering:
    """Of one transaction. Requests are kept back, to be inserted together."""

    def __init__(self, connection: sqlite3.Connection, number_bits: int) -> None:
        self._connection = connection
        self._number_bits = number_bits
        self._requests: list[tuple[int, ...]] = []
        self._names: dict[str, int] = {"": 0}
        self._functions: dict[FunctionId, int] = {}
        self._last: dict[int, Ns] = {}
        self._ways: dict[type[Record], Callable[[int, Any], None]] = {
            RequestEnded: self._request_ended,
            RequestVoided: self._request_voided,
            FunctionKnown: self._function_known,
            Began: self._began,
            Ended: self._ended,
            Loaded: self._loaded,
            Displaced: self._displaced,
            Unbilled: self._unbilled,
            AdmissionRefused: self._admission_refused,
            Beat: self._beat,
        }

    def enter(self, life: int, records: Sequence[Record]) -> None:
        """In the order in which they were written."""
        ways = self._ways
        for record in records:
            ways[type(record)](life, record)
        self._last[life] = records[-1].at_ns

    def finish(self) -> None:
        """Insert what was kept back."""
        self._insert_requests()
        rows = [(at_ns, life) for life, at_ns in self._last.items()]
        self._connection.executemany("UPDATE lives SET last_ns = MAX(last_ns, ?) WHERE number = ?", rows)

    def _insert_requests(self) -> None:
        self._connection.executemany(_INSERT_REQUESTS, self._requests)
        self._requests.clear()

    # ------------------------------------------------------------------ names

    def _name(self, text: str) -> int:
        number: int | None = self._names.get(text)
        if number is None:
            self._connection.execute("INSERT OR IGNORE INTO names (text) VALUES (?)", (text,))
            number = self._connection.execute("SELECT id FROM names WHERE text = ?", (text,)).fetchone()[0]
            self._names[text] = number
        return number

    def _function(self, function: FunctionId) -> int:
        number = self._functions.get(function)
        if number is None:
            number = self._functions[function] = self._find_function(function)
        return number

    def _find_function(self, function: FunctionId) -> int:
        name, _, revision = function.rpartition("/")
        find = partial(
            self._connection.execute, "SELECT id FROM functions WHERE name = ? AND revision = ?", (name, int(revision))
        )
        row = find().fetchone()
        if row is None:  # asked for before it was known, as by a deploy that was refused
            self._connection.execute(_INSERT_FUNCTION, (name, int(revision), "", 0, 0, 0, 0, 0))
            row = find().fetchone()
        number: int = row[0]
        return number

    # ------------------------------------------------------------------ records

    def _request_ended(self, life: int, r: RequestEnded) -> None:
        self._requests.append(
            (
                life << self._number_bits | r.number,
                self._function(r.function),
                self._name(r.tenant),
                r.at_ns,
                r.latency_ns,
                r.queued_ns,
                r.device_ns,
                self._name(r.path),
                r.in_time,
                r.in_bytes,
                r.out_bytes,
                self._name(r.reason),
            )
        )

    def _request_voided(self, life: int, record: RequestVoided) -> None:
        self._insert_requests()
        key = life << self._number_bits | record.number
        statement = "UPDATE requests SET reason = ?, in_time = 0, out_bytes = 0 WHERE id = ?"
        self._connection.execute(statement, (self._name(NOT_RECORDED), key))

    def _function_known(self, _: int, r: FunctionKnown) -> None:
        name, revision = r.function.rsplit("/", 1)
        sizes = (r.image_bytes, r.device_bytes)
        row = (name, int(revision), r.owner, *sizes, r.deadline_ns, r.share_ppm, r.pinned)
        self._connection.execute(_INSERT_FUNCTION, row)

    def _began(self, life: int, r: Began) -> None:
        row = (life, r.kind, self._function(r.function), r.place, r.size_bytes, r.at_ns, r.how)
        self._connection.execute(_INSERT_INTERVAL, row)

    def _ended(self, _: int, r: Ended) -> None:
        row = (r.at_ns, r.why, self._function(r.function), r.kind, r.place)
        self._connection.execute(_END_INTERVAL, row)

    def _loaded(self, _: int, r: Loaded) -> None:
        self._occurred(r.at_ns, "load", r.function, r.place, how=r.path, size_bytes=r.size_bytes, ns=r.load_ns)

    def _displaced(self, _: int, r: Displaced) -> None:
        other = self._function(FunctionId(r.cause)) if r.cause else 0
        self._occurred(r.at_ns, "eviction", r.function, r.place, other=other)

    def _unbilled(self, _: int, r: Unbilled) -> None:
        self._occurred(r.at_ns, "unbilled", r.function, r.place, ns=r.device_ns)

    def _admission_refused(self, _: int, r: AdmissionRefused) -> None:
        self._occurred(r.at_ns, "refused", r.function, "", how=r.reason)

    def _occurred(
        self,
        at_ns: Ns,
        what: str,
        function: FunctionId,
        place: str,
        *,
        other: int = 0,
        how: str = "",
        size_bytes: int = 0,
        ns: Ns = 0,
    ) -> None:
        row = (at_ns, what, self._function(function), place, other, how, size_bytes, ns)
        self._connection.execute("INSERT INTO occurrences VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def _beat(self, life: int, beat: Beat) -> None:
        if beat.last:
            self._connection.execute(
                "UPDATE intervals SET ended_ns = ?, why = 'stopped' WHERE ended_ns IS NULL AND life = ?",
                (beat.at_ns, life),
            )
            self._connection.execute("UPDATE lives SET ended = 'stopped' WHERE number = ?", (life,))
