"""HTTP connections: what may come in before there is a request to answer, how fast, and how many there may be.

uvicorn's, which would collect a head without end, wait for the rest of a request for ever, keep an answer for a client
that does not take it, parse requests without end that nobody waits for, and accept connections until there are no
more files. Knows no route and no key.

A timer runs only while a request is incomplete: most come in one piece, and cost nothing here. When there are too many
connections, one that has rested longest goes; if none rests, the new one is turned away.

What comes in one piece is parsed slice by slice, and kept unparsed while requests enough of the connection wait for
those before them; so long nothing more is read. So no connection holds the event loop, or more memory than its share.
"""

import asyncio
import contextlib
import heapq
import logging
import re
import resource
import socket
import sys
import time
from collections.abc import Collection
from http import HTTPStatus
from typing import ClassVar

import httptools
import msgspec
from msgspec import Struct
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dormouse import logs
from dormouse.core.types import Bytes, Ns

HEAD_LIMIT_BYTES: Bytes = 1024 * 1024
"""Of what comes before a body; more than one read of a socket, since a body may begin in it."""
SLICE_BYTES: Bytes = 1024
"""What is parsed at once, of what is no body of known length: some dozens of requests at most."""
MOST_WAITING = 16
"""Requests of a connection behind the one that is answered, or a slice more."""

OTHER_FILES = 4_096
"""What may be open beside connections: images that are read, shared memory, executors."""
DOORS = 2
"""Each may have as many connections."""

_LOG = logging.getLogger("dormouse.connections")
_NOTHING = memoryview(b"")
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]{1,18})\r\n", re.IGNORECASE)


class Patience(Struct, frozen=True):
    """How long a head and a body may take, and how many connections there may be."""

    head_s: float = 20.0
    body_s: float = 120.0
    """Also: how long a client may take nothing of what it is sent."""
    connections: int = 4_000


