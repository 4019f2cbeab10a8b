"""KServe V2 whatever the wire: the rules a request must keep, and what answers say. Pure: no server, no I/O.

A wire brings its requests into the form of ``Asked``: named tensors, each with its elements still as they came. What
is checked here is checked for every wire alike. Unknown parameters are ignored, except those that would change the
answer (shared memory, classification): these are refused.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from dormouse.core.types import DEFAULT_PRIORITY, Ns
from dormouse.errors import InvalidRequest
from dormouse.gateway import encoding
from dormouse.submit import Chunk, Description, IndexEntry, Inference
from dormouse.tensors import Signature, Tensor, TensorSpec

SLO_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
"""Headers, or metadata, in which gateways for inference say the deadline; a parameter ``slo_ms`` says it better."""
LARGEST_PRIORITY = 2**32 - 1
LONGEST_NS: Ns = 2**61
"""Longer durations are taken as this one, which is longer than any server runs."""

# Bounded, because a complaint repeats them.
LONGEST_NAME = 256
LONGEST_DATATYPE = 16
MOST_DIMENSIONS = 32

EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "schedule_policy", "statistics")
"""Exactly those that the tests pass."""

_REFUSED_PARAMETERS = {
    "shared_memory_region": "shared memory is not supported; send the data in the request",
    "classification": "the classification extension is not supported; take the scores and rank them",
}


class Contents(Protocol):
    """The elements of one input, in the form its wire has for them."""

    def read(self, where: str, spec: TensorSpec, count: int) -> bytes | memoryview:
        """Raw bytes of ``count`` elements; ``spec`` has the shape that was given. Raises InvalidRequest."""


class GivenInput(Struct, frozen=True):
    """An input as it came."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Mapping[str, object]
    contents: Contents


class AskedOutput(Struct, frozen=True):
    """An output that the client wants."""

    name: str
    parameters: Mapping[str, object]


class Asked(Struct, frozen=True):
    """An infer request, decoded and not yet checked. ``outputs`` empty: all. ``slo_ms`` is from beside the request."""

    inputs: Sequence[GivenInput]
    outputs: Sequence[AskedOutput]
    parameters: Mapping[str, object]
    slo_ms: float | None = None


# ------------------------------------------------------------------ requests


def inference_of(asked: Asked, described: Description, version: str | None, at_most_ns: Ns | None = None) -> Inference:
    """The request, checked against the function's signature. ``at_most_ns``: the client waits no longer than that."""
    inputs = _inputs(asked.inputs, described.signature)
    _check_outputs(asked.outputs, described.signature)
    timeout_ns = _duration(asked.parameters, "timeout", 1_000)
    return Inference(
        described.name,
        inputs,
        version=version,
        outputs=tuple(output.name for output in asked.outputs),
        priority=_priority(asked.parameters),
        timeout_ns=min((each for each in (timeout_ns, at_most_ns) if each is not None), default=None),
        slo_ns=_duration({"slo_ms": asked.slo_ms, **asked.parameters}, "slo_ms", 1_000_000),
        top_k=None if asked.parameters.get("top_k") is None else top_k(asked.parameters["top_k"]),
    )


def promised(headers: Mapping[str, str]) -> float | None:
    """The deadline in milliseconds that a request's headers (lower-case) name. Raises InvalidRequest."""
    for name in SLO_HEADERS:
        value = headers.get(name)
        if value is not None:
            try:
                return float(value)
            except ValueError:
                raise InvalidRequest(f"header {name} is {shown(value)}, expected a number of milliseconds") from None
    return None


def promised_ns(headers: Mapping[str, str]) -> Ns | None:
    """The same in nanoseconds."""
    return _duration({"slo_ms": promised(headers)}, "slo_ms", 1_000_000)


def check_load(parameters: Iterable[str]) -> None:
    """Refuse a load that overrides configuration or brings files; any other parameter is fine."""
    for name in parameters:
        if name == "config" or name.startswith("file:"):
            raise InvalidRequest(
                f"parameter {shown(name)} is not supported by load; deploy the function with what it needs"
            )


def _inputs(given: Iterable[GivenInput], signature: Signature) -> tuple[Tensor, ...]:
    specs = {spec.name: spec for spec in signature.inputs}
    found: dict[str, Tensor] = {}
    for each in given:
        if each.name not in specs:
            raise InvalidRequest(f"input {each.name!r} is unknown; the inputs are {_names(specs)}")
        if each.name in found:
            raise InvalidRequest(f"input {each.name!r} is given twice")
        found[each.name] = _input(each, specs[each.name])
    missing = [spec.name for spec in signature.inputs if not spec.optional and spec.name not in found]
    if missing:
        raise InvalidRequest(f"input {missing[0]!r} is missing; the inputs are {_names(specs)}")
    return tuple(found.values())


