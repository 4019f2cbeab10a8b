"""Random bytes and mutated messages over gRPC: each is answered or refused, and the server goes on serving.

``DORMOUSE_FUZZ`` says how many are made up in each test; `make fuzz` makes 5,000.
"""

import os
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dormouse.gateway.grpc_messages import HEALTH, INFERENCE, message
from tests.shell.grpc_caller import METHODS, Caller, InferRequest, Refused, raw_request
from tests.shell.in_memory import PROGRAMS
from tests.shell.running import RunningServer, running
from tests.shell.samples import ROW

IN_CI = 300
"""Always the same ones."""
WANTED = int(os.environ.get("DORMOUSE_FUZZ", IN_CI))
INFER = f"/{INFERENCE}/ModelInfer"
STREAM = f"/{INFERENCE}/ModelStreamInfer"
UNARY = sorted(METHODS.keys() - {STREAM})
KNOWN = sorted(PROGRAMS.keys() - {"fault"})
"""Functions that do not fail on purpose."""
MEANT = {"INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE"}
"""How a request may be refused that is wrong, or about what is not there."""

fuzzing = settings(
    max_examples=WANTED,
    deadline=None,
    database=None,
    derandomize=WANTED == IN_CI,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def caller(fuzzed: RunningServer) -> Iterator[Caller]:
    with Caller(fuzzed.grpc) as caller:
        yield caller


def answered_or_refused(caller: Caller, path: str, wire: bytes) -> bool:
    """Whether it was answered. Every refusal is one line, and means the request."""
    try:
        METHODS[path].response.FromString(caller.send(path, wire))
    except Refused as refusal:
        assert refusal.status in MEANT, str(refusal)
        assert refusal.text
        assert "\n" not in refusal.text
        return False
    return True


def still_serves(caller: Caller) -> None:
    answer = caller.infer(raw_request("affine", "FP32", ROW))
    assert answer.raw_output_contents[0] == (ROW * 2 + 1).tobytes()


# ------------------------------------------------------------------ what is sent


names = st.sampled_from(["x", "y", "total", "", "é", *KNOWN]) | st.text(max_size=8)
models = st.sampled_from(KNOWN) | names
numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 5)
datatypes = st.sampled_from(sorted({spec.datatype for _, made in PROGRAMS.values() for spec in made.inputs})) | names


@st.composite
def parameters(draw: st.DrawFn, target: Any) -> None:
    known = ["priority", "timeout", "slo_ms", "binary_data_output", "binary_data", "shared_memory_region"]
    for name in draw(st.lists(st.sampled_from(known) | st.text(max_size=4), max_size=3)):
        choice = draw(st.sampled_from(["bool_param", "int64_param", "string_param", "double_param", "uint64_param"]))
        values: dict[str, st.SearchStrategy[Any]] = {
            "bool_param": st.booleans(),
            "int64_param": numbers,
            "string_param": names,
            "double_param": st.floats(),
            "uint64_param": st.integers(0, 2**64 - 1),
        }
        setattr(target[name], choice, draw(values[choice]))


@st.composite
def contents(draw: st.DrawFn, target: Any) -> None:
    """Some elements in one or two of the fields."""
    elements: dict[str, st.SearchStrategy[Any]] = {
        "bool_contents": st.booleans(),
        "int_contents": st.integers(-(2**31), 2**31 - 1),
        "int64_contents": numbers,
        "uint_contents": st.integers(0, 2**32 - 1),
        "uint64_contents": st.integers(0, 2**64 - 1),
        "fp32_contents": st.floats(width=32),
        "fp64_contents": st.floats(),
        "bytes_contents": st.binary(max_size=5),
    }
    for field in draw(st.lists(st.sampled_from(sorted(elements)), max_size=2)):
        getattr(target, field).extend(draw(st.lists(elements[field], max_size=6)))


@st.composite
def infer_requests(draw: st.DrawFn) -> bytes:
    """Requests whose every field may be right or wrong."""
    request = InferRequest(model_name=draw(models), model_version=draw(st.sampled_from(["", "", "1", "9", "x"])))
    request.id = draw(names)
    draw(parameters(request.parameters))
    for _ in range(draw(st.integers(0, 3))):
        shape = draw(st.sampled_from([(1, 3), (2,), (1, 1), (1, 2), ()]) | st.lists(numbers, max_size=4))
        given = request.inputs.add(name=draw(names), datatype=draw(datatypes), shape=shape)
        draw(parameters(given.parameters))
        if draw(st.booleans()):
            draw(contents(given.contents))
    for name in draw(st.lists(names, max_size=2)):
        draw(parameters(request.outputs.add(name=name).parameters))
    request.raw_input_contents.extend(draw(st.lists(st.binary(max_size=16), max_size=3)))
    wire: bytes = request.SerializeToString()
    return wire


