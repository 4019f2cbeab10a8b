"""Puts a server together: settings, node, HTTP application, gRPC, sockets; and takes it apart again on a signal.

Decides nothing. Signals are handled here and not by uvicorn, which would raise them again as soon as HTTP has ended
and so kill the process before the node has closed.
"""

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
import uvloop
from msgspec import Struct
from starlette.types import ASGIApp

from dormouse.accepting import Door
from dormouse.config import GRPC_PORT, NO_GRPC, Config
from dormouse.connections import Patience, connection_class, within_files
from dormouse.errors import ConfigurationFault
from dormouse.gateway.app import create_app
from dormouse.gateway.observing import Observer
from dormouse.gateway.tracing import Tracing
from dormouse.gateway.tracing import begin as begin_tracing
from dormouse.gateway.with_tasks import WithTasks
from dormouse.submit import Submit
from dormouse.tenants.opening import gate_of
from dormouse.tls import Identity, identity

if TYPE_CHECKING:
    from dormouse.gateway.grpc_server import GrpcServer

GRACE_S = 10
"""How long requests in flight may take to end after a stop is asked for."""
KEEP_ALIVE_S = 75
"""Longer than client pools keep idle connections, so that it is the client who closes."""

PATIENT = Patience()

OpenNode = Callable[[Config], AbstractAsyncContextManager[Submit]]


def run(work: Coroutine[None, None, None]) -> None:
    """Run ``serve`` on the event loop it is made for."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def open_node(config: Config) -> AbstractAsyncContextManager[Submit]:
    """The real node. Imported late: it starts processes and is not needed to build an application."""
    node: AbstractAsyncContextManager[Submit] = importlib.import_module("dormouse.control.node").Node.open(config)
    return node


class Doors(Struct, frozen=True):
    """Where a server listens: a URL, and host and port for gRPC, if it has that."""

    http: str
    grpc: str | None


async def serve(config: Config, *, on_ready: Callable[[Doors], None], open_node: OpenNode = open_node) -> None:
    """Serve until SIGINT or SIGTERM; a second one does not wait for requests in flight. Main thread only.

    ``on_ready`` gets the addresses once connections are accepted. Raises ConfigurationFault if one cannot be bound.
    """
    known = None if config.tls_cert is None or config.tls_key is None else identity(config.tls_cert, config.tls_key)
    with bind(config.host, config.port) as listener:
        address = listener.getsockname()[0]
        gate = gate_of(config.state_dir, config.tenants, os.environ, required=config.auth, address=address)
        connections = within_files(config.connections)
        grpc = _bind_grpc(config, listener, known, connections)
        async with (
            _signalled() as (stop, hurry),
            open_node(config) as bare,
            WithTasks(bare, config.image_pixels) as node,
        ):
            tracing = begin_tracing(os.environ)
            observer = _observer(config, tracing)
            limit_bytes = config.body_limit_bytes
            app = create_app(node, body_limit_bytes=limit_bytes, gate=gate, ended=stop, observer=observer)
            grpc_address = None if grpc is None else grpc.address
            async with contextlib.AsyncExitStack() as doors:
                if tracing is not None:
                    doors.push_async_callback(asyncio.to_thread, tracing.close)
                if grpc is not None:
                    answering = grpc.serving(
                        node, stop=stop, hurry=hurry, grace_s=GRACE_S, gate=gate, observer=observer
                    )
                    await doors.enter_async_context(answering)
                ready = partial(_tell, on_ready, grpc_address)
                patience = Patience(config.head_timeout_s, config.body_timeout_s, connections)
                await serve_app(
                    app, listener, on_ready=ready, stop=stop, hurry=hurry, patience=patience, identity=known
                )


def _observer(config: Config, tracing: Tracing | None) -> Observer:
    record = None if tracing is None else tracing.record
    return Observer(slow_ns=round(config.log_slow_ms * 1e6), log_all=config.log_requests, record=record)


def _tell(on_ready: Callable[[Doors], None], grpc: str | None, http: str) -> None:
    on_ready(Doors(http, grpc))


@contextlib.asynccontextmanager
async def _signalled() -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
    """Inside, a first signal sets the first event, and a second one the other."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: hurry.set() if stop.is_set() else stop.set())
    try:
        yield stop, hurry
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _bind_grpc(
    config: Config, listener: socket.socket, known: Identity | None, connections: int
) -> "GrpcServer | None":
    """The gRPC server, beside HTTP's listener. Raises ConfigurationFault."""
    if config.grpc_port == NO_GRPC:
        return None
    # Its handlers for forks serve children that go on calling gRPC. Ours are other programs, and the handlers complain.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it writes a line for every handshake that fails
    from dormouse.gateway.grpc_server import GrpcServer  # takes a fifth of a second, and not everybody wants it

    usual = GRPC_PORT if config.port else 0
    port = usual if config.grpc_port is None else config.grpc_port
    host = listener.getsockname()[0]
    if port:
        bind(host, port, "--grpc-port").close()  # which says why, if it cannot be had; gRPC would not
    server = GrpcServer(config.body_limit_bytes, most_connections=connections)
    server.bind(host, port, None if known is None else (known.key, known.certificates))
    return server


async def serve_app(
    app: ASGIApp,
    listener: socket.socket,
    *,
    on_ready: Callable[[str], None],
    stop: asyncio.Event,
    hurry: asyncio.Event,
    patience: Patience = PATIENT,
    identity: Identity | None = None,
) -> None:
    """Serve an application on a bound socket until ``stop``; with ``hurry``, without waiting for open requests. With
    an identity, over TLS."""
    settings = uvicorn.Config(
        app,
        loop="none",
        http=connection_class(patience),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    context = None if identity is None else identity.context
    scheme = "http" if identity is None else "https"
    server = _Server(settings, patience, context, lambda: on_ready(address_of(listener, scheme)))
    watches = [asyncio.create_task(server.exit_on(stop)), asyncio.create_task(server.hurry_on(hurry))]
    try:
        await server.serve(sockets=[listener])
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket bound to the address, port 0 meaning any free one. Raises ConfigurationFault."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as fault:
        why = fault.strerror if isinstance(fault, OSError) else "it is no name of a host"
        raise ConfigurationFault(f"host = {host!r} cannot be used: {why}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as fault:
        listener.close()
        raise ConfigurationFault(
            f"cannot listen on {host} port {port}: {fault.strerror}; choose another with {option} (0: any free one)"
        ) from None
    return listener


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """The URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn, which accepts at a door of ours, says when it has started and leaves signals alone."""

    def __init__(
        self,
        config: uvicorn.Config,
        patience: Patience,
        context: ssl.SSLContext | None,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._patience = patience
        self._context = context
        self._on_started = on_started
        self._doors: list[Door] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers = []
        kind = connection_class(self._patience)
        connection = partial(kind, self.config, self.server_state, self.lifespan.state)
        for listener in sockets or ():
            door = Door(
                listener, connection, self.server_state.connections, self._context, handshake_s=self._patience.head_s
            )
            door.open()
            self._doors.append(door)
        self.started = True
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for door in self._doors:
            door.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def exit_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.should_exit = True

    async def hurry_on(self, hurry: asyncio.Event) -> None:
        await hurry.wait()
        self.force_exit = True
