"""A model that takes some milliseconds of one core."""

import torch
from torch import nn


class Work(nn.Module):
    """Many small products, one after the other."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def work() -> tuple[nn.Module, torch.Tensor]:
    """Some 96 MB that are read from memory once for each answer, and some ten milliseconds."""
    torch.manual_seed(1)
    return Work(96, 512), torch.zeros(8, 512)
