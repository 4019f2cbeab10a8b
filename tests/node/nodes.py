"""A real node for tests: CPU device, small memory, models of the zoo; and what its answers should be."""

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from dormouse.config import MIB, Config
from dormouse.control.node import Node
from dormouse.control.payloads import Outputs
from dormouse.core.messages import Event
from dormouse.functions import Manifest, SloManifest
from dormouse.submit import Chunk, Inference
from dormouse.tensors import Tensor
from tests.node.zoo import zoo

ZOO = Path(zoo.__file__).parent

R = TypeVar("R")
Told = TypeVar("Told")


def run(work: Coroutine[Any, Any, R], limit_s: float = 90) -> R:
    """Run a test's coroutine; what hangs is a failure."""

    async def limited() -> R:
        async with asyncio.timeout(limit_s):
            return await work

    return asyncio.run(limited())


def small(state_dir: Path, **changes: Any) -> Config:
    """12 MiB of device memory in 1 MiB chunks, poisoned between functions; 64 MiB of host memory."""
    config = Config(
        state_dir=state_dir,
        device="cpu",
        device_bytes=12 * MIB,
        chunk_bytes=MIB,
        group_bytes=MIB,
        host_bytes=64 * MIB,
        request_slab_bytes=4 * MIB,
        reply_slab_bytes=4 * MIB,
        allow_code=(ZOO,),
        threads=1,
        poison=True,
    )
    return msgspec.structs.replace(config, **changes)


@asynccontextmanager
async def opened(config: Config) -> AsyncIterator[Node]:
    async with Node.open(config) as node:
        yield node


def manifest(name: str, callable_name: str, **arguments: Any) -> Manifest:
    """A function of the zoo; ``arguments`` are the callable's."""
    return Manifest(
        name=name,
        source=f"zoo:{callable_name}",
        code=str(ZOO),
        arguments=arguments,
        slo=SloManifest(deadline_ms=5000),
    )


def tensor(values: Any, name: str = "x") -> Tensor:
    array = np.asarray(values, dtype=np.float32)
    return Tensor(name, "FP32", array.shape, array.tobytes())


def inputs(seed: int) -> Tensor:
    """A row of numbers, the first of them negative (a gate stays open)."""
    row = torch.randn(1, zoo.WIDTH, generator=torch.Generator().manual_seed(seed))
    row[0, 0] = -abs(row[0, 0])
    return tensor(row.numpy())


def closed_gate() -> Tensor:
    return tensor(np.ones((1, zoo.WIDTH)))


def array_of(output: Tensor) -> "np.ndarray[Any, Any]":
    kind = {"FP32": np.float32, "INT64": np.int64}[output.datatype]
    return np.frombuffer(output.data, dtype=kind).reshape(output.shape)


def expected(module: torch.nn.Module, given: Tensor) -> "np.ndarray[Any, Any]":
    with torch.inference_mode():
        answer = module(torch.from_numpy(array_of(given).copy()))
    result: np.ndarray[Any, Any] = answer.numpy()
    return result


def assert_close(answered: "np.ndarray[Any, Any]", reference: "np.ndarray[Any, Any]") -> None:
    """Equal but for the order of sums, which depends on the number of threads."""
    np.testing.assert_allclose(answered, reference, rtol=1e-3, atol=1e-4)


async def ask(node: Node, name: str, given: Tensor, **options: Any) -> Chunk:
    """One request; its last chunk."""
    chunks = [chunk async for chunk in node.infer(Inference(name, (given,), **options))]
    return chunks[-1]


async def answer(node: Node, name: str, given: Tensor, **options: Any) -> "np.ndarray[Any, Any]":
    return array_of((await ask(node, name, given, **options)).outputs[0])


class Gate:
    """The two named pipes of a ``gated`` model."""

    def __init__(self, directory: Path) -> None:
        self.begun, self.go_on = directory / "begun", directory / "go_on"
        for pipe in (self.begun, self.go_on):
            os.mkfifo(pipe)

    @property
    def arguments(self) -> dict[str, str]:
        return {"begun": str(self.begun), "go_on": str(self.go_on)}

    async def wait_until_begun(self) -> None:
        """A forward pass (or an import) stands at the gate."""
        assert await asyncio.to_thread(self.begun.read_text) == "begun"

    async def open(self) -> None:
        """Let it pass."""
        await asyncio.to_thread(self.go_on.write_text, "go on")


@contextmanager
def full_disk(leaving_bytes: int = 0) -> Iterator[None]:
    """Inside, this process can make no file longer than that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (leaving_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def pid_of(node: Node) -> int:
    pid: int = node.node()["executors"][0]["pid"]
    return pid


def row_of(node: Node, name: str) -> dict[str, Any]:
    return next(row for row in node.functions() if row["name"] == name)


class Events:
    """What the core is told, from now on."""

    def __init__(self, node: Node) -> None:
        self._told: asyncio.Queue[Event] = asyncio.Queue()
        handle = node._controller._handle

        def watched(event: Event, outputs: Outputs) -> None:
            handle(event, outputs)
            self._told.put_nowait(event)

        node._controller._handle = watched  # type: ignore[method-assign]

    async def until(self, kind: type[Told]) -> Told:
        """The next event of a kind, when it has been handled."""
        while True:
            event = await self._told.get()
            if isinstance(event, kind):
                return event
