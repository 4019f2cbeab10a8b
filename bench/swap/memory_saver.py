"""torch_memory_saver: a model's memory is paused, with a copy in host memory, and resumed at the same addresses.

python -m bench.swap.memory_saver MODEL REPEATS        medians, as JSON, for ``rivals``
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
import torch_memory_saver
from bench.swap.image import Image
from bench.swap.shapes import shapes
from bench.swap.turns import clock

from dormouse.model.profiling import run


def measured(model: str, repeats: int) -> dict[str, float]:
    saver, device = torch_memory_saver.torch_memory_saver, torch.device("cuda", 0)
    shape = next(shape for shape in shapes("cuda") if shape.name == model)
    with tempfile.TemporaryDirectory() as directory:
        image = Image(shape, Path(directory))
        with saver.region(enable_cpu_backup=True):
            module = image.plain(device)
        inputs = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in shape.inputs.items()
        }
        expected = run(module, inputs)
        both, alone = [], []
        for _ in range(repeats + 1):
            saver.pause()
            with clock() as whole:
                with clock() as part:
                    saver.resume()
                    torch.cuda.synchronize()
                answer = run(module, inputs)
                torch.cuda.synchronize()
            both.append(whole.ms)
            alone.append(part.ms)
        for name, value in expected.items():
            now = answer[name]
            assert isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor), name
            assert torch.equal(now, value), f"{name} is another after a resume"
    return {"resumed_and_run_ms": median(both[1:]), "resumed_ms": median(alone[1:])}


def main() -> None:
    if "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
        with torch_memory_saver.configure_subprocess():
            os.execv(sys.executable, [sys.executable, "-m", "bench.swap.memory_saver", *sys.argv[1:]])
    print(json.dumps(measured(sys.argv[1], int(sys.argv[2]))))


if __name__ == "__main__":
    main()
