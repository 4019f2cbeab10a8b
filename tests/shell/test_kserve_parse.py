"""The V2 bodies, without a server: every datatype in every form, and every complaint."""

import itertools
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.types import DEFAULT_PRIORITY, Path
from dormouse.errors import InvalidRequest
from dormouse.gateway.bodies import (
    LENGTH_HEADER,
    InferRequest,
    parse_index,
    parse_infer,
    parse_operation,
    render_infer,
    render_line,
)
from dormouse.gateway.kserve import check_load
from dormouse.submit import Chunk, Description
from dormouse.tensors import Signature, Tensor, TensorSpec

DTYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP32": "<f4",
    "FP64": "<f8",
}
Nested = Any
"""A JSON value: lists in lists."""


def description(datatype: str = "FP32", rank: int = 2, *others: TensorSpec) -> Description:
    free = (-1,) * rank
    return Description(
        "f", ("1",), "test", Signature((TensorSpec("x", datatype, free), *others), (TensorSpec("y", datatype, free),))
    )


def parse(
    request: object, described: Description | None = None, raw: bytes = b"", *, lines: bool = False
) -> InferRequest:
    head = json.dumps(request).encode()
    return parse_infer(head + raw, str(len(head)) if raw else None, described or description(), lines=lines)


def request_of(datatype: str, shape: object, data: object = None, **more: object) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "data": data}], **more}


def answer(datatype: str, shape: tuple[int, ...], data: bytes) -> Chunk:
    return Chunk((Tensor("y", datatype, shape, data),), True, "1", Path.RESIDENT, 0, 0)


def prefixed(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, npt.NDArray[Any]]:
    datatype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(shapes)
    dtype = np.dtype(DTYPES[datatype])
    count = math.prod(shape)
    if dtype.kind == "f":
        numbers = st.floats(width=32 if datatype == "FP32" else 64, allow_infinity=False)
        values = draw(st.lists(numbers, min_size=count, max_size=count))
        return datatype, np.array(values, dtype).reshape(shape)
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if datatype == "BOOL":
        return datatype, (np.frombuffer(raw, np.uint8) % 2 == 1).reshape(shape)
    return datatype, np.frombuffer(raw, dtype).reshape(shape)


# ------------------------------------------------------------------ round trips


@given(arrays().filter(lambda given: not np.isnan(given[1].astype(float)).any()), st.booleans())
def test_json_data_becomes_the_raw_bytes_of_its_values(case: tuple[str, npt.NDArray[Any]], flat: bool) -> None:
    datatype, array = case
    data = array.reshape(-1).tolist() if flat else array.tolist()
    (tensor,) = parse(request_of(datatype, array.shape, data), description(datatype, array.ndim)).inference.inputs
    assert bytes(tensor.data) == array.tobytes()
    assert tensor.shape == array.shape


@given(arrays())
def test_binary_data_is_taken_as_it_is(case: tuple[str, npt.NDArray[Any]]) -> None:
    datatype, array = case
    request = request_of(datatype, array.shape)
    request["inputs"][0]["parameters"] = {"binary_data_size": array.nbytes}
    (tensor,) = parse(request, description(datatype, array.ndim), array.tobytes()).inference.inputs
    assert bytes(tensor.data) == array.tobytes()


@given(arrays())
def test_an_answer_in_json_reads_back_as_the_same_values(case: tuple[str, npt.NDArray[Any]]) -> None:
    datatype, array = case
    request = parse(request_of("FP32", [0, 0], []))
    reply = render_infer(request, answer(datatype, array.shape, array.tobytes()))
    assert reply.json_bytes is None
    (output,) = json.loads(b"".join(reply.parts))["outputs"]
    back = np.array(output["data"], dtype=array.dtype).reshape(output["shape"])  # None reads as NaN
    np.testing.assert_array_equal(back, array)


@given(arrays())
def test_an_answer_in_binary_is_json_and_then_the_raw_bytes(case: tuple[str, npt.NDArray[Any]]) -> None:
    datatype, array = case
    request = parse(request_of("FP32", [0, 0], [], parameters={"binary_data_output": True}))
    reply = render_infer(request, answer(datatype, array.shape, array.tobytes()))
    body = b"".join(reply.parts)
    assert reply.json_bytes is not None
    (output,) = json.loads(body[: reply.json_bytes])["outputs"]
    assert output["parameters"] == {"binary_data_size": array.nbytes}
    assert body[reply.json_bytes :] == array.tobytes()


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_bytes_round_trip_as_binary(texts: list[bytes]) -> None:
    request = request_of("BYTES", [len(texts)], parameters={"binary_data_output": True})
    raw = prefixed(texts)
    request["inputs"][0]["parameters"] = {"binary_data_size": len(raw)}
    parsed = parse(request, description("BYTES", 1), raw)
    assert bytes(parsed.inference.inputs[0].data) == raw
    reply = render_infer(parsed, answer("BYTES", (len(texts),), raw))
    assert b"".join(reply.parts)[reply.json_bytes :] == raw


