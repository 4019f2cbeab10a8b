"""Makes an image of a model: load, profile, lay out, write, and prove that the image gives the same answers.

Runs in a process of its own (``import_process``), so that a source which crashes or hogs memory takes nothing with it.
"""

import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from dormouse.core.types import Bytes
from dormouse.errors import DormouseError, RefusedSource
from dormouse.functions import Manifest
from dormouse.model import skeleton, sources
from dormouse.model.datatypes import bytes_of, dtype_name
from dormouse.model.keeping import kept_of
from dormouse.model.likeness import import_like
from dormouse.model.loaded import LoadedModel, one_line
from dormouse.model.outputs import Output
from dormouse.model.profiling import KeptTensor, Profile, kept_tensors, profiled, run
from dormouse.model.together import prove_together
from dormouse.store.image import laid_out, staged, write_data
from dormouse.store.index import DATA_FILE, ImageIndex, TensorEntry, write_index
from dormouse.tasks.description import Task
from dormouse.tensors import Signature

CORES_PER_THREAD = 4
"""Torch threads of an import are one for so many cores: a few imports at once share the machine."""


class ImportRequest(Struct, frozen=True):
    """``inspect`` or no target: say what would be made, and write nothing."""

    manifest: Manifest
    target: str | None = None
    allow_code: tuple[str, ...] = ()
    inspect: bool = False
    durable: bool = True
    like: str | None = None
    """The image directory of the function that the manifest says it is like."""


class ImportSummary(Struct, frozen=True):
    image_bytes: Bytes
    state_bytes: Bytes
    tensors: int
    signature: Signature
    platform: str
    dtype: str | None
    task: Task | None = None


class ImportFailure(Struct, frozen=True):
    error: str
    status: int


def import_model(manifest: Manifest, target: Path, allow_code: Sequence[Path], *, durable: bool = True) -> ImageIndex:
    """Write the image directory. Raises a DormouseError, and then nothing is left behind."""
    with staged(target, durable=durable) as staging:
        loaded = sources.load(manifest, allow_code)
        profile = profiled(loaded)
        prove_together(manifest, loaded.module, profile, _alike)
        kept = kept_of(manifest, loaded, profile.signature)
        index = _index(loaded, profile, kept.task)
        for file, name in loaded.files:
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, staging / name)
        for name, content in kept.files.items():
            (staging / name).write_bytes(content)
        if loaded.write_more is not None:
            loaded.write_more(staging)
        checksums = write_data(staging, _contents(loaded, profile, index), durable=durable)
        index = msgspec.structs.replace(index, page_crc32=checksums, durable=durable)
        write_index(staging, index)
        _prove(staging, index, allow_code, loaded, profile)
    return index


def inspect_model(manifest: Manifest, allow_code: Sequence[Path]) -> ImageIndex:
    """The index that ``import_model`` would write, without checksums."""
    loaded = sources.load(manifest, allow_code)
    profile = profiled(loaded)
    prove_together(manifest, loaded.module, profile, _alike)
    return _index(loaded, profile, kept_of(manifest, loaded, profile.signature).task)


def _index(loaded: LoadedModel, profile: Profile, task: Task | None) -> ImageIndex:
    entries = [(_entry(item), index in profile.changed) for index, item in enumerate(profile.order)]
    tensors, weight_bytes, image_bytes = laid_out(
        [entry for entry, changed in entries if not changed], [entry for entry, changed in entries if changed]
    )
    if image_bytes == 0:
        raise RefusedSource("the model has no weights: there is nothing to swap")
    return ImageIndex(
        tensors=tensors,
        weight_bytes=weight_bytes,
        image_bytes=image_bytes,
        page_crc32=(),
        skeleton=loaded.skeleton,
        signature=profile.signature,
        platform=loaded.platform,
        dtype=loaded.dtype,
        task=task,
    )


def _entry(item: KeptTensor) -> TensorEntry:
    return TensorEntry(
        names=tuple(place.name for place in item.places),
        kind=item.kind,
        dtype=dtype_name(item.tensor.dtype),
        shape=tuple(item.tensor.shape),
        offset=0,
        size_bytes=item.tensor.numel() * item.tensor.element_size(),
    )


def _contents(loaded: LoadedModel, profile: Profile, index: ImageIndex) -> Iterator[tuple[TensorEntry, memoryview]]:
    # A forward has changed the module: its runtime state must start as the source has it, so take all from a fresh one.
    kept = kept_tensors(loaded.reload()) if profile.changed else profile.order
    by_name = {place.name: item for item in kept for place in item.places}
    for entry in index.tensors:
        yield entry, bytes_of(by_name[entry.names[0]].tensor)


def _prove(staging: Path, index: ImageIndex, allow_code: Sequence[Path], loaded: LoadedModel, profile: Profile) -> None:
    """Rebuild the module from the image alone and ask it the same. Raises RefusedSource if it answers otherwise."""
    module = skeleton.rebuild(staging, index, allow_code)
    with (staging / DATA_FILE).open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    whole = torch.frombuffer(memory, dtype=torch.uint8)

    def view(offset: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        return whole[offset:end].view(dtype).view(shape)

    skeleton.bind(module, index, view)
    answer = run(module, profile.trial.inputs)
    if _alike(answer, profile.outputs):
        return
    again = run(loaded.reload() if profile.changed else loaded.module, profile.trial.inputs)
    if _alike(again, profile.outputs):  # else it rolls dice, and no two answers need be alike
        raise RefusedSource("rebuilt from its image the model gives other answers; it keeps values that are no tensors")


def _alike(one: dict[str, Output], other: dict[str, Output]) -> bool:
    return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())


def _same(one: Output, other: Output) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other or one == other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = 1e-4 if one.dtype in (torch.float32, torch.float64) else 2e-2
    return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def answered(request: bytes) -> ImportSummary | ImportFailure:
    """Do what one request asks; whatever goes wrong is one line."""
    try:
        asked = msgspec.json.decode(request, type=ImportRequest)
        index = _asked_for(asked, [Path(directory) for directory in asked.allow_code])
    except DormouseError as refusal:
        return ImportFailure(refusal.message, refusal.status)
    except msgspec.DecodeError as fault:
        return ImportFailure(f"the import request cannot be read: {fault}", 400)
    except MemoryError:
        return ImportFailure("there is not enough memory to import the model", 507)
    except OSError as fault:
        return ImportFailure(f"the image cannot be written: {one_line(fault)}", 507)
    except (Exception, SystemExit) as fault:
        return ImportFailure(f"the model cannot be imported: {one_line(fault)}", 400)
    return ImportSummary(
        index.image_bytes,
        index.state_bytes,
        len(index.tensors),
        index.signature,
        index.platform,
        index.dtype,
        index.task,
    )


def _asked_for(asked: ImportRequest, allow_code: Sequence[Path]) -> ImageIndex:
    target = None if asked.inspect or not asked.target else Path(asked.target)
    if asked.like is not None:
        return import_like(asked.manifest, Path(asked.like), target, allow_code, durable=asked.durable)
    if target is None:
        return inspect_model(asked.manifest, allow_code)
    return import_model(asked.manifest, target, allow_code, durable=asked.durable)


def answered_bytes(request: bytes) -> bytes:
    """What ``import_process`` calls: JSON in, JSON out; whatever a model prints goes to standard error."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // CORES_PER_THREAD))
    os.dup2(2, 1)
    return msgspec.json.encode(answered(request))