def within_files(wanted: int) -> int:
    """How many connections a door may have: as many as wanted, if the system lets us have the files for them. Raises
    this process's limit of open files as far as that takes, or as far as it may."""
    soft, hard = (sys.maxsize if each == resource.RLIM_INFINITY else each for each in _files())
    files = min(DOORS * wanted + OTHER_FILES, hard)
    if soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, _files()[1]))
    connections = min(wanted, max(files - OTHER_FILES, files // 2) // DOORS)
    if connections < wanted:
        _LOG.warning("connections = %d at each door, since this process may have %d files open", connections, files)
    return connections


def _files() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def connection_class(patience: Patience) -> "type[Connection]":
    """The class of a server's connections."""
    return type("Connection", (Connection,), {"patience": patience, "pace": logs.Pace()})


def drop_longest_resting(connections: Collection[object], count: int = 1) -> bool:
    """End so many; whether there was one."""
    resting = [each for each in connections if isinstance(each, Connection) and each.rests()]
    for each in heapq.nsmallest(count, resting, key=lambda each: each.quiet_since_ns):
        each.drop()
    return bool(resting)


class _Flow(FlowControl):
    """Reads on when nothing that has been read waits."""

    def __init__(self, connection: "Connection") -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self._connection.is_behind() and not self._transport.is_closing():
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """From when it is accepted, before which there is ``arrive``, to its end."""

    patience: ClassVar[Patience] = Patience()
    pace: ClassVar[logs.Pace] = logs.Pace()

    _stage = "rest"
    """``rest``, ``head`` or ``body``: what of a request is coming in."""
    _since = 0
    """Counts stages, so that two of a kind differ."""
    _timed = 0
    _head_bytes: Bytes = 0
    quiet_since_ns: Ns = 0
    """When its last answer had been sent, or when it was accepted or made."""
    _accepted: socket.socket | None = None
    """What it is before there is a transport."""
    _made = False
    _has_room = True
    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _held = _NOTHING
    """Read, and not parsed yet."""
    _body_bytes: Bytes = 0
    """That have come of the body which is coming in."""
    _answered: RequestResponseCycle | None = None
    """The request that is answered now, or was last."""
    _refusal: bytes | None = None
    """The last answer, once those before it are sent."""

    # ------------------------------------------------------------------ how many

    def arrive(self, accepted: socket.socket) -> None:
        """It is accepted, and may have a handshake before it. If there are too many, what has rested longest goes."""
        self._accepted = accepted
        self.quiet_since_ns = time.monotonic_ns()
        most = self.patience.connections
        # Some at once, as looking for them takes a while.
        self._has_room = len(self.connections) < most or drop_longest_resting(self.connections, 1 + most // 100)
        self.connections.add(self)

    def has_arrived(self) -> None:
        """The handshake has ended, or failed."""
        self._accepted = None
        if not self._made:
            self.connections.discard(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._made = True
        self.flow = _Flow(self)
        if not self._has_room and len(self.connections) > self.patience.connections:
            self._refuse(503, "too many connections are open; come again later", "Retry-After: 1\r\n")
            return
        # One on which nothing is ever said ends like one on which nothing more is said.
        self.quiet_since_ns = time.monotonic_ns()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def rests(self) -> bool:
        """Whether nothing would be lost with it: it shakes hands, waits for a request, or is being closed."""
        return not self._made or self.timeout_keep_alive_task is not None or self.transport.is_closing()

    def drop(self) -> None:
        """End it at once, and count it no longer."""
        self.connections.discard(self)
        if self._made:
            self.transport.abort()
        elif self._accepted is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                self._accepted.shutdown(socket.SHUT_RDWR)

    def shutdown(self) -> None:
        if self._made:
            super().shutdown()
        else:
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        self.resume_writing()
        self._unset_keepalive_if_required()
        self._held, self._refusal = _NOTHING, None
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:  # uvicorn tells the one read last only
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    # ------------------------------------------------------------------ what comes in

    def data_received(self, data: bytes) -> None:
        if not self.is_behind() and (len(data) <= SLICE_BYTES or self._is_of_one(data)):
            self._parse(data)
        else:
            self._held = memoryview(b"".join((self._held, data)) if self._held else data)
            self._catch_up()

    def _is_of_one(self, data: bytes) -> bool:
        """Whether this can hold no more than one request, the usual one of a body whose length is known."""
        if self._stage != "rest":
            return len(data) <= self._rest_of_body()
        end = data.find(b"\r\n\r\n", 0, 8 * SLICE_BYTES)
        length = _LENGTH.search(data, 0, end + 2) if end > 0 else None
        return length is not None and len(data) - (end + 4) <= int(length[1])

    def is_behind(self) -> bool:
        """Whether something waits that has been read."""
        return bool(self.pipeline or self._held or self._refusal)

    def _catch_up(self) -> None:
        """Parse what is held, until requests enough wait."""
        while self._held and len(self.pipeline) < MOST_WAITING:
            if self._refusal or self.transport.is_closing() or self._has_ended():
                self._held = _NOTHING
                return
            size = max(SLICE_BYTES, self._rest_of_body())
            piece, self._held = self._held[:size], self._held[size:]
            self._parse(bytes(piece))  # a copy, since httptools is slow with views
        if self._held:
            self.flow.pause_reading()

    def _has_ended(self) -> bool:
        """Whether the last request said that it is the last, or the server does not want another."""
        return self._stage == "rest" and self.cycle is not None and not self.cycle.keep_alive

    def _rest_of_body(self) -> Bytes:
        """How much is missing of a body of known length."""
        if self._stage != "body":
            return 0
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        return int(length) - self._body_bytes

    def _parse(self, data: bytes) -> None:
        self._head_bytes += len(data) if self._stage != "body" else 0
        if self._head_bytes > HEAD_LIMIT_BYTES:
            self._refuse(400, "the request line and the headers are too long")
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # to what is not spoken here: answered as if it had not been asked for
            self._held = _NOTHING
        except httptools.HttpParserError:
            self._refuse(400, "Invalid HTTP request received.")
            return
        if self._timed != self._since:
            self._cancel()
            self._timed = self._since
            if self._stage != "rest":
                self._wait()

    def on_message_begin(self) -> None:
        self._enter("head")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._enter("body")
        self._body_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._enter("rest")
        super().on_message_complete()

    def _enter(self, stage: str) -> None:
        self._stage, self._head_bytes = stage, 0
        self._since += 1

    def _wait(self) -> None:
        limit_s = self.patience.head_s if self._stage == "head" else self.patience.body_s
        self._timer = self.loop.call_later(limit_s, self._give_up, limit_s)

    def _give_up(self, limit_s: float) -> None:
        earlier = self._stage == "head" and self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or earlier:  # it is we who do not read, or another answer is in the way
            self._wait()
        elif self._stage == "body" and self.cycle.response_started:  # its answer is under way, or long there
            self.transport.close()
        else:
            part = "head" if self._stage == "head" else "body"
            self._refuse(408, f"the request's {part} took longer than {limit_s:g} s to arrive")

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------------------------ what goes out

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.patience.body_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self.quiet_since_ns = time.monotonic_ns()
        if self._refusal and not self._is_before_last():
            self._end(self._refusal)
        super().on_response_complete()
        if self.flow.read_paused:
            self._catch_up()
            self.flow.resume_reading()
            if self._timer is not None:  # it has been our turn until now
                self._cancel()
                self._wait()

    def _is_before_last(self) -> bool:
        """Whether another answer is to be sent before that of what was read last."""
        if self._stage != "body":
            return bool(self.pipeline)
        return bool(self.pipeline) and self.pipeline[-1][0] is not self.cycle

    def _refuse(self, status: int, text: str, headers: str = "") -> None:
        """Answer without the application, which sees a client that has gone, and close; after the answers to what
        came before."""
        self._tell(status, text)
        body = msgspec.json.encode({"error": text})
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{headers}Connection: close\r\n\r\n"
        )
        self._held = _NOTHING
        before = self._answered
        if before is None or before.response_complete or (self._stage == "body" and before is self.cycle):
            self._end(head.encode() + body)
        else:
            self._refusal = head.encode() + body
            self.flow.pause_reading()

    def _tell(self, status: int, why: str) -> None:
        """Like every other request that is refused, but these have no id."""
        if self.pace.allows(time.monotonic_ns()):
            unsaid = {"unsaid": self.pace.said()} if self.pace.unsaid else {}
            logs.tell(_LOG, logging.INFO, "request refused", status=status, why=why, **unsaid)

    def _end(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()
