"""Accepts connections at HTTP's door, each counted from then on: its TLS handshake is its own first stage, and ends in
time or with the connection. Knows nothing of what is said on one.

Where there are no more files those that have rested longest go, and the door is closed for a moment; the event
loop's own servers would end there.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable, Collection

from dormouse import logs
from dormouse.connections import Connection, drop_longest_resting

BACKLOG = 2_048
AT_ONCE = 64
"""Accepted before others of the event loop have their turn."""
AGAIN_S = 0.1
"""After which it is tried again where there were no more files."""
ROOM = 16
"""Connections that go then."""
GOODBYE_S = 5.0
"""How long a client may take to agree that TLS has ended."""
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_LOG = logging.getLogger("dormouse.connections")


class Door:
    """A listening socket, from ``open`` to ``close``."""

    def __init__(
        self,
        listener: socket.socket,
        connection: Callable[[], Connection],
        connections: Collection[object],
        context: ssl.SSLContext | None,
        handshake_s: float,
    ) -> None:
        self._listener = listener
        self._connection = connection
        self._connections = connections
        self._context = context
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._pace = logs.Pace(1)

    def open(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._watch()

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listener)
        if self._again is not None:
            self._again.cancel()

    def _watch(self) -> None:
        self._again = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as fault:  # the client has gone again, or there are no files for it
                if fault.errno in _NO_FILES:
                    self._pause(fault)
                return
            accepted.setblocking(False)
            connection = self._connection()
            connection.arrive(accepted)
            opening = self._loop.create_task(self._open(connection, accepted))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, connection: Connection, accepted: socket.socket) -> None:
        """Up to the end of the handshake, however that ends."""
        try:
            with contextlib.suppress(OSError):  # also what is no TLS, and a handshake that took too long
                await self._loop.connect_accepted_socket(
                    lambda: connection,
                    accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=self._handshake_s if self._context else None,
                    ssl_shutdown_timeout=GOODBYE_S if self._context else None,
                )
        finally:
            connection.has_arrived()

    def _pause(self, fault: OSError) -> None:
        if self._pace.allows(time.monotonic_ns()):
            _LOG.warning("no connection can be accepted for a moment: %s", fault.strerror)
        self._loop.remove_reader(self._listener)
        drop_longest_resting(self._connections, ROOM)
        self._again = self._loop.call_later(AGAIN_S, self._watch)
