"""The gRPC server: its port, its limits, its start and its end. Knows no call.

grpc.aio runs every call on the event loop it is made on, so calls may use Submit as HTTP's handlers do; only sockets
are read and written by threads of its own.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio

from dormouse.core.types import Bytes
from dormouse.errors import ConfigurationFault
from dormouse.gateway.grpc_gate import Services
from dormouse.gateway.observing import Observer
from dormouse.submit import Submit
from dormouse.tenants.gate import Gate, OpenGate

MOST_CALLS = 20_000
"""Open at once, streams included; more are refused with RESOURCE_EXHAUSTED. Beyond any queue of requests."""
MOST_CALLS_PER_CONNECTION = 4_096
"""A client that has more keeps them back."""
MOST_CONNECTIONS = 4_000
IDLE_MS = 300_000
"""A connection on which there has been no call for so long makes room; clients open another when they need one."""
METADATA_BYTES: Bytes = 16 * 1024
HANDSHAKE_MS = 20_000
"""A connection that has said nothing sensible by then is closed."""
PROBE_AFTER_MS = 60_000
PROBE_TIMEOUT_MS = 20_000
"""A connection on which nothing has come for a minute is asked for a sign of life, and closed if there is none."""
FEWEST_MS_BETWEEN_PINGS = 5_000
"""Clients that ping more often than that, without a call, are sent away."""


class GrpcServer:
    """A server on a port, from ``bind`` on; it accepts while it is ``serving``."""

    def __init__(
        self, body_limit_bytes: Bytes, most_calls: int = MOST_CALLS, most_connections: int = MOST_CONNECTIONS
    ) -> None:
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),  # two servers on one port would share its calls
                ("grpc.max_receive_message_length", body_limit_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", METADATA_BYTES),
                ("grpc.max_concurrent_streams", MOST_CALLS_PER_CONNECTION),
                ("grpc.max_allowed_incoming_connections", most_connections),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                # How many may come in at once before the event loop has looked at them: beyond, calls are dropped, as
                # what comes behind so many would wait for seconds.
                ("grpc.server.max_pending_requests", min(most_calls, MOST_CALLS_PER_CONNECTION)),
                ("grpc.server.max_pending_requests_hard_limit", 2 * min(most_calls, MOST_CALLS_PER_CONNECTION)),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.keepalive_time_ms", PROBE_AFTER_MS),
                ("grpc.keepalive_timeout_ms", PROBE_TIMEOUT_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", FEWEST_MS_BETWEEN_PINGS),
            ),
            maximum_concurrent_rpcs=most_calls,
        )
        self.address = ""
        """Host and port, once bound."""

    def bind(self, host: str, port: int, identity: tuple[bytes, bytes] | None = None) -> None:
        """Take a port, 0 meaning any free one; ``host`` is a number. ``identity``: private key and certificates in PEM,
        for TLS. Raises ConfigurationFault."""
        name = f"[{host}]" if ":" in host else host
        try:
            if identity is None:
                bound = self._server.add_insecure_port(f"{name}:{port}")
            else:
                bound = self._server.add_secure_port(f"{name}:{port}", grpc.ssl_server_credentials([identity]))
        except RuntimeError as fault:
            raise ConfigurationFault(f"cannot listen on {name} port {port} for gRPC: {fault}") from None
        self.address = f"{name}:{bound}"

    @contextlib.asynccontextmanager
    async def serving(
        self,
        submit: Submit,
        *,
        stop: asyncio.Event,
        hurry: asyncio.Event,
        grace_s: float,
        gate: Gate | None = None,
        observer: Observer | None = None,
    ) -> AsyncIterator[None]:
        """Inside, calls are answered. From ``stop`` on no new ones are taken, and those that are open have
        ``grace_s`` to end, or until ``hurry``; leaving waits for that. Without a gate everybody may do everything."""
        self._server.add_generic_rpc_handlers((Services(submit, gate or OpenGate(), observer or Observer()),))
        await self._server.start()
        ending = asyncio.create_task(self._end(stop, hurry, grace_s))
        try:
            yield
        finally:
            if not stop.is_set():  # not asked to end, but something failed
                ending.cancel()
                await self._server.stop(None)
            with contextlib.suppress(asyncio.CancelledError):
                await ending

    async def _end(self, stop: asyncio.Event, hurry: asyncio.Event, grace_s: float) -> None:
        await stop.wait()
        ended = asyncio.create_task(self._server.stop(grace_s))
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait((ended, hurried), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await self._server.stop(None)
        hurried.cancel()
        await ended
