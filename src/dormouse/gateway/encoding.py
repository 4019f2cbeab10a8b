"""Tensor data between its forms: JSON values, the binary extension's bytes, and raw little-endian bytes.

Knows one tensor at a time, and neither requests nor signatures. Every complaint is an InvalidRequest that begins with
``where``, which names the tensor.

What JSON cannot carry is refused and pointed to the binary form, never bent: FP16 and BF16, bytes that are no UTF-8,
and infinities on the way out. NaN goes out as ``null``, which every client's float array reads as NaN.
"""

import math
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from dormouse.errors import InvalidRequest
from dormouse.tensors import DATATYPE_BYTES

BINARY_ONLY = ("FP16", "BF16")
DATATYPES = (*DATATYPE_BYTES, "BYTES")
LARGEST_TENSOR_BYTES = 2**48
"""Sizes beyond are nonsense whatever the data: they would not survive signed 64-bit arithmetic further on."""

_LENGTH = struct.Struct("<I")
_BRACKETS = re.compile(rb"[\[ \t\r\n]*")

DTYPES = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
"""What elements are in numpy; those of BINARY_ONLY are nothing there."""

# What one JSON element may be. msgspec bounds fit in 64 signed bits; numpy refuses what lies beyond for the two widest.
_ELEMENTS: dict[str, object] = {
    "BOOL": bool | Annotated[int, Meta(ge=0, le=1)],
    "UINT8": Annotated[int, Meta(ge=0, le=2**8 - 1)],
    "UINT16": Annotated[int, Meta(ge=0, le=2**16 - 1)],
    "UINT32": Annotated[int, Meta(ge=0, le=2**32 - 1)],
    "UINT64": Annotated[int, Meta(ge=0)],
    "INT8": Annotated[int, Meta(ge=-(2**7), le=2**7 - 1)],
    "INT16": Annotated[int, Meta(ge=-(2**15), le=2**15 - 1)],
    "INT32": Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)],
    "INT64": int,
    "FP32": float,
    "FP64": float,
    "BYTES": str,
}


def element_count(where: str, datatype: str, shape: Sequence[int]) -> int:
    """How many elements a shape has. Refuses unknown datatypes, negative dimensions and absurd sizes."""
    if datatype not in DATATYPES:
        raise InvalidRequest(f"{where}: datatype {datatype!r} is unknown; one of {', '.join(DATATYPES)}")
    if any(dimension < 0 for dimension in shape):
        raise InvalidRequest(f"{where}: shape {list(shape)} has a negative dimension")
    # Zeros aside, so that an empty tensor cannot hide a dimension that overflows later.
    if math.prod(dimension or 1 for dimension in shape) * DATATYPE_BYTES.get(datatype, 4) > LARGEST_TENSOR_BYTES:
        raise InvalidRequest(f"{where}: shape {list(shape)} is larger than any tensor this server can take")
    return math.prod(shape)


# ------------------------------------------------------------------ JSON in


def from_json(where: str, datatype: str, shape: Sequence[int], count: int, data: msgspec.Raw) -> bytes | memoryview:
    """Raw bytes of a tensor given as JSON text, flat or nested as its shape."""
    if datatype in BINARY_ONLY:
        raise InvalidRequest(f"{where}: {datatype} has no JSON form; send it as binary, with binary_data_size")
    depth = depth_of(data)
    # An empty dimension ends the nesting: [2, 0, 3] is written [[], []].
    nested = next((index + 1 for index, dimension in enumerate(shape) if dimension == 0), len(shape))
    if depth not in (1, nested):
        raise InvalidRequest(
            f"{where}: data is nested {depth} deep, shape {list(shape)} takes a flat list or {nested} levels"
        )
    array = _array(where, datatype, depth, data)
    if array.shape not in {(count,), tuple(shape[:nested])}:
        raise InvalidRequest(f"{where}: data has {_described(array)}, shape {list(shape)} takes {count} elements")
    return (
        prefixed(map(str.encode, array.reshape(-1).tolist()))
        if datatype == "BYTES"
        else array.reshape(-1).view(np.uint8).data
    )


def depth_of(data: bytes | msgspec.Raw) -> int:
    """How many lists begin at its beginning."""
    match = _BRACKETS.match(memoryview(data))
    assert match is not None, "the pattern matches the empty string"
    return match.group().count(b"[")


def array_of(where: str, datatype: str, data: bytes) -> npt.NDArray[np.generic]:
    """The elements of a flat list."""
    return _array(where, datatype, 1, data)


