"""What every function should answer, by plain PyTorch: the same weights, no server, nothing of Dormouse.

python -m bench.density.references DEVICE OUT.npz    (NAME=ARCHITECTURE:SEED on standard input, one a line)
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from bench.density.functions import fleet
from numpy.typing import NDArray


def references(architecture: str, seeds: list[int], device: torch.device) -> Iterator[NDArray[np.float32]]:
    """All outputs for each seed, one after another. The module is made once and gets other weights each time."""
    module, inputs = fleet.base(architecture, 0)
    shapes = fleet.shapes_of(architecture)
    here = {name: value.to(device) for name, value in inputs.items()}
    for seed in seeds:
        fleet.put(module, fleet.filled(shapes, seed, device))
        with torch.inference_mode():
            result = module(**here)
        tensors = [result] if isinstance(result, torch.Tensor) else list(result.values())
        joined: NDArray[np.float32] = torch.cat([tensor.float().cpu().reshape(-1) for tensor in tensors]).numpy()
        yield joined


def main() -> None:
    device, out = torch.device(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(2)
    wanted: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for line in sys.stdin:
        name, _, made = line.strip().partition("=")
        architecture, _, seed = made.partition(":")
        wanted[architecture].append((name, int(seed)))
    answers: dict[str, NDArray[np.float32]] = {}
    for architecture, functions in wanted.items():
        made_of = references(architecture, [seed for _, seed in functions], device)
        answers.update(zip([name for name, _ in functions], made_of, strict=True))
    unfinished = out.with_name(f"unfinished-{out.name}")
    np.savez(unfinished, allow_pickle=False, **answers)
    unfinished.rename(out)


if __name__ == "__main__":
    main()
