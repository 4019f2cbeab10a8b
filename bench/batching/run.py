"""What batching is worth: many callers of one small model, requests run one by one or up to so many together.

    python bench/batching/run.py [--json FILE] [--seconds 5] [--callers 32]

A whole node behind the Submit seam on the CPU device, its model resident. Every caller sends a request of one row,
waits for the answer, checks it, and sends the next.
"""

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from dormouse.config import MIB, Config
from dormouse.control.node import Node
from dormouse.functions import BatchManifest, Manifest
from dormouse.submit import Inference
from dormouse.tensors import Tensor

MODELS = Path(__file__).parent / "models"
TOKENS = 32
ROWS = (1, 4, 8, 16)
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Row:
    batch_rows: int
    requests_per_s: float
    p50_ms: float
    p98_ms: float


def ids_of(caller: int) -> Tensor:
    ids = np.random.default_rng(caller).integers(0, 1000, (1, TOKENS))
    return Tensor("ids", "INT64", ids.shape, ids.tobytes())


async def ask(node: Node, name: str, given: Tensor) -> np.ndarray:
    chunks = [chunk async for chunk in node.infer(Inference(name, (given,)))]
    return np.frombuffer(chunks[-1].outputs[0].data, np.float32)


async def measure(node: Node, name: str, rows: int, expected: list[np.ndarray], seconds: float) -> Row:
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def caller(number: int) -> None:
        given = ids_of(number)
        while time.perf_counter() < end:
            began = time.perf_counter()
            answer = await ask(node, name, given)
            latencies.append(time.perf_counter() - began)
            assert np.allclose(answer, expected[number], rtol=TOLERANCE, atol=TOLERANCE), f"caller {number}"

    began = time.perf_counter()
    await asyncio.gather(*(caller(number) for number in range(len(expected))))
    elapsed = time.perf_counter() - began
    p50, p98 = np.percentile(latencies, [50, 98]) * 1000
    return Row(rows, round(len(latencies) / elapsed, 1), round(float(p50), 2), round(float(p98), 2))


async def measured(state_dir: Path, callers: int, seconds: float) -> list[Row]:
    config = Config(
        state_dir=state_dir,
        device="cpu",
        device_bytes=128 * MIB,
        host_bytes=256 * MIB,
        allow_code=(MODELS,),
        threads=1,
    )
    result = []
    async with Node.open(config) as node:
        for rows in ROWS:
            batch = BatchManifest(rows)
            await node.deploy(Manifest(f"rows{rows}", "encoders:encoder", code=str(MODELS), batch=batch))
        expected = [await ask(node, "rows1", ids_of(caller)) for caller in range(callers)]
        for rows in ROWS:
            await measure(node, f"rows{rows}", rows, expected, seconds / 5)  # warm
            result.append(await measure(node, f"rows{rows}", rows, expected, seconds))
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--json", type=Path)
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--callers", type=int, default=32)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as state_dir:
        rows = asyncio.run(measured(Path(state_dir), chosen.callers, chosen.seconds))
    print(f"{'rows':>5} {'requests/s':>11} {'P50 ms':>8} {'P98 ms':>8}")
    for row in rows:
        print(f"{row.batch_rows:>5} {row.requests_per_s:>11} {row.p50_ms:>8} {row.p98_ms:>8}")
    if chosen.json:
        about = {
            "date": datetime.now(UTC).isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "callers": chosen.callers,
        }
        text = json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1)
        chosen.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
