"""Modules without weights of their own, one for all functions of an architecture, bound to the memory of whoever runs.

Theory of operation. Two functions are of one architecture if nothing but the bytes of their weights differs: the same
skeleton and files to build it from, the same code, the same tensors at the same offsets. So one module can be either of
them: its tensors are pointed at the one's memory or at the other's, which takes about a microsecond a tensor and
leaves every object of the module as it was. Replays of graphs know addresses and need no module.

A forward pass may leave something in a module: a counter, a cache, a view of a weight. Then what it leaves belongs to
that function, and no other may see it. So before a module changes hands it is compared with what it was when it was
built. If anything is different it stays with whom it has served last, and everybody else of that architecture gets a
module of their own, now and later. Functions with runtime state never share.

Threads: a skeleton is worn, guarded and run by the compute lane alone; any thread may ask for one or leave it.
"""

import hashlib
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch
from torch import nn

from dormouse.core.types import Bytes
from dormouse.executor.arrival import Arrival
from dormouse.executor.built import Built
from dormouse.executor.memory import give_back_freed_memory
from dormouse.model import skeleton
from dormouse.model.access import Watch
from dormouse.model.contents import Contents
from dormouse.model.datatypes import dtype_named
from dormouse.model.places import Place, find_places
from dormouse.store.index import DATA_FILE, INDEX_FILE, FactorySkeleton, ImageIndex, read_index

MOST_FILES = 2000
"""Of code that a factory may import. Looking at more of them for each function costs more than a module of its own."""

_NOT_OF_THE_SKELETON = (INDEX_FILE, DATA_FILE)

Architecture: TypeAlias = bytes
"""A digest of all that makes functions interchangeable but for their weights."""


