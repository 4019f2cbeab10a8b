"""A real server, HTTP and gRPC on free loopback ports, in a thread of the test process."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from dormouse.connections import Patience
from dormouse.gateway.app import create_app
from dormouse.gateway.grpc_server import GrpcServer
from dormouse.gateway.observing import Observer
from dormouse.gateway.with_tasks import WithTasks
from dormouse.serving import GRACE_S, PATIENT, bind, run, serve_app
from dormouse.tenants.gate import Gate
from dormouse.tls import Identity
from tests.shell.in_memory import InMemory, furnished

BODY_LIMIT_BYTES = 1024 * 1024


@dataclass
class RunningServer:
    url: str
    grpc: str
    """Host and port of its gRPC door."""
    node: InMemory
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event

    @property
    def address(self) -> str:
        """As clients want it that add the scheme themselves."""
        return self.url.removeprefix("http://")


@contextlib.contextmanager
def running(
    gate: Gate | None = None,
    patience: Patience = PATIENT,
    identity: Identity | None = None,
    observer: Observer | None = None,
) -> Iterator[RunningServer]:
    """A server around a furnished node, ready when entered, gone when left."""
    node = furnished()
    started: concurrent.futures.Future[RunningServer] = concurrent.futures.Future()

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        grpc = GrpcServer(BODY_LIMIT_BYTES)
        grpc.bind("127.0.0.1", 0, None if identity is None else (identity.key, identity.certificates))
        hurry = asyncio.Event()

        def tell(url: str) -> None:
            started.set_result(RunningServer(url, grpc.address, node, loop, stop))

        with bind("127.0.0.1", 0) as listener:
            async with WithTasks(node) as served:
                app = create_app(served, body_limit_bytes=BODY_LIMIT_BYTES, gate=gate, observer=observer)
                async with grpc.serving(served, stop=stop, hurry=hurry, grace_s=GRACE_S, gate=gate, observer=observer):
                    await serve_app(
                        app, listener, on_ready=tell, stop=stop, hurry=hurry, patience=patience, identity=identity
                    )

    thread = threading.Thread(target=run, args=(serve(),))
    thread.start()
    server = started.result(timeout=30)
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(server.stop.set)
        thread.join()
