"""What is noted of a request while it is answered, for counts, logs and traces: who, what, how, and what went wrong.

The note belongs to the task that answers, so whoever knows something adds it without being handed the note. Never a
key, a header or anything of a body, but the id that the client gave.
"""

import re
import secrets
import time
from contextvars import ContextVar
from itertools import count

from dormouse.core.types import Ns
from dormouse.errors import DormouseError
from dormouse.submit import Chunk

ID_HEADER = "x-request-id"
TRACE_HEADERS = ("traceparent", "tracestate")
"""As W3C's Trace Context has them."""
NO_ONE_LEFT = 499
"""Status of an answer that nobody receives, since the client is gone."""
LONGEST_PATH = 200

_SANE = re.compile(r"[\x21-\x7e]{1,128}")
_BEGINNING = secrets.token_hex(6)
_numbers = count(1)


class Note:
    """Of one request. ``door``: by which it came in; ``call``: a method and a path, or the name of a gRPC call."""

    __slots__ = (
        "answered_ns",
        "began_ns",
        "call",
        "chunk",
        "door",
        "fault",
        "function",
        "given",
        "id",
        "parent",
        "status",
        "tenant",
    )

    def __init__(self, door: str, call: str, given_id: str | None, parent: dict[str, str] | None) -> None:
        self.door = door
        self.call = call
        self.given = given_id is not None and _SANE.fullmatch(given_id) is not None
        self.id = given_id if given_id is not None and self.given else f"{_BEGINNING}-{next(_numbers):x}"
        self.parent = parent
        self.tenant: str | None = None
        self.function = ""
        self.chunk: Chunk | None = None
        self.fault = ""
        self.status = NO_ONE_LEFT
        self.began_ns: Ns = time.monotonic_ns()
        self.answered_ns: Ns = 0


_current: ContextVar[Note | None] = ContextVar("note", default=None)


def opened(note: Note) -> None:
    """From now on this task notes here."""
    _current.set(note)


def current() -> Note | None:
    """The note of the request that this task answers."""
    return _current.get()


def asked_by(tenant: str) -> None:
    """Who asks is known."""
    if (note := _current.get()) is not None:
        note.tenant = tenant


def asks(function: str, named: str | None = None) -> None:
    """What is asked is known; ``named``: an id in the request, which holds unless its head had another."""
    if (note := _current.get()) is not None:
        note.function = function[:LONGEST_PATH]
        if named and not note.given and _SANE.fullmatch(named):
            note.id, note.given = named, True


def answered(chunk: Chunk) -> None:
    """A chunk of the answer is there."""
    if (note := _current.get()) is not None:
        note.chunk = chunk
        note.answered_ns = time.monotonic_ns()


def failed(fault: DormouseError) -> None:
    """This is the answer."""
    if (note := _current.get()) is not None:
        note.fault = fault.message
        note.status = fault.status
