"""One HTTP/1.1 connection, kept open, with one request at a time on it; and the pool of those that are idle.

No more than a load generator needs: requests are bytes made beforehand, and of an answer only status, path and size are
wanted. A library would take more of a small machine than the server that is measured.
"""

import asyncio
import re
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httptools
from msgspec import Struct

from dormouse.errors import ConfigurationFault
from dormouse.tls import trusted

_PATH = re.compile(rb'"dormouse_path":\s*"([a-z]+)"')
_IN_HEAD_BYTES = 4096
"""A V2 answer says its path before its tensors."""


class Answer(Struct):
    """What came back; ``path`` is empty where nothing says it."""

    status: int
    path: str
    body: bytes


class Gone(Exception):  # it says what happened
    """The connection ended before an answer did."""


class Connection(asyncio.Protocol):
    """Between ``ask`` and its answer it is busy."""

    def __init__(self) -> None:
        self.open = False
        self.used = 0
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Answer] | None = None
        self._keeps = False

    def ask(self, request: bytes, *, keeps_body: bool = False) -> "asyncio.Future[Answer]":
        """Send a request that is written out. The future may raise Gone."""
        assert self._transport is not None and self._waiting is None, "one request at a time"
        self._waiting = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._path, self._body, self._keeps = "", b"", keeps_body
        self.used += 1
        self._transport.write(request)
        return self._waiting

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------ asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are no subclasses of asyncio's.
        self._transport, self.open = cast("asyncio.Transport", transport), True

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:
            self.close()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Gone(str(exc) if exc else "the server closed the connection"))
        self._waiting = None

    # ------------------------------------------------------------------ httptools'

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-dormouse-path":
            self._path = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        if self._keeps or len(self._body) < _IN_HEAD_BYTES:
            self._body += body

    def on_message_complete(self) -> None:
        found = None if self._path else _PATH.search(self._body[:_IN_HEAD_BYTES])
        answer = Answer(
            self._parser.get_status_code(),
            found[1].decode() if found else self._path,
            self._body if self._keeps else b"",
        )
        waiting, self._waiting = self._waiting, None
        if not self._parser.should_keep_alive():
            self.close()
            self.open = False
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


class Address(Struct, frozen=True):
    """Where a server is."""

    host: str
    port: int
    tls: bool

    @property
    def authority(self) -> str:
        """As the Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def address_in(url: str) -> Address:
    """Raises ConfigurationFault."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as fault:
        raise ConfigurationFault(f"url = {url!r} is no address: {fault}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationFault(f"url = {url!r} is no address; expected one like http://127.0.0.1:8000")
    return Address(parts.hostname, port, parts.scheme == "https")


class Pool:
    """Connections to one server, at most so many; the one used last is used next. ``ca``: whom to trust, over TLS."""

    def __init__(self, address: Address, most: int, ca: Path | None = None) -> None:
        self._address = address
        self._tls = trusted(ca) if address.tls else None
        self._idle: list[Connection] = []
        self._room = asyncio.Semaphore(most)
        self.opened = 0

    async def take(self, *, fresh: bool = False) -> Connection:
        """An idle connection, or a new one; waits while there are too many. Raises OSError."""
        await self._room.acquire()
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.open:
                return connection
        try:
            _, made = await asyncio.get_running_loop().create_connection(
                Connection, self._address.host, self._address.port, ssl=self._tls
            )
        except BaseException:
            self._room.release()
            raise
        self.opened += 1
        return made

    def give_back(self, connection: Connection, *, sound: bool) -> None:
        """After its answer; one whose answer did not come is closed."""
        self._room.release()
        if sound and connection.open:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
