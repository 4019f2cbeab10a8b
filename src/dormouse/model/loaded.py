"""What a loaded source is: the real module on the CPU, and all that the importer must know to make an image of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from dormouse.store.index import Skeleton
from dormouse.tensors import TensorSpec

Value: TypeAlias = torch.Tensor | list["Value"] | bytes
"""A tensor, or a BYTES tensor as a nested list of bytes."""

Inputs: TypeAlias = dict[str, Value]
"""Keyword arguments of a module."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs to try a module with, and the same with other sizes where the module may allow them."""

    inputs: Inputs
    varied: Inputs | None = None
    declared: tuple[TensorSpec, ...] = ()
    """What the owner says of the inputs; empty: what the trial shows."""


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same inputs, floating-point ones in another precision."""
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``module`` is called with keyword tensors, in eval mode, without gradients."""

    module: nn.Module
    skeleton: Skeleton
    platform: str
    trials: tuple[Trial, ...]
    """Tried in order; the first that works is the example."""
    reload: Callable[[], nn.Module]
    """The same module again, as it was before any forward."""
    files: tuple[tuple[Path, str], ...] = ()
    """What the skeleton needs of the source: file, and its name in the image directory."""
    write_more: Callable[[Path], None] | None = None
    """Writes into the image directory what the skeleton needs and the source does not have as a file."""
    dtype: str | None = None
    optional: frozenset[str] = frozenset()
    """Inputs that may be left out; empty: those with a default in the module's forward."""


def prepared(module: nn.Module, dtype: str | None) -> nn.Module:
    """Eval mode, no gradients, floating-point tensors cast where the manifest says so."""
    if dtype is not None:
        module = module.to(getattr(torch, dtype))
    return module.eval().requires_grad_(False)


def one_line(fault: BaseException) -> str:
    """The first line of an exception with its type, fit for one line to a user."""
    text = str(fault).strip()
    return f"{type(fault).__name__}: {text.splitlines()[0][:300]}" if text else type(fault).__name__
