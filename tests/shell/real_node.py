"""A real node on the CPU device behind a real HTTP server, in a thread of the test process."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dormouse.config import GIB, MIB, Config
from dormouse.control.node import Node
from dormouse.functions import Manifest
from dormouse.gateway.app import create_app
from dormouse.gateway.with_tasks import WithTasks
from dormouse.serving import bind, run, serve_app

LIMIT_S = 120


@dataclass
class RealNode:
    url: str
    node: Node
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event

    def deploy(self, manifest: Manifest) -> str:
        """The new version."""
        return asyncio.run_coroutine_threadsafe(self.node.deploy(manifest), self.loop).result(LIMIT_S)


@contextlib.contextmanager
def real_node(state_dir: Path, *allow_code: Path) -> Iterator[RealNode]:
    """Room for a few small models; what is in ``state_dir`` is found again."""
    config = Config(
        state_dir=state_dir,
        device="cpu",
        device_bytes=256 * MIB,
        host_bytes=GIB,
        request_slab_bytes=64 * MIB,
        allow_code=allow_code,
        threads=1,
    )
    started: concurrent.futures.Future[RealNode] = concurrent.futures.Future()

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        with bind("127.0.0.1", 0) as listener:
            async with Node.open(msgspec.structs.replace(config)) as node, WithTasks(node) as served:

                def tell(url: str) -> None:
                    started.set_result(RealNode(url, node, loop, stop))

                app = create_app(served, body_limit_bytes=config.body_limit_bytes)
                await serve_app(app, listener, on_ready=tell, stop=stop, hurry=asyncio.Event())

    def work() -> None:
        try:
            run(serve())
        except BaseException as fault:
            started.set_exception(fault)
            raise

    thread = threading.Thread(target=work)
    thread.start()
    found = started.result(timeout=LIMIT_S)
    try:
        yield found
    finally:
        found.loop.call_soon_threadsafe(found.stop.set)
        thread.join()
