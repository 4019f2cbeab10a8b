"""A module without weights, from an image directory, and the binding of all its tensors to somebody's memory."""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from dormouse.core.types import Bytes
from dormouse.errors import RefusedSource
from dormouse.model import exported, factory, huggingface
from dormouse.model.datatypes import dtype_named
from dormouse.model.places import Place, find_places, named_modules
from dormouse.store.index import ExportedSkeleton, HuggingFaceSkeleton, ImageIndex, TensorEntry

View: TypeAlias = Callable[[Bytes, torch.dtype, tuple[int, ...]], torch.Tensor]
"""A tensor over the memory at an offset."""


def rebuild(directory: Path, index: ImageIndex, allow_code: Sequence[Path]) -> nn.Module:
    """The module of an image, in eval mode; its tensors mean nothing until they are bound."""
    skeleton = index.skeleton
    if isinstance(skeleton, HuggingFaceSkeleton):
        return huggingface.rebuild(directory, skeleton, index.dtype)
    if isinstance(skeleton, ExportedSkeleton):
        return exported.rebuild(directory / skeleton.file)
    return factory.rebuild(skeleton, allow_code, index.dtype)


def bind(module: nn.Module, index: ImageIndex, view: View) -> list[torch.Tensor]:
    """Put a view in every place of the module that holds a tensor; the tensors, in order of the index. Raises
    RefusedSource if image and module differ."""
    places = {place.name: place for place in find_places(module)}
    names = [name for entry in index.tensors for name in entry.names]
    _check_same(set(places), set(names))
    tensors = [_tensor(entry, view) for entry in index.tensors]
    for entry, tensor in zip(index.tensors, tensors, strict=True):
        for name in entry.names:
            _check_shape(places[name], entry)
            places[name].put(tensor)
    for inner in named_modules(module).values():
        if isinstance(inner, nn.RNNBase):
            _refresh(inner)
    _check_bound(module)
    return tensors


def _tensor(entry: TensorEntry, view: View) -> torch.Tensor:
    tensor = view(entry.offset, dtype_named(entry.dtype), entry.shape)
    return nn.Parameter(tensor, requires_grad=False) if entry.kind == "parameter" else tensor


def _refresh(recurrent: nn.RNNBase) -> None:
    # Recurrent layers compare these references to see whether weights were exchanged, and would then copy all of
    # them into memory of their own.
    recurrent._flat_weight_refs = [
        weakref.ref(weight) if weight is not None else None for weight in recurrent._flat_weights
    ]


def _check_same(built: set[str], stored: set[str]) -> None:
    for names, problem in ((stored - built, "lacks"), (built - stored, "has, unknown to the image,")):
        if names:
            raise RefusedSource(f"the rebuilt module {problem} {', '.join(sorted(names)[:5])}; deploy the source again")


def _check_shape(place: Place, entry: TensorEntry) -> None:
    tensor = place.tensor
    assert tensor is not None, place.name
    if tuple(tensor.shape) != entry.shape:
        raise RefusedSource(
            f"{place.name} is {tuple(tensor.shape)} in the rebuilt module and {entry.shape} in the image"
        )


def _check_bound(module: nn.Module) -> None:
    for place in find_places(module):
        tensor = place.tensor
        if tensor is None or tensor.is_meta:
            raise RefusedSource(f"{place.name} has no memory after binding")
