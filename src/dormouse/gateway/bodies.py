"""V2 bodies over HTTP: JSON and the binary extension, to and from what kserve.py checks. Pure: no server, no I/O.

A request body is JSON, then, under the binary extension, raw tensor bytes in order of the inputs; the header
``Inference-Header-Content-Length`` says where the JSON ends. Answers have the same form.
"""

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct, field

from dormouse.core.types import Bytes
from dormouse.errors import InvalidRequest
from dormouse.gateway import encoding, json_numbers, json_pieces
from dormouse.gateway.kserve import (
    LONGEST_DATATYPE,
    LONGEST_NAME,
    MOST_DIMENSIONS,
    Asked,
    AskedOutput,
    GivenInput,
    flag,
    inference_of,
    natural,
    ordered,
    reply_parameters,
    selected,
    shown,
)
from dormouse.submit import Chunk, Description, Inference
from dormouse.tensors import Tensor, TensorSpec

LARGE_BYTES: Bytes = 256 * 1024
"""From here on a body is read in pieces."""
LENGTH_HEADER = "Inference-Header-Content-Length"


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


_Name = Annotated[str, Meta(max_length=LONGEST_NAME)]
_Datatype = Annotated[str, Meta(max_length=LONGEST_DATATYPE)]
_Shape = Annotated[tuple[Annotated[int, Meta(le=2**62)], ...], Meta(max_length=MOST_DIMENSIONS)]


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


class _WireOperation(Struct):
    parameters: dict[str, object] | None = None


Wire = TypeVar("Wire")

_requests = msgspec.json.Decoder(_WireRequest)
_indexes = msgspec.json.Decoder(_WireIndex)
_operations = msgspec.json.Decoder(_WireOperation)


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


class _Contents(Struct, frozen=True):
    """One input's elements: as JSON in its ``data``, or among the attachments."""

    data: Raw
    parameters: Mapping[str, object]
    attachments: _Attachments
    large: bytes | memoryview | InvalidRequest | None = None
    """What ``data`` was, or what is wrong with it, if it has been read already."""

    def read(self, where: str, spec: TensorSpec, count: int) -> bytes | memoryview:
        given = self.data != Raw(b"null")
        size = self.parameters.get("binary_data_size", _ABSENT)
        if size is not _ABSENT and given:
            raise InvalidRequest(f"{where}: has both data and binary_data_size")
        if size is not _ABSENT:
            raw = self.attachments.take(where, natural(where, "binary_data_size", size))
            encoding.check_binary(where, spec.datatype, count, raw)
            return raw
        if not given:
            raise InvalidRequest(f"{where}: data is missing")
        if isinstance(self.large, InvalidRequest):
            raise self.large
        if self.large is not None:
            return self.large
        return encoding.from_json(where, spec.datatype, spec.shape, count, self.data)


_ABSENT = object()
_LONGEST_TOKEN = 64
_Read = dict[str, bytes | memoryview | InvalidRequest]
"""By input, what has been read in pieces."""


# ------------------------------------------------------------------ requests


def parse_infer(
    body: bytes | bytearray,
    header_length: str | None,
    described: Description,
    version: str | None = None,
    *,
    lines: bool = False,
    slo_ms: float | None = None,
) -> InferRequest:
    """Read and check an infer request against the function's signature. ``lines``: it is answered in JSON lines;
    ``slo_ms``: what its headers say."""
    head, attachments = _split(body, header_length)
    wire = _decode(_requests, head)
    return _checked(wire, attachments, {}, described, version, lines=lines, slo_ms=slo_ms)


def parse_pieces(
    body: bytes | bytearray,
    header_length: str | None,
    described: Description,
    version: str | None = None,
    *,
    lines: bool = False,
    slo_ms: float | None = None,
) -> Generator[None, None, InferRequest]:
    """The same of a large body, with a pause after each piece of it."""
    head, attachments = _split(body, header_length)
    rest, regions = yield from json_numbers.cut_out(body, len(head))
    wire = _decode(_requests, rest)
    read: _Read = {}
    expected = {spec.name: spec.datatype for spec in described.signature.inputs}
    for tensor in wire.inputs:
        region = regions.get(bytes(tensor.data)) if len(tensor.data) < _LONGEST_TOKEN else None
        if region is not None and tensor.name not in read and expected.get(tensor.name) == tensor.datatype:
            read[tensor.name] = yield from _large(tensor, region)
    return _checked(wire, attachments, read, described, version, lines=lines, slo_ms=slo_ms)


def _large(tensor: _WireTensor, region: memoryview) -> Generator[None, None, bytes | memoryview | InvalidRequest]:
    where = f"input {tensor.name!r}"
    try:
        count = encoding.element_count(where, tensor.datatype, tensor.shape)
        return (yield from json_numbers.read(where, tensor.datatype, tensor.shape, count, region))
    except InvalidRequest as fault:  # which is said if nothing else is wrong before
        return fault


def _checked(
    wire: _WireRequest,
    attachments: _Attachments,
    read: "_Read",
    described: Description,
    version: str | None,
    *,
    lines: bool,
    slo_ms: float | None,
) -> InferRequest:
    asked = _asked(wire, attachments, read, slo_ms)
    inference = inference_of(asked, described, version)
    if len(attachments):
        raise InvalidRequest(f"the body ends with {len(attachments)} bytes that belong to no input")
    return InferRequest(inference, wire.id, _binary(asked, selected(asked.outputs, described.signature), lines))


