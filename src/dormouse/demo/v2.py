"""KServe V2 with binary tensors, from the client's side: arrays to a request, an answer to arrays.

Written on its own: it shares nothing with the gateway, whose other end it is.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

LENGTH_HEADER = "Inference-Header-Content-Length"

Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = dict[str, Array]

_CODES = {"INT64": "<i8", "FP32": "<f4"}
_DATATYPES = {code: name for name, code in _CODES.items()}


class Request(Struct, frozen=True):
    """Body and headers of a request."""

    body: bytes
    headers: dict[str, str]


class Answer(Struct, frozen=True):
    """What the server says of an answer, and its tensors."""

    path: str
    queued_ms: float
    device_ms: float
    outputs: Arrays


def request_of(inputs: Mapping[str, Array], slo_ms: float | None = None) -> Request:
    """A request for all outputs as raw bytes; ``slo_ms``: by when it should be answered."""
    tensors = [
        {
            "name": name,
            "datatype": _DATATYPES[array.dtype.str],
            "shape": array.shape,
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in inputs.items()
    ]
    parameters: dict[str, object] = {"binary_data_output": True}
    if slo_ms is not None:
        parameters["slo_ms"] = slo_ms
    head = msgspec.json.encode({"inputs": tensors, "parameters": parameters})
    tails = [np.ascontiguousarray(array).tobytes() for array in inputs.values()]
    return Request(b"".join([head, *tails]), {LENGTH_HEADER: str(len(head))})


def answer_of(body: bytes, json_bytes: int) -> Answer:
    """Raises ValueError for what is no answer in binary tensors."""
    try:
        head = msgspec.json.decode(body[:json_bytes], type=dict[str, Any])
        said = head["parameters"]
        return Answer(
            path=said["dormouse_path"],
            queued_ms=said["dormouse_queued_us"] / 1e3,
            device_ms=said["dormouse_device_us"] / 1e3,
            outputs=_outputs(head["outputs"], memoryview(body)[json_bytes:]),
        )
    except (msgspec.DecodeError, KeyError, TypeError) as fault:
        raise ValueError(f"no V2 answer: {fault!r}") from None


def _outputs(described: list[dict[str, Any]], tail: memoryview) -> Arrays:
    outputs = {}
    for output in described:
        size_bytes = output["parameters"]["binary_data_size"]
        values: Array = np.frombuffer(tail[:size_bytes], _CODES[output["datatype"]])
        outputs[output["name"]] = values.reshape(output["shape"])
        tail = tail[size_bytes:]
    if len(tail):
        raise ValueError(f"{len(tail)} bytes belong to no output")
    return outputs
