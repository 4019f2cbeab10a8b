"""A real node on the CPU device: calibrated function by function, then driven by an open loop; its journal tells."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from dormouse.config import MIB, Config
from dormouse.control.node import Node
from dormouse.core.types import Ns
from dormouse.functions import Manifest, SloManifest
from dormouse.submit import Inference
from dormouse.tensors import Tensor

MODELS = Path(__file__).parent / "models"
LAYERS = (2, 4, 6, 8, 12, 16)
ROUNDS, IN_A_ROW = 3, 6
GIVEN = Tensor("x", "FP32", (1, 64), bytes(64 * 4))
LIMIT_NS: Ns = 60_000_000_000


def config(directory: Path, functions: int, link_bytes_per_s: int) -> Config:
    """Device memory for half of the functions; host memory for all of them."""
    total = sum(LAYERS[number % len(LAYERS)] + 1 for number in range(functions)) * MIB
    return Config(
        state_dir=directory / "state",
        device="cpu",
        device_bytes=total // 2,
        chunk_bytes=MIB,
        group_bytes=MIB,
        link_bytes_per_s=link_bytes_per_s,
        host_bytes=4 * total,
        allow_code=(MODELS,),
        threads=1,
        journal=directory / "journal",
    )


def manifest(number: int) -> Manifest:
    return Manifest(
        name=f"f{number}",
        source="stacks:stack",
        code=str(MODELS),
        arguments={"seed": number, "layers": LAYERS[number % len(LAYERS)]},
        slo=SloManifest(deadline_ms=5000),
    )


async def _ask(node: Node, number: int) -> None:
    async for _ in node.infer(Inference(f"f{number}", (GIVEN,), timeout_ns=LIMIT_NS)):
        pass


async def _calibrate(node: Node, functions: int, pause_s: float) -> None:
    """Every function by itself: swapped in, then several times resident; often enough for a median. With pauses as long
    as those of the load: a request that comes right after another finds caches warm and cores awake."""
    for _ in range(ROUNDS):
        for number in range(functions):
            for _ in range(IN_A_ROW):
                await asyncio.sleep(pause_s)
                await _ask(node, number)


async def _drive(node: Node, arrivals: Sequence[tuple[Ns, int]]) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with asyncio.TaskGroup() as asked:
        for at_ns, number in arrivals:
            await asyncio.sleep(max(0.0, began_s + at_ns / 1e9 - loop.time()))
            asked.create_task(_ask(node, number))


async def serve(settings: Config, functions: int, arrivals: Sequence[tuple[Ns, int]]) -> int:
    """Requests of one calibration. There is one before and one after the load: a shared machine changes."""
    async with Node.open(settings) as node:
        for number in range(functions):
            await node.deploy(manifest(number))
        pause_s = arrivals[-1][0] / len(arrivals) / 1e9
        await _calibrate(node, functions, pause_s)
        await _drive(node, arrivals)
        await _calibrate(node, functions, pause_s)
    return ROUNDS * functions * IN_A_ROW
