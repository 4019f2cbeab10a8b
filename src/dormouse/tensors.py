"""Tensors as the V2 protocol speaks of them: datatypes, and what a signature says. No torch, no numpy."""

from msgspec import Struct

DATATYPE_BYTES: dict[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
}
"""Size of one element by V2 datatype; BYTES has none."""


class TensorSpec(Struct, frozen=True):
    """One input or output of a signature; -1 in ``shape`` is a free dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


class Signature(Struct, frozen=True):
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class Tensor(Struct, frozen=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
