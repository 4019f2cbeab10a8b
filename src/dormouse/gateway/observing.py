"""What becomes of notes: every request is counted, some are logged, and where somebody collects traces each is a span.

Lines of requests are few a second, however many fail: of the rest their number is told.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dormouse import logs
from dormouse.core.types import Ns
from dormouse.gateway import notes
from dormouse.gateway.notes import ID_HEADER, LONGEST_PATH, TRACE_HEADERS, Note

SLOW_NS: Ns = 1_000_000_000

_LOG = logging.getLogger("dormouse.requests")
_ID = ID_HEADER.encode()
_TRACE = tuple(name.encode() for name in TRACE_HEADERS)
_DOORS = {"v2": "v2", "v1": "openai", "dormouse": "operator", "metrics": "metrics"}

Record = Callable[[Note, Ns], None]
"""Keeps a note whose request has taken so long."""


class Observer:
    """Of one server. ``log_all``: a line for every request; ``record``: makes spans."""

    def __init__(self, *, slow_ns: Ns = SLOW_NS, log_all: bool = False, record: Record | None = None) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        """By door and status."""
        self._slow_ns = slow_ns
        self._log_all = log_all
        self._record = record
        self._pace = logs.Pace()

    def ended(self, note: Note) -> None:
        """The answer has been sent, or nobody waits for it."""
        status = note.status
        self.answers[note.door, status] += 1
        took_ns = time.monotonic_ns() - note.began_ns
        if self._log_all or status >= 400 or note.fault or took_ns >= self._slow_ns:
            self._log(note, took_ns)
        if self._record is not None:
            self._record(note, took_ns)

    @contextmanager
    def observed(self, note: Note) -> Iterator[None]:
        """Inside, the request is answered; it is a success unless something else is noted."""
        notes.opened(note)
        try:
            yield
            if not note.fault:
                note.status = 200
        finally:
            self.ended(note)

    def _log(self, note: Note, took_ns: Ns) -> None:
        if not self._log_all and not self._pace.allows(note.began_ns + took_ns):
            return
        level, text = _judged(note, took_ns >= self._slow_ns)
        told: dict[str, object] = {"id": note.id, "door": note.door, "call": note.call, "status": note.status}
        told["ms"] = round(took_ns / 1e6, 3)
        if note.tenant is not None:
            told["tenant"] = note.tenant
        if note.function:
            told["function"] = note.function
        if (chunk := note.chunk) is not None:
            told |= {"path": str(chunk.path), "queued_ms": chunk.queued_ns / 1e6, "device_ms": chunk.device_ns / 1e6}
        if note.fault:
            told["why"] = note.fault
        if self._pace.unsaid:
            told["unsaid"] = self._pace.said()
        logs.tell(_LOG, level, text, **told)


def _judged(note: Note, slow: bool) -> tuple[int, str]:
    if note.status >= 500:
        return logging.WARNING, "request failed"
    if note.status == notes.NO_ONE_LEFT:
        return logging.INFO, "request given up"
    if note.status >= 400:
        return logging.INFO, "request refused"
    return logging.INFO, "slow request" if slow else "request"


# ------------------------------------------------------------------ HTTP


def observing(observer: Observer, inside: ASGIApp) -> ASGIApp:
    """The application, whose every answer is noted and has the request's id in its head."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await inside(scope, receive, send)
            return
        note = _note_of(scope)
        notes.opened(note)

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
                message["headers"] = [*message["headers"], (_ID, note.id.encode())]
            await send(message)

        try:
            await inside(scope, receive, told)
        finally:
            observer.ended(note)

    return answer


def _note_of(scope: Scope) -> Note:
    given_id, parent = None, None
    for name, value in scope["headers"]:
        if name == _ID:
            given_id = value.decode("latin-1")
        elif name in _TRACE:
            parent = {**(parent or {}), name.decode(): value.decode("latin-1")}
    path: str = scope["path"]
    door = _DOORS.get(path[1:].partition("/")[0], "other")
    return Note(door, f"{scope['method']} {path[:LONGEST_PATH]}", given_id, parent)