@given(st.lists(st.text(max_size=9), max_size=5))
def test_texts_round_trip_as_json(texts: list[str]) -> None:
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]  # lone surrogates are no text
    parsed = parse(request_of("BYTES", [len(texts), 1], [[text] for text in texts]), description("BYTES", 2))
    raw = bytes(parsed.inference.inputs[0].data)
    assert raw == prefixed([text.encode() for text in texts])
    (output,) = json.loads(b"".join(render_infer(parsed, answer("BYTES", (len(texts), 1), raw)).parts))["outputs"]
    assert output["data"] == texts


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_goes_in_and_out_as_binary(datatype: str) -> None:
    request = request_of(datatype, [1, 2], outputs=[{"name": "y", "parameters": {"binary_data": True}}])
    request["inputs"][0]["parameters"] = {"binary_data_size": 4}
    parsed = parse(request, description(datatype), b"\x00\x3c\x00\x40")
    assert bytes(parsed.inference.inputs[0].data) == b"\x00\x3c\x00\x40"
    assert render_infer(parsed, answer(datatype, (1, 2), b"abcd")).parts[1] == b"abcd"


def test_bool_takes_words_and_digits() -> None:
    parsed = parse(request_of("BOOL", [1, 4], [[True, 0, 1, False]]), description("BOOL"))
    assert bytes(parsed.inference.inputs[0].data) == b"\x01\x00\x01\x00"


def test_binary_data_is_not_copied() -> None:
    head = json.dumps({"inputs": [{**request_of("UINT8", [1, 3])["inputs"][0], "parameters": {"binary_data_size": 3}}]})
    body = bytearray(head.encode() + b"abc")
    (tensor,) = parse_infer(body, str(len(head)), description("UINT8")).inference.inputs
    body[-1:] = b"z"
    assert bytes(tensor.data) == b"abz"


def test_several_binary_inputs_are_cut_in_order_and_json_ones_have_no_part() -> None:
    described = description("UINT8", 1, TensorSpec("z", "UINT8", (-1,)), TensorSpec("w", "UINT8", (-1,)))
    inputs = [
        {"name": "w", "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": 2}},
        {"name": "z", "datatype": "UINT8", "shape": [1], "data": [9]},
        {"name": "x", "datatype": "UINT8", "shape": [3], "parameters": {"binary_data_size": 3}},
    ]
    tensors = parse({"inputs": inputs}, described, b"abcde").inference.inputs
    assert {tensor.name: bytes(tensor.data) for tensor in tensors} == {"w": b"ab", "z": b"\x09", "x": b"cde"}


# ------------------------------------------------------------------ outputs and parameters


TWO_OUTPUTS = Description(
    "f",
    ("1",),
    "test",
    Signature((TensorSpec("x", "FP32", (-1,)),), (TensorSpec("a", "FP32", (-1,)), TensorSpec("b", "UINT8", (-1,)))),
)


