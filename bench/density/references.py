"""What every function should answer, by plain PyTorch: the same weights, no server, nothing of Dormouse.

python -m bench.density.references DEVICE OUT.npz    (NAME=ARCHITECTURE:SEED on standard input, one a line)
"""

import sys
from pathlib import Path

import numpy as np
import torch
from bench.density.functions import fleet
from numpy.typing import NDArray


def reference(architecture: str, seed: int, device: torch.device) -> NDArray[np.float32]:
    """All outputs, one after another."""
    module, inputs = fleet.base(architecture, seed)
    module.to(device)
    with torch.inference_mode():
        result = module(**{name: value.to(device) for name, value in inputs.items()})
    tensors = [result] if isinstance(result, torch.Tensor) else list(result.values())
    joined: NDArray[np.float32] = torch.cat([tensor.float().cpu().reshape(-1) for tensor in tensors]).numpy()
    return joined


def main() -> None:
    device, out = torch.device(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(2)
    answers = {}
    for line in sys.stdin:
        name, _, made = line.strip().partition("=")
        architecture, _, seed = made.partition(":")
        answers[name] = reference(architecture, int(seed), device)
    np.savez(out, **answers)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