def _input(given: GivenInput, spec: TensorSpec) -> Tensor:
    where = f"input {given.name!r}"
    count = encoding.element_count(where, given.datatype, given.shape)
    if given.datatype != spec.datatype:
        raise InvalidRequest(f"{where}: datatype is {given.datatype}, expected {spec.datatype}")
    if not _fits(given.shape, spec.shape):
        raise InvalidRequest(f"{where}: shape is {list(given.shape)}, expected {list(spec.shape)} (-1: any)")
    _refuse_parameters(where, given.parameters)
    data = given.contents.read(where, TensorSpec(given.name, given.datatype, given.shape), count)
    return Tensor(given.name, given.datatype, given.shape, data)


def _fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    return len(shape) == len(expected) and all(
        wanted in (-1, given) for given, wanted in zip(shape, expected, strict=True)
    )


def _check_outputs(outputs: Sequence[AskedOutput], signature: Signature) -> None:
    known = [spec.name for spec in signature.outputs]
    seen: set[str] = set()
    for output in outputs:
        if output.name not in known:
            raise InvalidRequest(f"output {output.name!r} is unknown; the outputs are {_names(known)}")
        if output.name in seen:
            raise InvalidRequest(f"output {output.name!r} is asked for twice")
        _refuse_parameters(f"output {output.name!r}", output.parameters)
        seen.add(output.name)


def selected(outputs: Sequence[AskedOutput], signature: Signature) -> list[TensorSpec]:
    """The outputs that the answer will have."""
    names = {output.name for output in outputs}
    return [spec for spec in signature.outputs if not names or spec.name in names]


# ------------------------------------------------------------------ parameters


def _refuse_parameters(where: str, parameters: Mapping[str, object]) -> None:
    for name, why in _REFUSED_PARAMETERS.items():
        if name in parameters:
            raise InvalidRequest(f"{where}: {why}")


def flag(where: str, name: str, parameters: Mapping[str, object]) -> bool | None:
    """A parameter that is true, false or not given."""
    value = parameters.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise InvalidRequest(f"{where}: {name} is {shown(value)}, expected true or false")


def natural(where: str, name: str, value: object) -> int:
    """A parameter that counts something."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidRequest(f"{where}: {name} is {shown(value)}, expected a whole number of at least 0")
    return value


def _priority(parameters: Mapping[str, object]) -> int:
    """1 is the most urgent; 0 and nothing mean the default."""
    priority = natural("parameter", "priority", parameters.get("priority", 0))
    if priority > LARGEST_PRIORITY:
        raise InvalidRequest(f"parameter: priority is {priority}, expected at most {LARGEST_PRIORITY}")
    return priority or DEFAULT_PRIORITY


def top_k(value: object) -> int:
    """So many labels are wanted."""
    if (wanted := natural("parameter", "top_k", value)) < 1:
        raise InvalidRequest("parameter: top_k is 0, expected at least 1")
    return min(wanted, LARGEST_PRIORITY)


def _duration(parameters: Mapping[str, object], name: str, unit_ns: Ns) -> Ns | None:
    """A duration parameter in nanoseconds; 0 and nothing mean none given."""
    value = parameters.get(name)
    if value is None:
        return None
    endless = isinstance(value, float) and not math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or endless or value < 0:
        raise InvalidRequest(f"parameter: {name} is {shown(value)}, expected a positive number")
    if value >= LONGEST_NS // unit_ns:  # before it is multiplied, which a float might not survive
        return LONGEST_NS
    return round(value * unit_ns) or None


def shown(value: object) -> str:
    """A value from outside as part of one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


# ------------------------------------------------------------------ answers


def reply_parameters(chunk: Chunk) -> dict[str, str | int]:
    """How the answer came about, as parameters of the answer."""
    told: dict[str, str | int] = {
        "dormouse_path": str(chunk.path),
        "dormouse_queued_us": chunk.queued_ns // 1_000,
        "dormouse_device_us": chunk.device_ns // 1_000,
    }
    if chunk.request:
        told["dormouse_request"] = chunk.request
    return told


def ordered(inference: Inference, chunk: Chunk) -> list[Tensor]:
    """The chunk's outputs in the order asked for."""
    if not inference.outputs:
        return list(chunk.outputs)
    tensors = {tensor.name: tensor for tensor in chunk.outputs}
    return [tensors[name] for name in inference.outputs if name in tensors]


def index(entries: Iterable[IndexEntry], *, only_ready: bool) -> list[IndexEntry]:
    """The repository index."""
    return [entry for entry in entries if entry.state == "READY" or not only_ready]
