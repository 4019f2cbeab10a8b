"""A real HTTP server on a free loopback port, in a thread of the test process."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from dormouse.gateway.app import create_app
from dormouse.serving import bind, run, serve_app
from tests.shell.in_memory import InMemory, furnished

BODY_LIMIT_BYTES = 1024 * 1024


@dataclass
class RunningServer:
    url: str
    node: InMemory
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event

    @property
    def address(self) -> str:
        """As clients want it that add the scheme themselves."""
        return self.url.removeprefix("http://")


@contextlib.contextmanager
def running() -> Iterator[RunningServer]:
    """A server around a furnished node, ready when entered, gone when left."""
    node = furnished()
    started: concurrent.futures.Future[RunningServer] = concurrent.futures.Future()

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        app = create_app(node, body_limit_bytes=BODY_LIMIT_BYTES)
        with bind("127.0.0.1", 0) as listener:
            await serve_app(
                app,
                listener,
                on_ready=lambda url: started.set_result(RunningServer(url, node, loop, stop)),
                stop=stop,
                hurry=asyncio.Event(),
            )

    thread = threading.Thread(target=run, args=(serve(),))
    thread.start()
    server = started.result(timeout=30)
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(server.stop.set)
        thread.join()
