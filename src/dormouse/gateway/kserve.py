"""KServe V2 over HTTP, parsed and rendered: bodies to Inference, Chunk to bodies. Pure: no server, no I/O.

A request body is JSON, then, under the binary extension, raw tensor bytes in order of the inputs; the header
``Inference-Header-Content-Length`` says where the JSON ends. Answers have the same form. Unknown parameters are
ignored, except those that would change the answer (shared memory, classification): these are refused.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct, field

from dormouse.core.types import DEFAULT_PRIORITY, Ns
from dormouse.errors import InvalidRequest
from dormouse.gateway import encoding
from dormouse.submit import Chunk, Description, IndexEntry, Inference
from dormouse.tensors import Signature, Tensor, TensorSpec

LENGTH_HEADER = "Inference-Header-Content-Length"
LARGEST_PRIORITY = 2**32 - 1
LONGEST_NS: Ns = 2**61
"""Longer durations are taken as this one, which is longer than any server runs."""

_REFUSED_PARAMETERS = {
    "shared_memory_region": "shared memory is not supported; send the data in the body",
    "classification": "the classification extension is not supported; take the scores and rank them",
}


class InferRequest(Struct, frozen=True):
    """A parsed request, and what rendering its answer needs."""

    inference: Inference
    id: str | None
    binary: frozenset[str]
    """Outputs the client wants as raw bytes."""


class Reply(Struct, frozen=True):
    """An answer's body in parts, to be sent one after the other; ``json_bytes`` is set when raw bytes follow JSON."""

    parts: tuple[bytes | memoryview, ...]
    json_bytes: int | None

    @property
    def content_type(self) -> str:
        return "application/json" if self.json_bytes is None else "application/octet-stream"


# ------------------------------------------------------------------ what the wire says


# Bounded, because a complaint repeats them.
_Name = Annotated[str, Meta(max_length=256)]
_Datatype = Annotated[str, Meta(max_length=16)]
_Shape = Annotated[tuple[Annotated[int, Meta(le=2**62)], ...], Meta(max_length=32)]


class _WireTensor(Struct):
    name: _Name
    datatype: _Datatype
    shape: _Shape
    parameters: dict[str, object] | None = None
    data: Raw = field(default_factory=lambda: Raw(b"null"))


class _WireOutput(Struct):
    name: _Name
    parameters: dict[str, object] | None = None


class _WireRequest(Struct):
    inputs: tuple[_WireTensor, ...]
    id: str | None = None
    outputs: tuple[_WireOutput, ...] | None = None
    parameters: dict[str, object] | None = None


class _WireIndex(Struct):
    ready: bool | None = None


class _WireLoad(Struct):
    parameters: dict[str, object] | None = None


Wire = TypeVar("Wire")

_requests = msgspec.json.Decoder(_WireRequest)
_indexes = msgspec.json.Decoder(_WireIndex)
_loads = msgspec.json.Decoder(_WireLoad)


class _Attachments:
    """The raw bytes behind the JSON, handed out front to back without copying."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    def take(self, where: str, size_bytes: int) -> memoryview:
        if size_bytes > len(self._view):
            raise InvalidRequest(
                f"{where}: binary_data_size is {size_bytes}, the body has {len(self._view)} bytes left"
            )
        taken, self._view = self._view[:size_bytes], self._view[size_bytes:]
        return taken


# ------------------------------------------------------------------ requests


def parse_infer(
    body: bytes | bytearray,
    header_length: str | None,
    described: Description,
    version: str | None = None,
    *,
    lines: bool = False,
) -> InferRequest:
    """Read and check an infer request against the function's signature. ``lines``: it is answered in JSON lines."""
    head, attachments = _split(body, header_length)
    wire = _decode(_requests, head)
    parameters = wire.parameters or {}
    signature = described.signature
    inputs = _inputs(wire.inputs, attachments, signature)
    if len(attachments):
        raise InvalidRequest(f"the body ends with {len(attachments)} bytes that belong to no input")
    selected = _selected(wire.outputs or (), signature)
    inference = Inference(
        described.name,
        inputs,
        version=version,
        outputs=tuple(output.name for output in wire.outputs or ()),
        priority=_priority(parameters),
        timeout_ns=_duration(parameters, "timeout", 1_000),
        slo_ns=_duration(parameters, "slo_ms", 1_000_000),
    )
    return InferRequest(inference, wire.id, _binary(selected, parameters, wire.outputs or (), lines))


def parse_index(body: bytes | bytearray) -> bool:
    """Whether a repository index is to list only what is ready. An empty body is fine."""
    return bool(_decode(_indexes, memoryview(body)).ready) if body else False


