"""A stand-in for fine-tuning: the same model with weights that are its own, in every part of its memory."""

import zlib
from collections.abc import Mapping

import torch

SPREAD = 0.02
"""How much a row of a matrix is scaled: little enough that the model still knows what it has learnt."""


def fine_tuned(state: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The tensors by name, with each row of each matrix scaled by a factor that only name and seed decide."""
    return {name: _scaled(tensor, name, seed) for name, tensor in state.items()}


def _scaled(tensor: torch.Tensor, name: str, seed: int) -> torch.Tensor:
    if tensor.ndim < 2 or not tensor.is_floating_point():
        return tensor.clone()
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    factors = 1 + SPREAD * torch.randn(len(tensor), generator=generator)
    # In float32: at half precision most factors would round to one.
    return (tensor.float() * factors.view(-1, *[1] * (tensor.ndim - 1))).to(tensor.dtype)
