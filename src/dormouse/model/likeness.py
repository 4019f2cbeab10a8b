"""Makes an image of other weights for an architecture that is known: a fine-tune, a copy, another seed.

Everything but the bytes of the tensors is the known image's: the module's code and arguments, the order of use, the
signature. So no forward pass is needed, and no module either where the source has plain tensors. What the source has
beside tensors is not looked at; its tensors must be those of the image, name by name.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from dormouse.errors import RefusedSource
from dormouse.functions import Manifest
from dormouse.model import factory, sources
from dormouse.model.datatypes import bytes_of, dtype_named
from dormouse.model.loaded import one_line, prepared
from dormouse.model.places import find_places
from dormouse.store.image import staged, write_data
from dormouse.store.index import (
    DATA_FILE,
    INDEX_FILE,
    FactorySkeleton,
    HuggingFaceSkeleton,
    ImageIndex,
    TensorEntry,
    read_index,
    write_index,
)
from dormouse.store.writeback import REDO_FILE

WEIGHTS_SUFFIX = ".safetensors"
_OF_THE_WEIGHTS = (INDEX_FILE, DATA_FILE, REDO_FILE)

Tensors: TypeAlias = Mapping[str, torch.Tensor]


def import_like(
    manifest: Manifest, like: Path, target: Path | None, allow_code: Sequence[Path], *, durable: bool = True
) -> ImageIndex:
    """Write the image directory of a source whose architecture is that of the image at ``like``; no target: only check.

    Raises RefusedSource naming the tensor that differs, and then nothing is left behind.
    """
    known = read_index(like)
    with ExitStack() as held:
        staging = None if target is None else held.enter_context(staged(target, durable=durable))
        if staging is not None:
            _copy_skeleton(like, staging)
        contents = _matched(known, _tensors(manifest, known, allow_code), manifest)
        if staging is None:
            return msgspec.structs.replace(known, page_crc32=())
        checksums = write_data(staging, ((entry, bytes_of(tensor)) for entry, tensor in contents), durable=durable)
        index = msgspec.structs.replace(known, page_crc32=checksums, durable=durable)
        write_index(staging, index)
    return index


def _copy_skeleton(like: Path, staging: Path) -> None:
    for file in like.rglob("*"):
        if file.is_file() and file.name not in _OF_THE_WEIGHTS:
            copy = staging / file.relative_to(like)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def _tensors(manifest: Manifest, known: ImageIndex, allow_code: Sequence[Path]) -> Tensors:
    """Every tensor of the source, by the name of each place that holds it."""
    path = Path(manifest.source)
    if path.suffix == WEIGHTS_SUFFIX:
        return _cast(_stored(path), known.dtype)
    if not path.exists() and sources.REFERENCE.fullmatch(manifest.source):
        code = factory.checked_directory(manifest.code, manifest.source, allow_code)
        made = factory.made(FactorySkeleton(manifest.source, str(code), manifest.arguments), allow_code)
        if isinstance(made, nn.Module):
            return _of_module(prepared(made, known.dtype))
        return _cast(made, known.dtype)
    task = known.skeleton.task if isinstance(known.skeleton, HuggingFaceSkeleton) else manifest.task
    loaded = sources.load(msgspec.structs.replace(manifest, dtype=known.dtype, task=task), allow_code)
    return _of_module(loaded.module)


def _stored(file: Path) -> Tensors:
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
    except (SafetensorError, OSError) as fault:
        raise RefusedSource(f"{file} cannot be read: {one_line(fault)}") from None
    return tensors


def _of_module(module: nn.Module) -> Tensors:
    return {place.name: tensor for place in find_places(module) if (tensor := place.tensor) is not None}


def _cast(tensors: Tensors, dtype: str | None) -> Tensors:
    """In the precision that the known function was cast to, if it was."""
    if dtype is None:
        return tensors
    wanted = dtype_named(dtype)
    return {name: value.to(wanted) if value.is_floating_point() else value for name, value in tensors.items()}


def _matched(known: ImageIndex, tensors: Tensors, manifest: Manifest) -> list[tuple[TensorEntry, torch.Tensor]]:
    names = {name for entry in known.tensors for name in entry.names}
    strange = sorted(tensors.keys() - names)
    if strange:
        raise _unlike(manifest, f"it has {strange[0]}, which that function has not")
    return [(entry, _found(entry, tensors, manifest)) for entry in known.tensors]


def _found(entry: TensorEntry, tensors: Tensors, manifest: Manifest) -> torch.Tensor:
    """Under any of its names; under several only if they are one tensor, as they are in the known function."""
    given = [(name, tensors[name]) for name in entry.names if name in tensors]
    if not given:
        raise _unlike(manifest, f"it lacks {entry.names[0]}")
    name, tensor = given[0]
    for other, value in given[1:]:
        if value is not tensor and not torch.equal(value, tensor):
            raise _unlike(manifest, f"{name} and {other} are one tensor in that function and differ here")
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if (dtype, shape) != (entry.dtype, entry.shape):
        message = f"{name} is {dtype} {list(shape)} and {entry.dtype} {list(entry.shape)} in that function"
        raise _unlike(manifest, message)
    return tensor


def _unlike(manifest: Manifest, how: str) -> RefusedSource:
    return RefusedSource(f"{manifest.source} is not like '{manifest.like}': {how}")
