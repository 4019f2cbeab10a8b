"""Tensors as people type and read them: ``name=value`` to a V2 request, an answer to lines of text.

Half precision travels as binary, all other inputs as JSON; answers always come back as binary.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dormouse.errors import InvalidRequest

SHOWN_ELEMENTS = 8
_DTYPES = {"BOOL": "?", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
_DTYPES |= {f"INT{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)}
_DTYPES |= {f"UINT{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)}

Array = npt.NDArray[Any]


# ------------------------------------------------------------------ typed in


def request_of(values: Mapping[str, object], metadata: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Head and raw bytes of a V2 request for values by input name. Raises InvalidRequest."""
    specs = {spec["name"]: spec for spec in metadata["inputs"]}
    inputs, tails = [], []
    for name, value in values.items():
        if name not in specs:
            raise InvalidRequest(f"input {name!r} is unknown; the inputs are {', '.join(specs)}")
        tensor, tail = _input(name, value, specs[name]["datatype"])
        inputs.append(tensor)
        tails.append(tail)
    head = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    return msgspec.json.encode(head), b"".join(tails)


def text_input(text: str, metadata: Mapping[str, Any]) -> dict[str, object]:
    """The one BYTES input of a function, holding ``text``. Raises InvalidRequest if it has none, or several."""
    takers = [spec for spec in metadata["inputs"] if spec["datatype"] == "BYTES"]
    takers = [spec for spec in takers if spec["name"] == "text"] or takers  # of a task that takes other bytes, too
    if len(takers) != 1:
        raise InvalidRequest(f"function {metadata['name']!r} has {len(takers)} inputs of texts; use --input or --json")
    value: object = text
    for _ in takers[0]["shape"]:
        value = [value]
    return {takers[0]["name"]: value}


def parse_input(text: str) -> tuple[str, object]:
    """``name=value``; the value is JSON (``[[1, 2], [3, 4]]``), or else a text. Raises InvalidRequest."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidRequest(f"--input {text!r} cannot be used; expected name=value, with a value like [[1, 2, 3]]")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value
    except RecursionError:
        raise InvalidRequest(f"--input {name}: the value is nested too deeply") from None


def _input(name: str, value: object, datatype: str) -> tuple[dict[str, object], bytes]:
    try:
        array = np.array(value, dtype=object)
        if any(isinstance(element, list) for element in array.flat):
            raise ValueError("rows of different lengths")
        if datatype in ("FP16", "BF16"):
            raw = _half(array, datatype)
            parameters = {"binary_data_size": len(raw)}
            return {"name": name, "datatype": datatype, "shape": array.shape, "parameters": parameters}, raw
    except (ValueError, TypeError, ArithmeticError, RuntimeError):  # the last: more dimensions than numpy has
        raise InvalidRequest(f"input {name!r}: the value is no tensor of {datatype}") from None
    return {"name": name, "datatype": datatype, "shape": array.shape, "data": array.reshape(-1).tolist()}, b""


def _half(array: Array, datatype: str) -> bytes:
    if any(isinstance(element, bool) or not isinstance(element, int | float) for element in array.flat):
        raise TypeError("not all are numbers")
    with np.errstate(over="raise"):
        if datatype == "FP16":
            return array.astype("<f4").astype("<f2").tobytes()
        bits = array.astype("<f4").reshape(-1).view(np.uint32)
    # bfloat16 is the upper half of float32; adding this rounds to nearest, ties to even.
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2").tobytes()


# ------------------------------------------------------------------ read out


def described(answer: Mapping[str, Any], tails: memoryview) -> list[str]:
    """An answer in lines: each output with its type, shape and values, large ones summarised."""
    lines = []
    for output in answer.get("outputs", ()):
        size = (output.get("parameters") or {}).get("binary_data_size")
        raw, tails = (None, tails) if size is None else (tails[:size], tails[size:])
        shape = "x".join(str(dimension) for dimension in output["shape"]) or "scalar"
        lines.append(f"{output['name']}  {output['datatype']} {shape}")
        lines += [f"  {line}" for line in _values(output, raw)]
    parameters = answer.get("parameters") or {}
    if "dormouse_path" in parameters:
        waited, ran = parameters["dormouse_queued_us"] / 1000, parameters["dormouse_device_us"] / 1000
        lines.append(f"path {parameters['dormouse_path']}, waited {waited:.1f} ms, ran {ran:.1f} ms")
    return lines


def _values(output: Mapping[str, Any], raw: memoryview | None) -> Sequence[str]:
    if output["datatype"] == "BYTES":
        texts = output["data"] if raw is None else [text.decode(errors="replace") for text in _texts(raw)]
        more = [f"... {len(texts) - SHOWN_ELEMENTS} more"] if len(texts) > SHOWN_ELEMENTS else []
        return [*(str(text) for text in texts[:SHOWN_ELEMENTS]), *more]
    array = np.array(output["data"]) if raw is None else _array(raw, output["datatype"])
    return _numbers(array.reshape(output["shape"]))


def _array(raw: memoryview, datatype: str) -> Array:
    if datatype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, _DTYPES[datatype])


def _numbers(array: Array) -> list[str]:
    shown = np.array2string(array, threshold=4 * SHOWN_ELEMENTS, edgeitems=3, precision=6, max_line_width=100)
    lines = shown.splitlines()
    if array.size > 4 * SHOWN_ELEMENTS and array.dtype.kind in "fiu":
        wide = array.astype(np.float64)
        lines.append(f"min {wide.min():.6g}, mean {wide.mean():.6g}, max {wide.max():.6g}")
    return lines


def _texts(raw: memoryview) -> list[bytes]:
    texts = []
    while raw:
        end = 4 + struct.unpack_from("<I", raw)[0]
        texts.append(bytes(raw[4:end]))
        raw = raw[end:]
    return texts
