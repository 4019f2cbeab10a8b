"""V2 messages over gRPC, to and from what kserve.py checks. Pure: no server, no I/O.

Tensors travel as raw bytes or as typed contents, one way for all tensors of a message. An answer comes the way its
request came, unless ``binary_data_output`` says otherwise, or one of its outputs has no typed form.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from dormouse.core.types import Ns
from dormouse.errors import InvalidRequest
from dormouse.gateway import encoding
from dormouse.gateway.grpc_messages import Message, message
from dormouse.gateway.kserve import (
    LONGEST_DATATYPE,
    LONGEST_NAME,
    MOST_DIMENSIONS,
    Asked,
    AskedOutput,
    Contents,
    GivenInput,
    flag,
    inference_of,
    ordered,
    reply_parameters,
    selected,
    shown,
)
from dormouse.gateway.reports import Report
from dormouse.submit import Chunk, Description, IndexEntry, Inference
from dormouse.tensors import Tensor, TensorSpec

FIELDS = {
    "BOOL": ("bool_contents", "?"),
    "UINT8": ("uint_contents", "u4"),
    "UINT16": ("uint_contents", "u4"),
    "UINT32": ("uint_contents", "u4"),
    "UINT64": ("uint64_contents", "u8"),
    "INT8": ("int_contents", "i4"),
    "INT16": ("int_contents", "i4"),
    "INT32": ("int_contents", "i4"),
    "INT64": ("int64_contents", "i8"),
    "FP32": ("fp32_contents", "f4"),
    "FP64": ("fp64_contents", "f8"),
    "BYTES": ("bytes_contents", "O"),
}
"""Where a datatype's elements are among typed contents, and what they are there in numpy's words."""

_Response = message("ModelInferResponse")
_StreamResponse = message("ModelStreamInferResponse")


class InferRequest(Struct, frozen=True):
    """A parsed request, and what rendering its answer needs."""

    inference: Inference
    id: str
    raw: bool
    """Whether the answer's tensors go out as raw bytes."""


# ------------------------------------------------------------------ requests


class Terms(Struct, frozen=True):
    """What a call says beside its message: the client waits no longer than ``at_most_ns``, and hopes for ``slo_ms``."""

    at_most_ns: Ns | None = None
    slo_ms: float | None = None


def parse_infer(wire: Message, described: Description, version: str | None, terms: Terms) -> InferRequest:
    """Check an infer request against the function's signature."""
    parameters = _parameters(wire.parameters)
    outputs = [AskedOutput(_name("output", each.name), _parameters(each.parameters)) for each in wire.outputs]
    asked = Asked(_given(wire), outputs, parameters, terms.slo_ms)
    inference = inference_of(asked, described, version, terms.at_most_ns)
    return InferRequest(inference, wire.id, _answers_raw(wire, asked, selected(outputs, described.signature)))


def _given(wire: Message) -> Sequence[GivenInput]:
    raw, inputs = wire.raw_input_contents, wire.inputs
    if raw and len(raw) != len(inputs):
        raise InvalidRequest(
            f"raw_input_contents has {len(raw)} entries for {len(inputs)} inputs; send one for each, or none"
        )
    contents: Iterable[Contents] = (
        [_Raw(data, each.HasField("contents")) for data, each in zip(raw, inputs, strict=True)]
        if raw
        else [_Typed(each.contents) for each in inputs]
    )
    return [_input(each, data) for each, data in zip(inputs, contents, strict=True)]


def _input(wire: Message, contents: Contents) -> GivenInput:
    name = _name("input", wire.name)
    if len(wire.datatype) > LONGEST_DATATYPE:
        raise InvalidRequest(f"input {name!r}: datatype {shown(wire.datatype)} is unknown")
    if len(wire.shape) > MOST_DIMENSIONS:
        raise InvalidRequest(f"input {name!r}: shape has {len(wire.shape)} dimensions, {MOST_DIMENSIONS} are the most")
    return GivenInput(name, wire.datatype, tuple(wire.shape), _parameters(wire.parameters), contents)


def _name(what: str, name: str) -> str:
    if len(name) > LONGEST_NAME:
        raise InvalidRequest(f"{what} {shown(name)} is unknown; no name has more than {LONGEST_NAME} characters")
    return name


def _parameters(wires: Mapping[str, Message]) -> dict[str, object]:
    """Parameters as plain values; one with nothing in it is as good as none."""
    parameters: dict[str, object] = {}
    for name, wire in wires.items():
        chosen = wire.WhichOneof("parameter_choice")
        if chosen is not None:
            parameters[name] = getattr(wire, chosen)
    return parameters