def valid_request(model: str) -> bytes:
    """A request that the function takes."""
    (spec,) = PROGRAMS[model][1].inputs
    shape = [2 if dimension == -1 else dimension for dimension in spec.shape]
    element = b"\x01\0\0\0a" if spec.datatype == "BYTES" else bytes(SIZES[spec.datatype])
    request = InferRequest(model_name=model, id="valid")
    request.inputs.add(name=spec.name, datatype=spec.datatype, shape=shape)
    count = 1
    for dimension in shape:
        count *= dimension
    request.raw_input_contents.append(element * count)
    wire: bytes = request.SerializeToString()
    return wire


SIZES = {"BOOL": 1, "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8} | {
    f"{kind}{bits}": bits // 8 for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)
}


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid request of which some bytes were changed, lost, doubled or put in."""
    wire = bytearray(valid_request(draw(st.sampled_from(KNOWN))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(wire) - 1)))
        match draw(st.sampled_from(["change", "lose", "double", "put in", "cut"])):
            case "change" if wire:
                wire[at] = draw(st.integers(0, 255))
            case "lose":
                del wire[at : at + draw(st.integers(1, 4))]
            case "double":
                wire[at:at] = wire[at : at + 16]
            case "put in":
                wire[at:at] = draw(st.binary(max_size=8))
            case "cut":
                del wire[at:]
    return bytes(wire)


# ------------------------------------------------------------------ tests


@fuzzing
@given(path=st.sampled_from(UNARY), wire=st.binary(max_size=300))
def test_random_bytes_to_any_call_are_answered_or_refused(caller: Caller, path: str, wire: bytes) -> None:
    answered_or_refused(caller, path, wire)


@fuzzing
@given(wire=mutated())
def test_mutated_requests_are_answered_or_refused(caller: Caller, fuzzed: RunningServer, wire: bytes) -> None:
    fuzzed.node.furnish()
    answered_or_refused(caller, INFER, wire)


@fuzzing
@given(wire=infer_requests())
def test_made_up_requests_are_answered_or_refused(caller: Caller, fuzzed: RunningServer, wire: bytes) -> None:
    fuzzed.node.furnish()
    answered_or_refused(caller, INFER, wire)


@settings(fuzzing, max_examples=max(1, WANTED // 10))
@given(wires=st.lists(st.binary(max_size=100) | mutated() | infer_requests(), max_size=10))
def test_a_stream_of_anything_has_an_end(caller: Caller, fuzzed: RunningServer, wires: list[bytes]) -> None:
    fuzzed.node.furnish()
    answers = list(caller.stream(wires))
    final = [each for each in answers if each.infer_response.parameters["triton_final_response"].bool_param]
    empty = len(wires) - len(final)
    assert 0 <= empty <= sum(b"running_total" in wire for wire in wires), "each request has one last answer"
    assert all("internal error" not in each.error_message for each in answers)


@pytest.mark.parametrize("model", KNOWN)
def test_what_is_mutated_was_valid(caller: Caller, fuzzed: RunningServer, model: str) -> None:
    fuzzed.node.furnish()
    assert answered_or_refused(caller, INFER, valid_request(model))


def test_garbage_below_the_messages_stops_nobody(caller: Caller, fuzzed: RunningServer) -> None:
    """Broken HTTP/2: frames of random types and lengths behind a proper beginning."""
    chance = random.Random(7)
    host, _, port = fuzzed.grpc.rpartition(":")
    settings_frame = bytes.fromhex("000000040000000000")
    for _ in range(max(20, WANTED // 10)):
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            garbage = chance.randbytes(chance.randrange(1, 400))
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings_frame + garbage)
    still_serves(caller)


def test_the_server_still_serves_after_all_that(caller: Caller, fuzzed: RunningServer) -> None:
    fuzzed.node.furnish()
    still_serves(caller)
    assert caller.ask("ServerLive").live
    check = message("HealthCheckRequest", HEALTH)
    assert answered_or_refused(caller, f"/{HEALTH}/Check", check().SerializeToString())
