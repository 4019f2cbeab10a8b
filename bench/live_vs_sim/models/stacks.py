"""Networks of any size that compute little: square layers, one after another, a MiB each."""

import torch
from torch import nn

WIDTH = 64
SIDE = 512


class Stack(nn.Module):
    def __init__(self, seed: int, layers: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.enter = nn.Parameter(torch.randn(WIDTH, SIDE, generator=draw), requires_grad=False)
        self.layers = nn.ParameterList(
            nn.Parameter(torch.randn(SIDE, SIDE, generator=draw), requires_grad=False) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.enter
        for layer in self.layers:
            x = torch.tanh(x @ layer / 20)
        return x


def stack(seed: int, layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """``layers`` MiB of weights."""
    return Stack(seed, layers), {"x": torch.zeros(1, WIDTH)}