def test_outputs_come_in_the_order_asked_for_each_in_its_own_form() -> None:
    outputs = [{"name": "b", "parameters": {"binary_data": False}}, {"name": "a"}]
    parsed = parse(
        request_of("FP32", [0], [], outputs=outputs, id="7", parameters={"binary_data_output": True}), TWO_OUTPUTS
    )
    assert parsed.inference.outputs == ("b", "a")
    chunk = Chunk(
        (Tensor("a", "FP32", (1,), b"1234"), Tensor("b", "UINT8", (1,), b"\x05")), True, "1", Path.HOST, 2_000, 3_999
    )
    reply = render_infer(parsed, chunk)
    assert reply.json_bytes is not None
    assert json.loads(b"".join(reply.parts)[: reply.json_bytes]) == {
        "model_name": "f",
        "model_version": "1",
        "id": "7",
        "parameters": {"dormouse_path": "host", "dormouse_queued_us": 2, "dormouse_device_us": 3},
        "outputs": [
            {"name": "b", "datatype": "UINT8", "shape": [1], "data": [5]},
            {"name": "a", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
        ],
    }
    assert reply.parts[1:] == (b"1234",)


def test_a_line_is_one_line_of_json() -> None:
    line = render_line(parse(request_of("FP32", [0, 0], [])), answer("BYTES", (1,), prefixed([b"a\nb"])))
    assert line.count(b"\n") == 1
    assert json.loads(line)["outputs"][0]["data"] == ["a\nb"]
    assert "id" not in json.loads(line)


def test_without_parameters_the_defaults_hold() -> None:
    inference = parse(request_of("FP32", [0, 0], [], parameters={"unknown": {"deep": [1]}})).inference
    assert (inference.priority, inference.timeout_ns, inference.slo_ns) == (DEFAULT_PRIORITY, None, None)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"priority": 0, "timeout": 0, "slo_ms": 0}, (DEFAULT_PRIORITY, None, None)),
        ({"priority": 1, "timeout": 1, "slo_ms": 0.5}, (1, 1_000, 500_000)),
        ({"timeout": 10**30, "slo_ms": 1e300}, (DEFAULT_PRIORITY, 2**61, 2**61)),
        ({"timeout": 10**400, "slo_ms": 1e308}, (DEFAULT_PRIORITY, 2**61, 2**61)),
    ],
)
def test_priority_timeout_and_slo_are_read(parameters: dict[str, object], expected: tuple[object, ...]) -> None:
    inference = parse(request_of("FP32", [0, 0], [], parameters=parameters)).inference
    assert (inference.priority, inference.timeout_ns, inference.slo_ns) == expected


def test_an_optional_input_may_be_left_out() -> None:
    described = description("FP32", 2, TensorSpec("mask", "BOOL", (-1,), optional=True))
    assert [tensor.name for tensor in parse(request_of("FP32", [0, 0], []), described).inference.inputs] == ["x"]


def test_index_and_load_bodies() -> None:
    assert [parse_index(body) for body in (b"", b"{}", b'{"ready": false}', b'{"ready": true}')] == [
        False,
        False,
        False,
        True,
    ]
    assert [parse_operation(body) for body in (b"", b"{}", b'{"parameters": {"wait": false}}')] == [
        {},
        {},
        {"wait": False},
    ]
    with pytest.raises(InvalidRequest):
        parse_operation(b"[]")
    check_load({"unload_dependents": False, "wait": True})
    for name in ("config", "file:1/model", "file:" + "x" * 10**6):
        with pytest.raises(InvalidRequest) as caught:
            check_load({name: ""})
        assert len(caught.value.message) < 300


# ------------------------------------------------------------------ complaints


def tensor_with(**changes: object) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2], **changes}]}


