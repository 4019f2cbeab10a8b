"""The functions of the density bench: architectures by name, and weights for each of them from a seed.

Imported by servers, from an allowed directory, and by whoever computes what the answers should be. A base function is
a module; every other function of its architecture is tensors only. Weights are one block of random numbers, begun at
another place for every tensor and seed, scaled so that what a network computes stays of its size: so answers are
finite, depend on all weights, and have nothing in common from one seed to the next.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

Inputs = dict[str, torch.Tensor]
CPU = torch.device("cpu")

_BLOCK = 1 << 22
_DAMPED = "bn3.weight"
"""The last norm of a residual block: 50 blocks that each add their full size would double it 50 times."""


@dataclass(frozen=True)
class Architecture:
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    deadline_ms: float = 80


def picture(side: int = 224) -> Inputs:
    return {"x": torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))}


def tokens(count: int = 512, vocabulary: int = 30522) -> Inputs:
    return {"input_ids": (torch.arange(count).reshape(1, count) * 7 + 5) % vocabulary}


def row(width: int = 256) -> Inputs:
    return {"x": torch.randn(1, width, generator=torch.Generator().manual_seed(0))}


def _torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision  # not needed for small networks

        module: nn.Module = getattr(torchvision.models, name)(weights=None, **options)
        return module

    return make


def _bert_qa() -> nn.Module:
    import transformers  # not needed for small networks

    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    module: nn.Module = transformers.BertForQuestionAnswering(config)
    return module


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = x + self.bn3(self.conv(x)).relu()
        return added


class _Pictures(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(_Residual(width) for _ in range(depth)))
        self.leave = nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.leave(self.blocks(self.enter(x)).mean((2, 3)))
        return scores


class _Rows(nn.Module):
    def __init__(self, width: int, hidden: int, depth: int) -> None:
        super().__init__()
        sizes = [width, *[hidden] * depth]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


PAPER = {
    "resnet50": Architecture(_torchvision("resnet50"), picture),
    "resnet101": Architecture(_torchvision("resnet101"), picture),
    "resnet152": Architecture(_torchvision("resnet152"), picture),
    "densenet169": Architecture(_torchvision("densenet169"), picture),
    "densenet201": Architecture(_torchvision("densenet201"), picture),
    "inception_v3": Architecture(_torchvision("inception_v3", aux_logits=False, init_weights=False), picture),
    "efficientnet_b0": Architecture(_torchvision("efficientnet_b0"), picture),
    "bert_large_qa": Architecture(_bert_qa, tokens, deadline_ms=200),
}
"""The mix of the paper, in its order."""
SMALL = {
    "pictures": Architecture(lambda: _Pictures(64, 12), lambda: picture(32)),
    "rows": Architecture(lambda: _Rows(256, 512, 4), row),
    "wide_rows": Architecture(lambda: _Rows(256, 1024, 3), row),
}
"""Of a few megabytes, for machines without a GPU."""
MIXES = {"paper": PAPER, "small": SMALL, "resnet152": {"resnet152": PAPER["resnet152"]}}
ARCHITECTURES = PAPER | SMALL


def base(architecture: str, seed: int) -> tuple[nn.Module, Inputs]:
    """The module with the weights of that seed, and an example input."""
    module = _bare(architecture)
    put(module, filled(shapes_of(architecture), seed))
    return module.eval(), ARCHITECTURES[architecture].inputs()


def put(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        place, _, leaf = name.rpartition(".")
        owner = module.get_submodule(place)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[leaf] = tensor


Shapes = dict[str, tuple[str, list[int]]]
"""Type and shape of every parameter and buffer by name."""


def shapes_of(architecture: str) -> Shapes:
    module = _bare(architecture)
    kept = [*module.named_parameters(), *module.named_buffers()]
    return {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in kept}


def weights(shapes: str, seed: int) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by name; ``shapes`` is a file of them, so that no library of models is needed."""
    return filled(json.loads(Path(shapes).read_text()), seed)


def filled(shapes: Shapes, seed: int, device: torch.device = CPU) -> dict[str, torch.Tensor]:
    """The same numbers on every device."""
    tensors = {}
    for place, (name, (dtype, shape)) in enumerate(shapes.items()):
        noise = _noise(prod(shape), (seed * 7_368_787 + place * 104_729) % _BLOCK, device)
        tensors[name] = _scaled(name, noise.reshape(shape), getattr(torch, dtype))
    return tensors


def _bare(architecture: str) -> nn.Module:
    with torch.device("meta"):
        return ARCHITECTURES[architecture].make()


@cache
def _block(device: torch.device) -> torch.Tensor:
    return torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).to(device)


def _scaled(name: str, noise: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point:
        counted = torch.arange(noise.numel()) if name.endswith("position_ids") else torch.zeros(noise.numel())
        return counted.reshape(noise.shape).to(noise.device, dtype)
    if noise.dim() > 1:
        return noise.mul_((2 / (noise.numel() / noise.shape[0])) ** 0.5)
    if name.endswith("running_var"):
        return noise.zero_().add_(1)
    noise.mul_(0.1)
    if name.endswith(("bias", "running_mean")):
        return noise
    return noise.add_(1).mul_(0.3 if name.endswith(_DAMPED) else 1)


def _noise(count: int, start: int, device: torch.device) -> torch.Tensor:
    block, noise, done = _block(device), torch.empty(count, device=device), 0
    while done < count:
        taken = min(_BLOCK - start, count - done)
        noise[done : done + taken] = block[start : start + taken]
        done, start = done + taken, 0
    return noise