class _Raw(Struct, frozen=True):
    """An input among ``raw_input_contents``."""

    data: bytes
    has_contents: bool

    def read(self, where: str, spec: TensorSpec, count: int) -> bytes | memoryview:
        if self.has_contents:
            raise InvalidRequest(f"{where}: has contents beside raw_input_contents; send one or the other")
        encoding.check_binary(where, spec.datatype, count, memoryview(self.data))
        return self.data


class _Typed(Struct, frozen=True):
    """An input with ``contents`` of its own."""

    contents: Message

    def read(self, where: str, spec: TensorSpec, count: int) -> bytes | memoryview:
        if spec.datatype in encoding.BINARY_ONLY:
            raise InvalidRequest(f"{where}: {spec.datatype} has no typed contents; send it in raw_input_contents")
        wanted, wide = FIELDS[spec.datatype]
        for field, _ in self.contents.ListFields():
            if field.name != wanted:
                raise InvalidRequest(f"{where}: has {field.name}, {spec.datatype} takes {wanted}")
        values = getattr(self.contents, wanted)
        if len(values) != count:
            raise InvalidRequest(f"{where}: contents has {len(values)} elements, its shape takes {count}")
        if spec.datatype == "BYTES":
            return encoding.prefixed(values)
        return encoding.from_numbers(where, spec.datatype, values, wide)


def _answers_raw(wire: Message, asked: Asked, specs: Sequence[TensorSpec]) -> bool:
    wanted = flag("parameter", "binary_data_output", asked.parameters)
    if wanted is None:
        wanted = bool(wire.raw_input_contents) or not wire.inputs
    return wanted or any(spec.datatype in encoding.BINARY_ONLY for spec in specs)


def parse_operation(wire: Message) -> tuple[str, Mapping[str, object]]:
    """The function to load or unload, and the parameters."""
    return model_named(wire), _parameters(wire.parameters)


def model_named(wire: Message) -> str:
    """The function that a repository call is about, in Triton's place for its name or in KServe's."""
    name: str = wire.model_name or wire.repository_name
    return name


# ------------------------------------------------------------------ answers


def render_infer(request: InferRequest, chunk: Chunk) -> Message:
    """One answer."""
    answer = _Response(model_name=request.inference.name, model_version=chunk.version, id=request.id)
    for name, value in reply_parameters(chunk).items():
        _set(answer.parameters[name], value)
    for tensor in ordered(request.inference, chunk):
        output = answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if request.raw:
            answer.raw_output_contents.append(bytes(tensor.data))
        else:
            getattr(output.contents, FIELDS[tensor.datatype][0]).extend(_values(tensor))
    return answer


def render_streamed(request: InferRequest, chunk: Chunk) -> Message:
    """One chunk of a stream; a parameter says whether it is its request's last."""
    answer = render_infer(request, chunk)
    answer.parameters["triton_final_response"].bool_param = chunk.final
    return _StreamResponse(infer_response=answer)


def render_failed(name: str, id_: str, text: str) -> Message:
    """What a stream says of a request that failed, and which one it was."""
    answer = _StreamResponse(error_message=text, infer_response=_Response(model_name=name, id=id_))
    answer.infer_response.parameters["triton_final_response"].bool_param = True
    return answer


def _set(parameter: Message, value: str | int) -> None:
    if isinstance(value, str):
        parameter.string_param = value
    else:
        parameter.int64_param = value


def _values(tensor: Tensor) -> Iterable[object]:
    where = f"output {tensor.name!r}"
    if tensor.datatype == "BYTES":
        return [bytes(element) for element in encoding.elements(where, tensor.data)]
    values: list[object] = np.frombuffer(tensor.data, encoding.DTYPES[tensor.datatype]).tolist()
    return values


def filled(kind: Message, report: Report) -> Message:
    """A message with the values of a report, whose names are the message's."""
    answer = kind()
    _fill(answer, report)
    return answer


def _fill(target: Message, report: Mapping[str, object]) -> None:
    for name, value in report.items():
        field = getattr(target, name)
        match value:
            case Mapping() if target.DESCRIPTOR.fields_by_name[name].message_type.GetOptions().map_entry:
                for key, inner in value.items():
                    _fill(field[key], inner)
            case Mapping():
                field.SetInParent()
                _fill(field, value)
            case list() | tuple() if value and isinstance(value[0], Mapping):
                for inner in value:
                    _fill(field.add(), inner)
            case list() | tuple():
                field.extend(value)
            case _:
                _assign(target, name, value)


def _assign(target: Message, name: str, value: object) -> None:
    """Scalars; an enumeration's values are written by name."""
    kind = target.DESCRIPTOR.fields_by_name[name].enum_type
    setattr(target, name, value if kind is None else kind.values_by_name[value].number)


def render_index(kind: Message, entries: Iterable[IndexEntry]) -> Message:
    """The repository index."""
    answer = kind()
    for entry in entries:
        answer.models.add(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
    return answer