BAD_REQUESTS: dict[str, tuple[object, str]] = {
    "no inputs": ({}, "`inputs`"),
    "not an object": ([], "object"),
    "null": (None, "object"),
    "inputs not a list": ({"inputs": 5}, "$.inputs"),
    "no name": ({"inputs": [{"datatype": "FP32", "shape": [1]}]}, "`name`"),
    "id no string": ({**tensor_with(), "id": 5}, "$.id"),
    "parameters no object": ({**tensor_with(), "parameters": 5}, "$.parameters"),
    "unknown input": (tensor_with(name="q"), "input 'q' is unknown; the inputs are x"),
    "name of a megabyte": (tensor_with(name="q" * 2**20), "$.inputs[0].name"),
    "missing input": ({"inputs": []}, "input 'x' is missing"),
    "duplicate input": ({"inputs": tensor_with()["inputs"] * 2}, "input 'x' is given twice"),
    "wrong datatype": (tensor_with(datatype="INT32"), "input 'x': datatype is INT32, expected FP32"),
    "unknown datatype": (tensor_with(datatype="FP8"), "input 'x': datatype 'FP8' is unknown"),
    "wrong rank": (tensor_with(shape=[2]), "input 'x': shape is [2], expected [-1, -1]"),
    "negative dimension": (tensor_with(shape=[-1, -2]), "input 'x': shape [-1, -2] has a negative dimension"),
    "fractional dimension": (tensor_with(shape=[1.5, 2]), "$.inputs[0].shape[0]"),
    "boolean dimension": (tensor_with(shape=[True, 2]), "$.inputs[0].shape[0]"),
    "dimension beyond 64 bits": (tensor_with(shape=[2**70, 0]), "$.inputs[0].shape[0]"),
    "product beyond 64 bits": (tensor_with(shape=[2**40, 2**40]), "input 'x': shape [1099511627776,"),
    "product beyond 64 bits, but empty": (tensor_with(shape=[2**61, 0]), "input 'x': shape [2305843009213693952, 0]"),
    "too few elements": (tensor_with(data=[1]), "input 'x': data has 1 elements, shape [1, 2] takes 2"),
    "too many elements": (tensor_with(data=[[1, 2, 3]]), "input 'x': data has shape [1, 3]"),
    "transposed": (tensor_with(data=[[1], [2]]), "input 'x': data has shape [2, 1]"),
    "nested too deep": (tensor_with(data=[[[1, 2]]]), "input 'x': data is nested 3 deep"),
    "not nested": (tensor_with(data=5), "input 'x': data is nested 0 deep"),
    "ragged": (tensor_with(shape=[2, 2], data=[[1, 2], [3]]), "input 'x': data has rows of different lengths"),
    "mixed depth": (tensor_with(data=[[1], 2]), "input 'x': data is no FP32"),
    "text for a number": (tensor_with(data=["1", "2"]), "input 'x': data is no FP32: Expected `float`, got `str`"),
    "null for a number": (tensor_with(data=[None, 2]), "input 'x': data is no FP32"),
    "truth for a number": (tensor_with(data=[True, 2]), "input 'x': data is no FP32"),
    "beyond FP32": (tensor_with(data=[1e39, 2]), "input 'x': data has a value out of range for FP32"),
    "data missing": (tensor_with(data=None), "input 'x': data is missing"),
    "both forms": (tensor_with(parameters={"binary_data_size": 8}), "input 'x': has both data and binary_data_size"),
    "shared memory": (tensor_with(data=None, parameters={"shared_memory_region": "r"}), "input 'x': shared memory"),
    "binary beyond the body": (
        tensor_with(data=None, parameters={"binary_data_size": 8}),
        "input 'x': binary_data_size is 8, the body has 0 bytes left",
    ),
    "binary size negative": (tensor_with(data=None, parameters={"binary_data_size": -1}), "binary_data_size is -1"),
    "binary size a text": (tensor_with(data=None, parameters={"binary_data_size": "8"}), "binary_data_size is '8'"),
    "unknown output": ({**tensor_with(), "outputs": [{"name": "q"}]}, "output 'q' is unknown; the outputs are y"),
    "duplicate output": ({**tensor_with(), "outputs": [{"name": "y"}] * 2}, "output 'y' is asked for twice"),
    "classification": (
        {**tensor_with(), "outputs": [{"name": "y", "parameters": {"classification": 3}}]},
        "output 'y': the classification extension",
    ),
    "binary_data no flag": (
        {**tensor_with(), "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
        "output 'y': binary_data is 1",
    ),
    "binary_data_output no flag": (
        {**tensor_with(), "parameters": {"binary_data_output": "yes"}},
        "binary_data_output is 'yes'",
    ),
}
for _name, _value in itertools.product(("timeout", "slo_ms"), (-1, "5", True, [], {}, -0.5)):
    BAD_REQUESTS[f"{_name} {_value!r}"] = ({**tensor_with(), "parameters": {_name: _value}}, f"{_name} is {_value!r}")
for _value in (-1, "5", True, 1.5, 2**32):
    BAD_REQUESTS[f"priority {_value!r}"] = (
        {**tensor_with(), "parameters": {"priority": _value}},
        f"priority is {_value!r}",
    )


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_told_what_is_wrong(case: str) -> None:
    request, expected = BAD_REQUESTS[case]
    with pytest.raises(InvalidRequest) as caught:
        parse(request)
    assert expected in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("UINT8", 256),
        ("UINT8", -1),
        ("UINT16", 2**16),
        ("UINT32", 2**32),
        ("UINT64", 2**64),
        ("UINT64", -1),
        ("INT8", 128),
        ("INT16", -(2**15) - 1),
        ("INT32", 2**31),
        ("INT64", 2**63),
        ("INT64", -(2**63) - 1),
        ("INT64", 10**40),
        ("INT32", 1.5),
        ("INT32", True),
        ("BOOL", 2),
        ("BOOL", "true"),
        ("BYTES", 1),
    ],
)
def test_a_value_out_of_range_is_refused(datatype: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match="input 'x': data"):
        parse(request_of(datatype, [1, 1], [value]), description(datatype))


@pytest.mark.parametrize("parameters", ['{"timeout": NaN}', '{"slo_ms": Infinity}', '{"slo_ms": 1e999}'])
def test_what_is_no_json_number_is_refused(parameters: str) -> None:
    body = f'{{"inputs": [], "parameters": {parameters}}}'.encode()
    with pytest.raises(InvalidRequest):
        parse_infer(body, None, description())


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"nonsense", b"[" * 100_000, b'{"inputs":' * 50_000, b'{"inputs": []} trailing']
)
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the request is"):
        parse_infer(body, None, description())


