"""Small models that a node under test is asked to serve. Imported by executors, from an allowed directory."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

WIDTH = 64


def _weights(seed: int, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), requires_grad=False)


class Stack(nn.Module):
    """Square layers, one after another; ``mib`` MiB of weights together, different for each seed."""

    def __init__(self, seed: int, mib: int) -> None:
        super().__init__()
        side = 512
        self.layers = nn.ParameterList([_weights(seed * 1000 + n, side, side) for n in range(mib)])
        self.enter = _weights(seed * 1000 + 998, WIDTH, side)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.enter
        for layer in self.layers:
            x = torch.tanh(x @ layer / 20)
        return x


def stack(seed: int, mib: int = 4) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Stack(seed, mib), {"x": torch.zeros(1, WIDTH)}


class Gated(nn.Module):
    """When the first number is positive: says that it has begun, and goes on when it is told to.

    What it waits at is two named pipes, so that a test knows where a forward pass stands. Between the pipes and the
    answer lie ``mib`` MiB of weights, which may still be on their way.
    """

    def __init__(self, begun: str, go_on: str, mib: int) -> None:
        super().__init__()
        self.begun, self.go_on = Path(begun), Path(go_on)
        self.first = _weights(1, WIDTH)
        self.rest = Stack(2, mib)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        if float(x[0, 0] / self.first[0]) > 0:
            self.begun.write_text("begun")
            self.go_on.read_text()
        return self.rest(x)  # type: ignore[no-any-return]


def gated(begun: str, go_on: str, mib: int = 1) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Gated(begun, go_on, mib), {"x": torch.zeros(1, WIDTH)}


class Counter(nn.Module):
    """Counts its forward passes in a buffer: runtime state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _weights(3, 512, 512)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.count + 0 * x.sum().long() + 0 * self.weight.sum().long()


def counter() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Counter(), {"x": torch.zeros(1)}


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = _weights(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x[0]) > 0:
            raise ValueError("this model dislikes\npositive numbers")
        return x + self.weight


def failing() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Failing(), {"x": torch.zeros(8)}


class Counting(nn.Module):
    """Streams: one chunk for each number up to the first one of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _weights(5, 1)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for number in range(int(x[0])):
            yield number + 0 * self.weight


def counting() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Counting(), {"x": torch.ones(1)}


class Picky(Stack):
    """Fails if any number of a batch is not finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not bool(x.isfinite().all()):
            raise ValueError("this model wants numbers")
        return super().forward(x)


def picky() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Picky(7, 1), {"x": torch.zeros(1, WIDTH)}


def slowly_imported(begun: str, go_on: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Waits at the gate the first time that it is made."""
    if Path(go_on).exists():
        Path(begun).write_text("begun")
        Path(go_on).read_text()
        Path(go_on).unlink()
    return stack(1, 1)
