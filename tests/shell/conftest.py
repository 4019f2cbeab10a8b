"""A real HTTP server on a free loopback port, in a thread of the test process."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.shell.in_memory import InMemory, furnished

from dormouse.gateway.app import create_app
from dormouse.serving import bind, serve_app

BODY_LIMIT_BYTES = 1024 * 1024


@dataclass
class RunningServer:
    url: str
    node: InMemory

    @property
    def address(self) -> str:
        """As clients want it that add the scheme themselves."""
        return self.url.removeprefix("http://")


@pytest.fixture
def server() -> Iterator[RunningServer]:
    node = furnished()
    started: concurrent.futures.Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = (
        concurrent.futures.Future()
    )

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        with bind("127.0.0.1", 0) as listener:
            app = create_app(node, body_limit_bytes=BODY_LIMIT_BYTES)
            await serve_app(
                app,
                listener,
                on_ready=lambda url: started.set_result((url, loop, stop)),
                stop=stop,
                hurry=asyncio.Event(),
            )

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    url, loop, stop = started.result(timeout=30)
    yield RunningServer(url, node)
    loop.call_soon_threadsafe(stop.set)
    thread.join()
