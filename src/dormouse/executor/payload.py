"""Tensors between a slab and a module: V2 bytes to torch and back. BYTES tensors are nested lists of bytes."""

import struct
from collections.abc import Sequence

import torch

from dormouse.core.types import Bytes
from dormouse.errors import InvalidRequest
from dormouse.model.datatypes import TORCH_DTYPES, bytes_of, datatype_of
from dormouse.model.loaded import Value
from dormouse.model.outputs import Output, Strings

_LENGTH = struct.Struct("<I")


def decoded(datatype: str, shape: Sequence[int], data: memoryview) -> Value:
    """An input for a module, in memory of its own: the slab stays as it is, whatever the module does to it."""
    if datatype == "BYTES":
        return _nested(_elements(data), list(shape))
    dtype = TORCH_DTYPES.get(datatype)
    if dtype is None or len(data) != torch.Size(shape).numel() * dtype.itemsize:
        raise InvalidRequest(f"{len(data)} bytes are no {datatype} tensor of shape {list(shape)}")
    if not data:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(tuple(shape))


def encoded(output: Output) -> tuple[str, tuple[int, ...], bytes | memoryview]:
    """Datatype, shape and V2 bytes of an output on the CPU. Raises RefusedSource for a dtype that V2 cannot say."""
    if isinstance(output, torch.Tensor):
        datatype = datatype_of(output.dtype)
        return datatype, tuple(output.shape), bytes_of(output)
    return "BYTES", _shape(output), b"".join(_LENGTH.pack(len(item)) + item for item in _flat(output))


def _elements(data: memoryview) -> list[Value]:
    elements: list[Value] = []
    done: Bytes = 0
    while done < len(data):
        if done + _LENGTH.size > len(data):
            raise InvalidRequest("a BYTES tensor ends inside a length")
        (size_bytes,) = _LENGTH.unpack_from(data, done)
        done += _LENGTH.size
        if done + size_bytes > len(data):
            raise InvalidRequest(f"a BYTES tensor ends inside an element of {size_bytes} bytes")
        elements.append(bytes(data[done : done + size_bytes]))
        done += size_bytes
    return elements


def _nested(elements: list[Value], shape: list[int]) -> Value:
    if len(elements) != torch.Size(shape).numel():
        raise InvalidRequest(f"{len(elements)} elements are no BYTES tensor of shape {shape}")
    for size in reversed(shape[1:]):
        elements = [elements[at : at + size] for at in range(0, len(elements), size)] if size else [[]] * len(elements)
    return elements if shape else elements[0]


def _shape(strings: Strings) -> tuple[int, ...]:
    if isinstance(strings, bytes):
        return ()
    return (len(strings), *_shape(strings[0])) if strings else (0,)


def _flat(strings: Strings) -> list[bytes]:
    return [strings] if isinstance(strings, bytes) else [item for part in strings for item in _flat(part)]