def _asked(wire: _WireRequest, attachments: _Attachments, read: "_Read", slo_ms: float | None) -> Asked:
    inputs = []
    for tensor in wire.inputs:
        parameters = tensor.parameters or {}
        contents = _Contents(tensor.data, parameters, attachments, read.get(tensor.name))
        inputs.append(GivenInput(tensor.name, tensor.datatype, tensor.shape, parameters, contents))
    outputs = [AskedOutput(output.name, output.parameters or {}) for output in wire.outputs or ()]
    return Asked(inputs, outputs, wire.parameters or {}, slo_ms)


def parse_index(body: bytes | bytearray) -> bool:
    """Whether a repository index is to list only what is ready. An empty body is fine."""
    return bool(_decode(_indexes, memoryview(body)).ready) if body else False


def parse_operation(body: bytes | bytearray) -> Mapping[str, object]:
    """The parameters of a load or unload. An empty body is fine."""
    return (_decode(_operations, memoryview(body)).parameters or {}) if body else {}


def _split(body: bytes | bytearray, header_length: str | None) -> tuple[memoryview, _Attachments]:
    view = memoryview(body)
    if header_length is None:
        return view, _Attachments(view[len(view) :])
    length = int(header_length) if re.fullmatch("[0-9]{1,15}", header_length) else -1
    if not 0 <= length <= len(view):
        raise InvalidRequest(f"{LENGTH_HEADER} is {shown(header_length)}, the body has {len(view)} bytes")
    return view[:length], _Attachments(view[length:])


def _decode(decoder: "msgspec.json.Decoder[Wire]", head: bytes | memoryview) -> Wire:
    try:
        return decoder.decode(head)
    except msgspec.DecodeError as fault:
        raise InvalidRequest(f"the request is no valid JSON request: {fault}") from None
    except RecursionError:
        raise InvalidRequest("the request is nested too deeply") from None


def _binary(asked: Asked, specs: Sequence[TensorSpec], lines: bool) -> frozenset[str]:
    """Which outputs go out as raw bytes: an output's own parameter, else the request's. Refuses what cannot go out."""
    general = flag("parameter", "binary_data_output", asked.parameters)
    own = {output.name: flag(f"output {output.name!r}", "binary_data", output.parameters) for output in asked.outputs}
    wanted = {spec.name: general if own.get(spec.name) is None else own[spec.name] for spec in specs}
    for spec in specs:
        if lines and wanted[spec.name]:
            raise InvalidRequest(f"output {spec.name!r}: JSON lines cannot carry binary data; ask for one or the other")
        if spec.datatype in encoding.BINARY_ONLY and not wanted[spec.name]:
            raise encoding.needs_binary(f"output {spec.name!r}", f"{spec.datatype} has no JSON form")
    return frozenset(name for name, binary in wanted.items() if binary)


# ------------------------------------------------------------------ answers


def render_infer(request: InferRequest, chunk: Chunk) -> Reply:
    """One answer, as JSON or as JSON and raw bytes."""
    head = msgspec.json.encode(_answer(request, chunk))
    if not request.binary:
        return Reply((head,), None)
    return Reply((head, *tails(request, chunk)), len(head))


def tails(request: InferRequest, chunk: Chunk) -> list[bytes | memoryview]:
    """The raw bytes behind the JSON."""
    return [t.data for t in ordered(request.inference, chunk) if t.name in request.binary and len(t.data)]


def render_line(request: InferRequest, chunk: Chunk) -> bytes:
    """One chunk as a line of JSON."""
    return msgspec.json.encode(_answer(request, chunk)) + b"\n"


def _answer(request: InferRequest, chunk: Chunk) -> dict[str, object]:
    answer = _envelope(request, chunk)
    answer["outputs"] = [_output(tensor, tensor.name in request.binary) for tensor in ordered(request.inference, chunk)]
    return answer


def _envelope(request: InferRequest, chunk: Chunk) -> dict[str, object]:
    answer: dict[str, object] = {"model_name": request.inference.name, "model_version": chunk.version}
    if request.id is not None:
        answer["id"] = request.id
    answer["parameters"] = reply_parameters(chunk)
    return answer


def _output(tensor: Tensor, binary: bool) -> dict[str, object]:
    output = _introduced(tensor)
    if binary:
        output["parameters"] = {"binary_data_size": len(tensor.data)}
    else:
        output["data"] = encoding.to_json(_where(tensor), tensor.datatype, tensor.data)
    return output


def _introduced(tensor: Tensor) -> dict[str, object]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}


def _where(tensor: Tensor) -> str:
    return f"output {tensor.name!r}"


# ------------------------------------------------------------------ large answers


def is_large(request: InferRequest, chunk: Chunk) -> bool:
    """Whether its JSON takes so long to write that it is written in pieces."""
    for tensor in chunk.outputs:  # asked of every answer: a generator would cost more than what it asks
        if len(tensor.data) >= json_pieces.LARGE_BYTES and tensor.name not in request.binary:
            return True
    return False


def check_large(request: InferRequest, chunk: Chunk) -> Iterator[None]:
    """All that rendering it would refuse; a pause after each piece. Raises InvalidRequest."""
    for tensor in chunk.outputs:
        if tensor.name not in request.binary:
            yield from json_pieces.checked(_where(tensor), tensor)


def render_pieces(request: InferRequest, chunk: Chunk) -> Iterator[bytes]:
    """What ``render_infer`` has as JSON, in pieces, each made when it is asked for; after ``check_large``."""
    text = msgspec.json.encode(_envelope(request, chunk))[:-1] + b',"outputs":['
    for tensor in ordered(request.inference, chunk):
        if tensor.name in request.binary or not json_pieces.is_large(tensor):
            text += msgspec.json.encode(_output(tensor, tensor.name in request.binary)) + b","
            continue
        yield text + msgspec.json.encode(_introduced(tensor))[:-1] + b',"data":['
        yield from json_pieces.written(_where(tensor), tensor)
        text = b"]},"
    yield text[:-1] + b"]}"