def check_load(body: bytes | bytearray) -> None:
    """Refuse a load that overrides configuration or brings files; anything else, or nothing, is fine."""
    for name in (_decode(_loads, memoryview(body)).parameters or {}) if body else {}:
        if name == "config" or name.startswith("file:"):
            raise InvalidRequest(f"parameter {name!r} is not supported by load; deploy the function with what it needs")


def _split(body: bytes | bytearray, header_length: str | None) -> tuple[memoryview, _Attachments]:
    view = memoryview(body)
    if header_length is None:
        return view, _Attachments(view[len(view) :])
    length = int(header_length) if re.fullmatch("[0-9]{1,15}", header_length) else -1
    if not 0 <= length <= len(view):
        raise InvalidRequest(f"{LENGTH_HEADER} is {_shown(header_length)}, the body has {len(view)} bytes")
    return view[:length], _Attachments(view[length:])


def _decode(decoder: "msgspec.json.Decoder[Wire]", head: memoryview) -> Wire:
    try:
        return decoder.decode(head)
    except msgspec.DecodeError as fault:
        raise InvalidRequest(f"the request is no valid JSON request: {fault}") from None
    except RecursionError:
        raise InvalidRequest("the request is nested too deeply") from None


def _inputs(wires: Iterable[_WireTensor], attachments: _Attachments, signature: Signature) -> tuple[Tensor, ...]:
    specs = {spec.name: spec for spec in signature.inputs}
    found: dict[str, Tensor] = {}
    for wire in wires:
        if wire.name not in specs:
            raise InvalidRequest(f"input {wire.name!r} is unknown; the inputs are {_names(specs)}")
        if wire.name in found:
            raise InvalidRequest(f"input {wire.name!r} is given twice")
        found[wire.name] = _input(wire, attachments, specs[wire.name])
    missing = [spec.name for spec in signature.inputs if not spec.optional and spec.name not in found]
    if missing:
        raise InvalidRequest(f"input {missing[0]!r} is missing; the inputs are {_names(specs)}")
    return tuple(found.values())


def _input(wire: _WireTensor, attachments: _Attachments, spec: TensorSpec) -> Tensor:
    where = f"input {wire.name!r}"
    count = encoding.element_count(where, wire.datatype, wire.shape)
    if wire.datatype != spec.datatype:
        raise InvalidRequest(f"{where}: datatype is {wire.datatype}, expected {spec.datatype}")
    if not _fits(wire.shape, spec.shape):
        raise InvalidRequest(f"{where}: shape is {list(wire.shape)}, expected {list(spec.shape)} (-1: any)")
    parameters = wire.parameters or {}
    _refuse_parameters(where, parameters)
    given = wire.data != Raw(b"null")
    if "binary_data_size" in parameters and given:
        raise InvalidRequest(f"{where}: has both data and binary_data_size")
    if "binary_data_size" in parameters:
        raw = attachments.take(where, _natural(where, "binary_data_size", parameters["binary_data_size"]))
        encoding.check_binary(where, wire.datatype, count, raw)
        return Tensor(wire.name, wire.datatype, wire.shape, raw)
    if not given:
        raise InvalidRequest(f"{where}: data is missing")
    return Tensor(
        wire.name, wire.datatype, wire.shape, encoding.from_json(where, wire.datatype, wire.shape, count, wire.data)
    )


def _fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    return len(shape) == len(expected) and all(
        wanted in (-1, given) for given, wanted in zip(shape, expected, strict=True)
    )


def _selected(outputs: Sequence[_WireOutput], signature: Signature) -> list[TensorSpec]:
    """The outputs that the answer will have."""
    specs = {spec.name: spec for spec in signature.outputs}
    seen: set[str] = set()
    for output in outputs:
        if output.name not in specs:
            raise InvalidRequest(f"output {output.name!r} is unknown; the outputs are {_names(specs)}")
        if output.name in seen:
            raise InvalidRequest(f"output {output.name!r} is asked for twice")
        _refuse_parameters(f"output {output.name!r}", output.parameters or {})
        seen.add(output.name)
    return [spec for spec in signature.outputs if not seen or spec.name in seen]