class Skeleton:
    """One module, the guard before its tensors, and the function whose memory they are in now."""

    def __init__(self, module: nn.Module, index: ImageIndex, wearer: Built, group_bytes: Bytes) -> None:
        self.module = module
        self.wearer = wearer
        self.tolerance = _tolerance(index)
        """How far two right answers may be apart, of their size."""
        self._image_bytes = index.image_bytes
        self._group_bytes = group_bytes
        self._tensors = skeleton.bind(module, index, lambda *place: _tensor(wearer, *place))
        offsets = [entry.offset // dtype_named(entry.dtype).itemsize for entry in index.tensors]
        self._places = [(at, t.size(), t.stride()) for at, t in zip(offsets, self._tensors, strict=True)]
        self.state = _state_places(module, index)
        self._as_built = Contents(module)
        self.guard = Watch(module, self._group_of, _nothing)
        self._has_run = False
        self._scanned = False

    @property
    def changed(self) -> bool:
        """Whether its wearer has left anything in it."""
        self.guard.disarm()
        return self._as_built.changed

    def wear(self, function: Built) -> None:
        """Point all tensors at the function's memory."""
        storage = function.storage
        with torch.no_grad():
            for tensor, place in zip(self._tensors, self._places, strict=True):
                tensor.set_(storage, *place)
        self.wearer = function

    def stand_guard(self, arrival: Arrival) -> None:
        """Before a run: watch the tensors of an image that is still arriving, and only then."""
        if arrival.complete:
            self.guard.disarm()
        else:
            self.arm()
            self.guard.passed = arrival.waited
        self._has_run = True

    def arm(self) -> None:
        """Watch all tensors. The first run may have left views of weights in plain attributes."""
        if self._has_run and not self._scanned:
            self._scanned = True
            self.guard.disarm()
            self.guard.scan()
        self.guard.arm()

    def _group_of(self, tensor: torch.Tensor) -> int:
        start = tensor.data_ptr() - self.wearer.region.address if tensor.numel() else -1
        inside = 0 <= start < self._image_bytes
        return (start + _span_bytes(tensor) - 1) // self._group_bytes if inside else -1


@dataclass(slots=True)
class _Member:
    skeleton: Skeleton
    architecture: Architecture | None
    directory: Path
    allow_code: Sequence[Path]


class Skeletons:
    """Those of one executor."""

    def __init__(self, group_bytes: Bytes) -> None:
        self._group_bytes = group_bytes
        self._shared: dict[Architecture, Skeleton] = {}
        self._members: dict[Built, _Member] = {}
        self._single: set[Architecture] = set()
        """Architectures whose modules keep something of a run."""
        self._changing = threading.Lock()

    def join(self, function: Built, index: ImageIndex, directory: Path, allow_code: Sequence[Path]) -> None:
        """Give a function the module of its architecture, built if it is the first. Raises RefusedSource."""
        architecture = None if index.state_bytes else architecture_of(index, directory)
        with self._changing:
            if architecture in self._single:
                architecture = None
            found = None if architecture is None else self._shared.get(architecture)
            if found is None:
                found = self._new(function, index, directory, allow_code)
            if architecture is not None:
                self._shared[architecture] = found
            self._members[function] = _Member(found, architecture, directory, allow_code)

    def leave(self, function: Built) -> None:
        """A function is forgotten; with the last of an architecture its module goes."""
        with self._changing:
            left = self._members.pop(function)
            others = (member.architecture for member in self._members.values())
            if left.architecture is not None and left.architecture in others:
                return
            if left.architecture is not None:
                self._shared.pop(left.architecture, None)
        give_back_freed_memory()

    def worn_by(self, function: Built) -> Skeleton:
        """The module, bound to this function's memory: at once, unless the one before has left something in it."""
        member = self._members[function]
        if member.skeleton.wearer is not function:
            if member.skeleton.changed:
                self._part(function, member)
            else:
                member.skeleton.wear(function)
        return member.skeleton

    def _part(self, function: Built, member: _Member) -> None:
        """Give a function a module of its own, and share none of its architecture any more."""
        with self._changing:
            assert member.architecture is not None
            self._single.add(member.architecture)
            self._shared.pop(member.architecture, None)
            index = read_index(member.directory)
            member.skeleton = self._new(function, index, member.directory, member.allow_code)

    def _new(self, function: Built, index: ImageIndex, directory: Path, allow_code: Sequence[Path]) -> Skeleton:
        made = Skeleton(skeleton.rebuild(directory, index, allow_code), index, function, self._group_bytes)
        give_back_freed_memory()  # a factory makes its module with weights of its own, which nobody has any more
        return made


def architecture_of(index: ImageIndex, directory: Path) -> Architecture | None:
    """What two functions have in common that may share a module; None: this one shares with nobody."""
    digest = hashlib.sha256(msgspec.json.encode((index.skeleton, index.dtype, index.tensors, index.image_bytes)))
    for file in sorted(directory.rglob("*")):
        if file.is_file() and file.name not in _NOT_OF_THE_SKELETON:
            digest.update(repr(file.relative_to(directory)).encode() + file.read_bytes())
    if isinstance(index.skeleton, FactorySkeleton):
        code = _files_in(Path(index.skeleton.code))
        if code is None:
            return None
        digest.update(repr(code).encode())
    return digest.digest()


def _files_in(directory: Path) -> list[tuple[str, int, int]] | None:
    """Name, size and time of change of every file of code, which tell one build from another; None: too many."""
    found = []
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        for name in sorted(names):
            status = (Path(folder) / name).lstat()
            found.append((f"{folder}/{name}", status.st_size, status.st_mtime_ns))
            if len(found) > MOST_FILES:
                return None
    return found


def _tensor(wearer: Built, offset: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over the wearer's memory, and a view of no other tensor, so that it can be pointed elsewhere."""
    empty = torch.empty(0, dtype=dtype, device=wearer.storage.device)
    return empty.set_(wearer.storage, offset // dtype.itemsize, shape, torch.empty(shape, device="meta").stride())


def _state_places(module: nn.Module, index: ImageIndex) -> list[tuple[Place, torch.Tensor]]:
    names = {name for entry in index.tensors if entry.offset >= index.weight_bytes for name in entry.names}
    places = [place for place in find_places(module) if place.name in names] if names else []
    return [(place, tensor) for place in places if (tensor := place.tensor) is not None]


def _tolerance(index: ImageIndex) -> float:
    """The coarsest weights tell: 0.07 % for float32, 18 % for bfloat16. Answers that have nothing in common are 140 %
    apart."""
    dtypes = {dtype_named(entry.dtype) for entry in index.tensors}
    return 2 * math.sqrt(max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0))


def _span_bytes(tensor: torch.Tensor) -> Bytes:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _nothing(group: int) -> None:
    raise AssertionError(f"group {group} is touched outside of a run")
