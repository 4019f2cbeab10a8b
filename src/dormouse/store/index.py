"""The image format: what lies on disk beside the weights, readable without torch.

An image is a directory:

    index.json     this file's ImageIndex
    image.bin      tensors in first-use order, each on a 256-byte boundary; then, from the next page, the
                   runtime state (what a forward pass changes); padded with zeros to a whole page
    source files   what the skeleton needs to build the module without weights (config.json, program.pt2, ...)

A page is 2 MiB; each has a CRC-32, so a damaged or truncated file is found when it is read.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dormouse.core.types import Bytes
from dormouse.errors import RefusedSource
from dormouse.tasks.description import Task
from dormouse.tensors import Signature

FORMAT = 1
ALIGNMENT_BYTES: Bytes = 256
PAGE_BYTES: Bytes = 2 * 1024 * 1024
INDEX_FILE = "index.json"
DATA_FILE = "image.bin"


class TensorEntry(Struct, frozen=True):
    """One stored tensor. ``names`` are every place in the module that shares it (tied weights are stored once)."""

    names: tuple[str, ...]
    kind: str
    """``parameter``, ``buffer``, or ``attribute`` (a plain tensor attribute that a module keeps)."""
    dtype: str
    """As torch names it: ``float32``, ``bfloat16``, ``int64`` ..."""
    shape: tuple[int, ...]
    offset: Bytes
    size_bytes: Bytes


class HuggingFaceSkeleton(Struct, frozen=True, tag="huggingface"):
    """``architecture`` is a class of the transformers package; the configuration lies beside the index."""

    architecture: str
    task: str


class ExportedSkeleton(Struct, frozen=True, tag="export"):
    """A torch.export program beside the index."""

    file: str


class FactorySkeleton(Struct, frozen=True, tag="factory"):
    """``module:callable`` imported from ``code``, called with ``arguments``."""

    reference: str
    code: str
    arguments: dict[str, Any]


Skeleton = HuggingFaceSkeleton | ExportedSkeleton | FactorySkeleton


class ImageIndex(Struct, frozen=True):
    tensors: tuple[TensorEntry, ...]
    """In order of ``offset``, which is the order of first use; runtime state last."""
    weight_bytes: Bytes
    """Up to here the image never changes; a multiple of PAGE_BYTES when there is state."""
    image_bytes: Bytes
    """Weights, gap and state, without the padding of the file."""
    page_crc32: tuple[int, ...]
    skeleton: Skeleton
    signature: Signature
    platform: str
    """For V2 metadata: ``pytorch_huggingface``, ``pytorch_export``, ``pytorch_module``."""
    dtype: str | None = None
    """What floating-point tensors were cast to at deploy; None: as the source had them."""
    task: Task | None = None
    """What texts or pictures are answered with, if anything."""
    durable: bool = True
    """The data file stays when the image has been read; else the image is in memory from then on, and nowhere else."""
    format: int = FORMAT

    @property
    def state_bytes(self) -> Bytes:
        return self.image_bytes - self.weight_bytes


def read_index(directory: Path) -> ImageIndex:
    """Read an image's index. Raises RefusedSource if it is missing, damaged or of another format."""
    file = directory / INDEX_FILE
    try:
        index = msgspec.json.decode(file.read_bytes(), type=ImageIndex)
    except (OSError, msgspec.DecodeError) as fault:
        raise RefusedSource(f"{file} is no image index: {fault}") from None
    if index.format != FORMAT:
        raise RefusedSource(f"{file} has format {index.format}, this version reads {FORMAT}; deploy the source again")
    return index


def write_index(directory: Path, index: ImageIndex) -> None:
    """Write an image's index, in place of the one before: whole, or not at all."""
    part = directory / f"{INDEX_FILE}.part"
    with part.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(index), indent=1))
        file.flush()
        os.fsync(file.fileno())
    part.replace(directory / INDEX_FILE)