def _binary(
    selected: Sequence[TensorSpec], parameters: dict[str, object], outputs: Sequence[_WireOutput], lines: bool
) -> frozenset[str]:
    """Which outputs go out as raw bytes: an output's own parameter, else the request's. Refuses what cannot go out."""
    general = _flag("parameter", "binary_data_output", parameters)
    own = {output.name: _flag(f"output {output.name!r}", "binary_data", output.parameters or {}) for output in outputs}
    wanted = {spec.name: general if own.get(spec.name) is None else own[spec.name] for spec in selected}
    for spec in selected:
        if lines and wanted[spec.name]:
            raise InvalidRequest(f"output {spec.name!r}: JSON lines cannot carry binary data; ask for one or the other")
        if spec.datatype in encoding.BINARY_ONLY and not wanted[spec.name]:
            raise encoding.needs_binary(f"output {spec.name!r}", f"{spec.datatype} has no JSON form")
    return frozenset(name for name, binary in wanted.items() if binary)


def _refuse_parameters(where: str, parameters: dict[str, object]) -> None:
    for name, why in _REFUSED_PARAMETERS.items():
        if name in parameters:
            raise InvalidRequest(f"{where}: {why}")


def _flag(where: str, name: str, parameters: dict[str, object]) -> bool | None:
    value = parameters.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise InvalidRequest(f"{where}: {name} is {_shown(value)}, expected true or false")


def _natural(where: str, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidRequest(f"{where}: {name} is {_shown(value)}, expected a whole number of at least 0")
    return value


def _priority(parameters: dict[str, object]) -> int:
    """1 is the most urgent; 0 and nothing mean the default."""
    priority = _natural("parameter", "priority", parameters.get("priority", 0))
    if priority > LARGEST_PRIORITY:
        raise InvalidRequest(f"parameter: priority is {priority}, expected at most {LARGEST_PRIORITY}")
    return priority or DEFAULT_PRIORITY


def _duration(parameters: dict[str, object], name: str, unit_ns: Ns) -> Ns | None:
    """A duration parameter in nanoseconds; 0 and nothing mean none given."""
    value = parameters.get(name)
    if value is None:
        return None
    endless = isinstance(value, float) and not math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or endless or value < 0:
        raise InvalidRequest(f"parameter: {name} is {_shown(value)}, expected a positive number")
    if value >= LONGEST_NS // unit_ns:  # before it is multiplied, which a float might not survive
        return LONGEST_NS
    return round(value * unit_ns) or None


def _shown(value: object) -> str:
    """A value from outside as part of one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


# ------------------------------------------------------------------ answers


def render_infer(request: InferRequest, chunk: Chunk) -> Reply:
    """One answer, as JSON or as JSON and raw bytes."""
    tails = [tensor.data for tensor in _ordered(request, chunk) if tensor.name in request.binary]
    head = msgspec.json.encode(_answer(request, chunk))
    if not request.binary:
        return Reply((head,), None)
    return Reply((head, *(tail for tail in tails if len(tail))), len(head))


def render_line(request: InferRequest, chunk: Chunk) -> bytes:
    """One chunk as a line of JSON."""
    return msgspec.json.encode(_answer(request, chunk)) + b"\n"


def _answer(request: InferRequest, chunk: Chunk) -> dict[str, object]:
    answer: dict[str, object] = {"model_name": request.inference.name, "model_version": chunk.version}
    if request.id is not None:
        answer["id"] = request.id
    answer["parameters"] = {
        "dormouse_path": chunk.path,
        "dormouse_queued_us": chunk.queued_ns // 1_000,
        "dormouse_device_us": chunk.device_ns // 1_000,
    }
    answer["outputs"] = [_output(tensor, tensor.name in request.binary) for tensor in _ordered(request, chunk)]
    return answer


def _ordered(request: InferRequest, chunk: Chunk) -> list[Tensor]:
    """The chunk's outputs in the order asked for."""
    if not request.inference.outputs:
        return list(chunk.outputs)
    tensors = {tensor.name: tensor for tensor in chunk.outputs}
    return [tensors[name] for name in request.inference.outputs if name in tensors]


def _output(tensor: Tensor, binary: bool) -> dict[str, object]:
    output: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
    if binary:
        output["parameters"] = {"binary_data_size": len(tensor.data)}
    else:
        output["data"] = encoding.to_json(f"output {tensor.name!r}", tensor.datatype, tensor.data)
    return output


def metadata(described: Description) -> dict[str, object]:
    """Model metadata."""
    return {
        "name": described.name,
        "versions": described.versions,
        "platform": described.platform,
        "inputs": [_tensor_metadata(spec) for spec in described.signature.inputs],
        "outputs": [_tensor_metadata(spec) for spec in described.signature.outputs],
    }


def _tensor_metadata(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}


def index(entries: Iterable[IndexEntry], *, only_ready: bool) -> list[IndexEntry]:
    """The repository index."""
    return [entry for entry in entries if entry.state == "READY" or not only_ready]
