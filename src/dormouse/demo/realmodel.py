"""What the demo asks of a real model: a source to deploy, and the same model in PyTorch without Dormouse."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

import torch

from dormouse.demo.v2 import Arrays
from dormouse.functions import Manifest

Direct: TypeAlias = Callable[[dict[str, torch.Tensor]], torch.Tensor]
"""Answers a question by running the model."""


class RealModel(Protocol):
    def prepare(self) -> None:
        """Do once, and keep in the cache, what takes long."""

    def write_source(self, name: str, seed: int, directory: Path) -> Manifest:
        """Put the variant's source under ``directory``; what to deploy."""

    def direct(self, seed: int, directory: Path, device: torch.device) -> Direct:
        """The same variant, through nothing but its own library."""

    def questions(self) -> list[Arrays]:
        """Different inputs, the same for all variants."""