@pytest.mark.parametrize("length", ["-1", "3", "1e1", "", "two", "٣", "0" * 30 + "2", "9" * 5000])
def test_a_header_length_outside_the_body_is_refused(length: str) -> None:
    with pytest.raises(InvalidRequest, match=LENGTH_HEADER):
        parse_infer(b"{}", length, description())


@pytest.mark.parametrize(
    ("datatype", "raw", "complaint"),
    [
        ("FP32", b"1234", "binary data has 4 bytes, its shape and FP32 take 8"),
        ("FP16", b"12345", "binary data has 5 bytes, its shape and FP16 take 4"),
        ("BOOL", b"\x01\x02", "neither 0 nor 1"),
        ("BYTES", prefixed([b"a"]), "binary data has 1 elements, its shape takes 2"),
        ("BYTES", prefixed([b"a", b"b", b""]), "binary data has 3 elements"),
        ("BYTES", prefixed([b"a", b"bc"])[:-1], "ends inside a BYTES element"),
        ("BYTES", prefixed([b"a"]) + b"\x01\x00", "ends inside a BYTES element"),
        ("BYTES", b"\xff\xff\xff\xff", "ends inside a BYTES element"),
    ],
)
def test_binary_data_that_does_not_fit_is_refused(datatype: str, raw: bytes, complaint: str) -> None:
    request = request_of(datatype, [1, 2], parameters={"binary_data_output": True})
    request["inputs"][0]["parameters"] = {"binary_data_size": len(raw)}
    with pytest.raises(InvalidRequest, match=f"input 'x': .*{complaint}"):
        parse(request, description(datatype), raw)


def test_binary_data_of_nobody_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="3 bytes that belong to no input"):
        parse(tensor_with(), raw=b"abc")


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_in_json_is_pointed_to_binary(datatype: str) -> None:
    with pytest.raises(InvalidRequest, match=f"input 'x': {datatype} has no JSON form; send it as binary"):
        parse(request_of(datatype, [1, 1], [1.0], parameters={"binary_data_output": True}), description(datatype))
    request = request_of(datatype, [1, 1])
    request["inputs"][0]["parameters"] = {"binary_data_size": 2}
    with pytest.raises(InvalidRequest, match=f"output 'y': {datatype} has no JSON form; ask for it as binary"):
        parse(request, description(datatype), b"ab")


def test_lines_cannot_be_binary() -> None:
    with pytest.raises(InvalidRequest, match="output 'y': JSON lines cannot carry binary data"):
        parse({**tensor_with(), "parameters": {"binary_data_output": True}}, lines=True)


@pytest.mark.parametrize(
    ("datatype", "data"),
    [("FP32", struct.pack("<f", -math.inf)), ("FP64", struct.pack("<d", math.inf)), ("BYTES", prefixed([b"\xff"]))],
)
def test_an_output_that_json_cannot_carry_is_pointed_to_binary(datatype: str, data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"output 'y': .*; ask for it as binary"):
        render_infer(parse(tensor_with()), answer(datatype, (1,), data))


@given(st.binary(max_size=200), st.one_of(st.none(), st.text(max_size=5)))
def test_no_bytes_whatever_do_more_than_be_refused(body: bytes, header_length: str | None) -> None:
    with pytest.raises(InvalidRequest):
        parse_infer(body, header_length, description())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["name", "datatype", "shape", "data", "parameters"]), json_values)
def test_no_value_in_a_tensor_does_more_than_be_refused(key: str, value: Nested) -> None:
    accepted_or_refused(lambda: parse(tensor_with(**{key: value})))


@given(st.sampled_from(["inputs", "outputs", "id", "parameters"]), json_values)
def test_no_value_in_a_request_does_more_than_be_refused(key: str, value: Nested) -> None:
    accepted_or_refused(lambda: parse({**tensor_with(), key: value}))


def accepted_or_refused(call: Callable[[], InferRequest]) -> None:
    try:
        (tensor,) = call().inference.inputs
    except InvalidRequest:
        return
    assert len(tensor.data) == 4 * math.prod(tensor.shape)


def test_chunks_are_structs_that_msgspec_can_write() -> None:
    """Dimensions and durations stay within what a journal can hold."""
    inference = parse({**tensor_with(), "parameters": {"priority": 2**32 - 1, "timeout": 10**40}}).inference
    msgspec.msgpack.encode((inference.priority, inference.timeout_ns, inference.inputs[0].shape))
