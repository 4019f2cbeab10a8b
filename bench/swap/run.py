"""How long a request waits for a model that sleeps in host memory, against what else one could do. See README.md.

In process, over the runner and a device: no server, no sockets. Weights are random, shapes are real.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
import transformers
from bench.swap.answers import Checks
from bench.swap.image import Image
from bench.swap.rivals import Rivals, rivals_of
from bench.swap.shapes import Shape, shapes
from bench.swap.turns import MIB, Bench, opened

from dormouse.core.types import Bytes


@dataclass(frozen=True)
class Row:
    """Milliseconds are medians. ``overlap``: how much of the shorter of copy and run was hidden behind the other."""

    model: str
    bytes: Bytes
    copy_ms: float
    resident_ms: float
    bare_graph_ms: float | None
    """A replay of the graph that the resident run replays, and nothing else; None where there are none."""
    copy_then_run_ms: float
    swap_run_ms: float
    rivals: Rivals
    overlap: float
    correct: bool
    exact: bool
    """No rounding between a graph and an ordinary run."""
    eager_because: str
    """Why there are no graphs."""


def measure(bench: Bench, repeats: int) -> Row:
    """Everything about one model, medians of ``repeats`` each; comparisons are within this run."""
    checks = Checks(bench)
    for runner in (bench.poisoned, bench.poisoned, bench.runner):
        checks.see(runner, bench.swap_run(runner)[1])
    # In turns, so that a slow moment of the machine falls on all of them alike.
    copies, pairs, swaps, bare = [], [], [], []
    for _ in range(repeats + 1):
        copies.append(bench.copy())
        pairs.append(bench.sequential_and_resident())
        bare.append(bench.bare_graph())
        for runner in (bench.rival, bench.runner):
            took_ms, answer = bench.swap_run(runner)
            swaps.append(took_ms)
            checks.see(runner, answer)
    copy_ms, swap_ms = median(copies[1:]), median(swaps[2:])
    sequential_ms, resident_ms = (median(pair[place] for pair in pairs[1:]) for place in (0, 1))
    bare_ms = [took for took in bare[1:] if took is not None]
    checks.see(bench.poisoned, bench.swap_run(bench.poisoned)[1])
    bench.clear()
    return Row(
        model=bench.image.shape.name,
        bytes=bench.image.index.image_bytes,
        copy_ms=copy_ms,
        resident_ms=resident_ms,
        bare_graph_ms=median(bare_ms) if bare_ms else None,
        copy_then_run_ms=sequential_ms,
        swap_run_ms=swap_ms,
        rivals=rivals_of(bench),
        overlap=(sequential_ms - swap_ms) / min(copy_ms, resident_ms),
        correct=checks.same and checks.close,
        exact=checks.same and checks.equal,
        eager_because=bench.runner.graphs[1],
    )


def bench_of(kind: str, shape: Shape, repeats: int, group_bytes: Bytes, graphs: bool) -> Row:
    with tempfile.TemporaryDirectory() as directory:
        image = Image(shape, Path(directory))
        link = tuned_link(image, group_bytes) if shape.tuned else None
        device, compute = opened(kind, image, link, graphs)
        row = measure(Bench(image, device, compute, group_bytes), repeats)
        device.close()
        image.close()
        return row


def tuned_link(image: Image, group_bytes: Bytes) -> int:
    """Bytes a second at which the copy takes as long as a forward pass."""
    device, compute = opened("cpu", image, None)
    bench = Bench(image, device, compute, group_bytes)
    took_ms = median([bench.sequential_and_resident()[1] for _ in range(5)])
    device.close()
    return round(image.index.image_bytes / took_ms * 1000)


def setting(kind: str) -> dict[str, object]:
    """Where and with what this was measured."""
    gpu = torch.cuda.get_device_name(0) if kind == "cuda" else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": kind,
        "gpu": gpu,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "weights": "random, of the shapes named",
    }


def print_table(rows: list[Row]) -> None:
    head = (
        "model",
        "MB",
        "copy",
        "bare",
        "resident",
        "copy+run",
        "swap+run",
        "naive",
        "overlap",
        "swap/copy",
        "correct",
    )
    print("{:40} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>7} {:>9} {}".format(*head))
    for row in rows:
        times = (
            row.copy_ms,
            row.bare_graph_ms,
            row.resident_ms,
            row.copy_then_run_ms,
            row.swap_run_ms,
            row.rivals.naive_ms,
        )
        said = " ".join("       -" if took is None else f"{took:8.2f}" for took in times)
        correct = "exact" if row.exact else "close" if row.correct else "NO"
        ratio = row.swap_run_ms / row.copy_ms
        print(f"{row.model:40} {row.bytes / 1e6:8.0f} {said} {row.overlap:7.2f} {ratio:9.3f} {correct}")
        if row.eager_because:
            print(f"    no graphs: {row.eager_because}")
        print(f"    times swap+run: {_compared(row)}")


def _compared(row: Row) -> str:
    others = {
        "from ordinary memory": row.rivals.naive_ms,
        "pinned": row.rivals.pinned_ms,
        "accelerate": row.rivals.hooks_ms,
        "torch_memory_saver": row.rivals.memory_saver_ms,
    }
    ratios = [f"{name} {took / row.swap_run_ms:.1f}" for name, took in others.items() if took is not None]
    return ", ".join([*ratios, *(f"{name} not measured: {why}" for name, why in row.rivals.not_measured.items())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write rows and setting here")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--group-mib", type=float, default=8)
    parser.add_argument("--graphs", choices=("auto", "off"), default="auto")
    parser.add_argument("--only", default="", help="models whose name contains this")
    asked = parser.parse_args()
    sys.setswitchinterval(0.0005)  # as an executor does
    if asked.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
    rows = []
    for shape in shapes(asked.device):
        if asked.only in shape.name:
            group_bytes = round(asked.group_mib * MIB)
            rows.append(bench_of(asked.device, shape, asked.repeats, group_bytes, asked.graphs == "auto"))
            print_table(rows[-1:])
    if asked.json:
        asked.json.write_text(json.dumps({**setting(asked.device), "rows": [asdict(row) for row in rows]}, indent=1))
    return 0 if all(row.correct for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