def _array(where: str, datatype: str, depth: int, data: bytes | msgspec.Raw) -> npt.NDArray[np.generic]:
    try:
        # Without this a number beyond FP32 would silently become infinity.
        with np.errstate(over="raise"):
            return np.array(_decoder(datatype, depth).decode(data), dtype=DTYPES[datatype])
    except msgspec.DecodeError as fault:
        raise InvalidRequest(f"{where}: data is no {datatype}: {fault}") from None
    except (OverflowError, FloatingPointError):
        raise InvalidRequest(f"{where}: data has a value out of range for {datatype}") from None
    except ValueError:
        raise InvalidRequest(f"{where}: data has rows of different lengths") from None


@cache
def _decoder(datatype: str, depth: int) -> msgspec.json.Decoder[object]:
    values = _ELEMENTS[datatype]
    for _ in range(depth):
        values = list[values]  # type: ignore[valid-type]  # built at run time, from a table
    return msgspec.json.Decoder(values)


def _described(array: npt.NDArray[np.generic]) -> str:
    return f"{array.size} elements" if array.ndim <= 1 else f"shape {list(array.shape)}"


# ------------------------------------------------------------------ typed values in


def from_numbers(where: str, datatype: str, values: Sequence[object], wide: str) -> bytes:
    """Raw bytes of numbers that came in another type, ``wide`` in numpy's words. Refuses what does not fit."""
    given = np.array(values, wide)
    array = given.astype(DTYPES[datatype])
    if array.dtype.kind in "iu" and (array != given).any():
        raise InvalidRequest(f"{where}: contents has a value out of range for {datatype}")
    return array.tobytes()


def prefixed(texts: Iterable[bytes]) -> bytes:
    """The elements of a BYTES tensor as raw bytes."""
    return b"".join(part for text in texts for part in (_LENGTH.pack(len(text)), text))


# ------------------------------------------------------------------ JSON out


def to_json(where: str, datatype: str, data: bytes | memoryview) -> list[object]:
    """The elements, flat, as JSON can carry them."""
    if datatype in BINARY_ONLY:
        raise needs_binary(where, f"{datatype} has no JSON form")
    if datatype == "BYTES":
        return [text_of(where, element) for element in elements(where, data)]
    check_finite(where, datatype, data)
    values: list[object] = np.frombuffer(data, DTYPES[datatype]).tolist()
    return values


def check_finite(where: str, datatype: str, data: bytes | memoryview) -> None:
    """Refuse infinities."""
    dtype = DTYPES[datatype]
    if dtype.kind == "f" and np.isinf(np.frombuffer(data, dtype)).any():
        raise needs_binary(where, "it holds an infinity, which has no JSON form")


def text_of(where: str, element: memoryview) -> str:
    """An element of a BYTES tensor as JSON can carry it."""
    try:
        return str(element, "utf-8")
    except UnicodeDecodeError:
        raise not_utf8(where) from None


def not_utf8(where: str) -> InvalidRequest:
    return needs_binary(where, "it holds bytes that are no UTF-8, which have no JSON form")


def needs_binary(where: str, why: str) -> InvalidRequest:
    """The refusal of an output that JSON cannot carry."""
    return InvalidRequest(f"{where}: {why}; ask for it as binary, with the parameter binary_data (or without ndjson)")


# ------------------------------------------------------------------ binary


def check_binary(where: str, datatype: str, count: int, data: memoryview) -> None:
    """Refuse bytes that are not ``count`` elements of ``datatype``."""
    if datatype == "BYTES":
        found = sum(1 for _ in elements(where, data))
        if found != count:
            raise InvalidRequest(f"{where}: binary data has {found} elements, its shape takes {count}")
        return
    expected = count * DATATYPE_BYTES[datatype]
    if len(data) != expected:
        raise InvalidRequest(f"{where}: binary data has {len(data)} bytes, its shape and {datatype} take {expected}")
    if datatype == "BOOL" and data and int(np.frombuffer(data, np.uint8).max()) > 1:
        raise InvalidRequest(f"{where}: binary data has a BOOL that is neither 0 nor 1")


def elements(where: str, data: bytes | memoryview) -> Iterator[memoryview]:
    """The elements of a BYTES tensor: each has a 4-byte length before it."""
    view = memoryview(data)
    while view:
        start = _LENGTH.size
        end = start + _LENGTH.unpack_from(view)[0] if len(view) >= start else len(view) + 1
        if end > len(view):
            raise InvalidRequest(f"{where}: binary data ends inside a BYTES element")
        yield view[start:end]
        view = view[end:]
