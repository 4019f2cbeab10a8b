"""Large requests in JSON: read as small ones are, in pieces, with the event loop let go between them."""

import asyncio
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.errors import InvalidRequest
from dormouse.gateway import bodies, json_numbers
from dormouse.gateway.app import create_app
from dormouse.submit import Description
from dormouse.tensors import Signature, TensorSpec
from tests.shell.in_memory import furnished
from tests.shell.test_large_answers import Client, rounds_of_the_loop

ELEMENTS = 200_000
SMALL = {"LARGE_BYTES": 2, "PIECE_BYTES": 24}
Outcome = tuple[tuple[Any, ...], Any] | str


def described(datatype: str, rank: int) -> Description:
    return Description("f", ("1",), "numpy", Signature((TensorSpec("x", datatype, (-1,) * rank),), ()))


def outcomes(body: bytes, datatype: str, rank: int) -> tuple[Outcome, Outcome]:
    """At once, and in pieces."""

    def whole() -> bodies.InferRequest:
        return bodies.parse_infer(body, None, described(datatype, rank))

    def pieces() -> bodies.InferRequest:
        steps = bodies.parse_pieces(body, None, described(datatype, rank))
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: bodies.InferRequest = end.value
                return result

    def outcome(parse: Any) -> Outcome:
        try:
            request = parse()
        except InvalidRequest as fault:
            return fault.message
        return tuple((each.name, each.shape, bytes(each.data)) for each in request.inference.inputs), request.id

    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(json_numbers, name, value)
        return outcome(whole), outcome(pieces)


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3)
KINDS = {"FP32": st.floats(width=32, allow_nan=False, allow_infinity=False), "INT64": st.integers(-(2**63), 2**63 - 1)}
KINDS |= {"UINT8": st.integers(0, 255), "BOOL": st.booleans(), "FP64": st.floats(allow_nan=False, allow_infinity=False)}


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, list[int], Any]:
    datatype, shape = draw(st.sampled_from(sorted(KINDS))), draw(SHAPES)
    count = int(np.prod(shape))
    values = draw(st.lists(KINDS[datatype], min_size=count, max_size=count))
    nested = np.array(values, dtype=object).reshape(shape).tolist()
    return datatype, shape, nested if draw(st.booleans()) else values


@given(tensors(), st.sampled_from([None, 1, "\t"]), st.sampled_from(["x", 'a"b\\', "data"]))
def test_pieces_read_what_is_read_at_once(tensor: tuple[str, list[int], Any], indent: Any, name: str) -> None:
    datatype, shape, data = tensor
    given_ = {"name": "x", "datatype": datatype, "parameters": {"data": name}, "data": data, "shape": shape}
    body = json.dumps({"id": name, "inputs": [given_]}, indent=indent).encode()
    whole, pieces = outcomes(body, datatype, len(shape))
    assert not isinstance(whole, str)
    assert pieces == whole


@given(tensors(), st.data())
def test_what_is_refused_at_once_is_refused_in_pieces(
    tensor: tuple[str, list[int], Any], choice: st.DataObject
) -> None:
    datatype, shape, data = tensor
    text = json.dumps(data).encode()
    at = choice.draw(st.integers(0, len(text)))
    put = choice.draw(
        st.sampled_from([b"", b",", b"[", b"]", b" ", b"1", b"-", b"null", b"}", b"{", b":", b"1 2", b"9e99"])
    )
    text = text[:at] + put + text[at + choice.draw(st.integers(0, 2)) :]
    head = json.dumps({"name": "x", "datatype": datatype, "shape": shape}).encode()
    body = b'{"inputs":[' + head[:-1] + b',"data":' + text + b"}]}"
    whole, pieces = outcomes(body, datatype, len(shape))
    assert isinstance(pieces, str) == isinstance(whole, str), (whole, pieces)
    if not isinstance(whole, str):
        assert pieces == whole


@pytest.mark.parametrize(
    ("shape", "data", "message"),
    [
        ([9], [1, 2, 3, 4, 5, 6, 7, 8, 900], "data is no UINT8: Expected `int` <= 255 - at `$[8]`"),
        ([3, 3], [[1, 2, 3], [4, 5, 6], [7, None, 9]], "data is no UINT8: Expected `int`, got `null` - at `$[2][1]`"),
        ([3], [1, 2], "data has 2 elements, shape [3] takes 3 elements"),
        ([2, 3], [[1, 2, 3], [4, 5]], "data is not written as shape [2, 3] takes it"),
        ([3, 2], [[1, 2, 3], [4, 5, 6]], "data is not written as shape [3, 2] takes it"),
    ],
)
def test_what_is_wrong_is_said_by_its_place(shape: list[int], data: Any, message: str) -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "UINT8", "shape": shape, "data": data}]}).encode()
    _, pieces = outcomes(body, "UINT8", len(shape))
    assert isinstance(pieces, str)
    assert pieces.startswith("input 'x': ") and message in pieces


def test_nobody_can_name_an_array_that_is_another_s() -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": f"{'0' * 32}:1"}]}).encode()
    whole, pieces = outcomes(body, "FP32", 1)
    assert whole == pieces == "input 'x': data is nested 0 deep, shape [1] takes a flat list or 1 levels"


@pytest.mark.parametrize("nested", [False, True])
def test_the_loop_goes_round_while_a_request_is_read(nested: bool) -> None:
    async def scene() -> None:
        rows = np.random.default_rng(3).standard_normal((ELEMENTS // 100, 100)).astype("<f4")
        data = rows.tolist() if nested else rows.ravel().tolist()
        tensor = {"name": "x", "datatype": "FP32", "shape": rows.shape, "data": data}
        body = msgspec.json.encode({"inputs": [tensor], "parameters": {"binary_data_output": True}})
        client = Client(body, {})
        app = create_app(furnished(), body_limit_bytes=64 * 1024 * 1024)
        rounds = await rounds_of_the_loop(app(client.scope, client.receive, client.send))
        assert rounds > len(body) / json_numbers.PIECE_BYTES
        assert client.text.endswith(rows.tobytes())

    asyncio.run(scene())
