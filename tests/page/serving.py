"""A real HTTP server around any node, in a thread of the test process; it can be started again at the same port."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from dormouse.gateway.app import create_app
from dormouse.serving import bind, run, serve_app
from dormouse.submit import Submit
from dormouse.tenants.gate import Gate

OpenNode = Callable[[], AbstractAsyncContextManager[Submit]]


@dataclass
class Served:
    url: str
    node: Submit
    loop: asyncio.AbstractEventLoop
    stopping: asyncio.Event

    def stop(self) -> None:
        """Ask it to; it has, when it has been left."""
        self.loop.call_soon_threadsafe(self.stopping.set)

    @property
    def page(self) -> str:
        return f"{self.url}/dormouse/"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


def ready(node: Submit) -> OpenNode:
    """For a node that needs no opening."""

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Submit]:
        yield node

    return opened


@contextlib.contextmanager
def served(open_node: OpenNode, gate: Gate | None = None, port: int = 0) -> Iterator[Served]:
    """Ready when entered, gone when left."""
    started: concurrent.futures.Future[Served] = concurrent.futures.Future()

    async def serve() -> None:
        stop = asyncio.Event()
        with bind("127.0.0.1", port) as listener:
            async with open_node() as node:
                loop = asyncio.get_running_loop()
                app = create_app(node, body_limit_bytes=1024 * 1024, gate=gate, ended=stop)
                await serve_app(
                    app,
                    listener,
                    on_ready=lambda url: started.set_result(Served(url, node, loop, stop)),
                    stop=stop,
                    hurry=asyncio.Event(),
                )

    def work() -> None:
        try:
            run(serve())
        except BaseException as fault:
            if started.done():
                raise
            started.set_exception(fault)

    thread = threading.Thread(target=work)
    thread.start()
    server = started.result(timeout=60)
    try:
        yield server
    finally:
        server.stop()
        thread.join()
