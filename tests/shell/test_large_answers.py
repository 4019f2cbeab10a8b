"""Large answers in JSON: the same bytes as ever, made in pieces, with the event loop let go between them."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.types import Path
from dormouse.gateway import bodies, encoding, json_pieces
from dormouse.gateway.app import create_app
from dormouse.submit import Chunk, Inference
from dormouse.tensors import Tensor
from tests.shell.in_memory import furnished
from tests.shell.running import RunningServer

ELEMENTS = 200_000
LONGEST_PIECE_BYTES = 512 * 1024
Message = MutableMapping[str, Any]


def body_of(data: bytes, elements: int, datatype: str, **parameters: object) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "x", "datatype": datatype, "shape": [1, elements]}
    head = json.dumps(
        {"inputs": [tensor | {"parameters": {"binary_data_size": len(data)}}], "parameters": parameters}
    ).encode()
    return head + data, {bodies.LENGTH_HEADER: str(len(head)), "Accept-Encoding": "identity"}


def floats(count: int = ELEMENTS) -> bytes:
    return np.random.default_rng(7).standard_normal(count).astype("<f4").tobytes()


def values(text: bytes) -> list[Any]:
    answer: list[Any] = json.loads(text)["outputs"][0]["data"]
    return answer


# ------------------------------------------------------------------ the same bytes


TENSORS = st.one_of(
    st.lists(st.floats(width=32, allow_infinity=False), max_size=40).map(
        lambda given: Tensor("y", "FP32", (len(given),), np.array(given, "<f4").tobytes())
    ),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40).map(
        lambda given: Tensor("y", "INT64", (len(given),), np.array(given, "<i8").tobytes())
    ),
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=12).map(
        lambda given: Tensor("y", "BYTES", (len(given),), encoding.prefixed(map(str.encode, given)))
    ),
)


@given(st.lists(TENSORS, min_size=1, max_size=3), st.sets(st.integers(0, 2)), st.one_of(st.none(), st.text(max_size=3)))
def test_pieces_joined_are_the_answer_made_at_once(tensors: list[Tensor], binary: set[int], name: str | None) -> None:
    named = [msgspec.structs.replace(tensor, name=str(number)) for number, tensor in enumerate(tensors)]
    chunk = Chunk(tuple(named), True, "1", Path.HOST, 1, 2, "3-4")
    request = bodies.InferRequest(Inference("f", ()), name, frozenset(map(str, binary)))
    with pytest.MonkeyPatch.context() as patch:
        for setting, value in (("LARGE_BYTES", 8), ("PIECE_ELEMENTS", 3), ("PIECE_TEXTS", 3), ("PIECE_BYTES", 5)):
            patch.setattr(json_pieces, setting, value)
        assert all(pause is None for pause in bodies.check_large(request, chunk))
        whole = bodies.render_infer(request, chunk)
        assert b"".join(bodies.render_pieces(request, chunk)) == whole.parts[0]


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_over_the_wire_too_whatever_the_form(server: RunningServer, datatype: str) -> None:
    data = floats() if datatype == "FP32" else encoding.prefixed([b"word", b'\xc3\xa4"\\' * 100_000] * 2)
    count = ELEMENTS if datatype == "FP32" else 4
    body, headers = body_of(data, count, datatype)
    expected = encoding.to_json("", datatype, data)
    with httpx.Client(base_url=server.url) as http:
        path = f"/v2/models/echo_{datatype}/infer"
        plain = http.post(path, content=body, headers=headers)
        assert plain.headers["transfer-encoding"] == "chunked"
        assert plain.headers["content-type"] == "application/json"
        assert values(plain.content) == expected
        packed = http.post(path, content=body, headers={**headers, "Accept-Encoding": "gzip"})
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.content == plain.content
        lines = http.post(path, content=body, headers={**headers, "Accept": "application/x-ndjson"})
        assert lines.content == plain.content + b"\n"


def test_what_json_cannot_carry_is_refused_before_anything_is_sent(server: RunningServer) -> None:
    body, headers = body_of(floats() + np.array([np.inf], "<f4").tobytes(), ELEMENTS + 1, "FP32")
    refused = httpx.post(f"{server.url}/v2/models/echo_FP32/infer", content=body, headers=headers)
    assert (refused.status_code, refused.json()["error"].count("infinity")) == (400, 1)
    words = encoding.prefixed([b"word"] * 20_000 + [b"\xff"])
    body, headers = body_of(words, 20_001, "BYTES")
    refused = httpx.post(f"{server.url}/v2/models/echo_BYTES/infer", content=body, headers=headers)
    assert (refused.status_code, refused.json()["error"].count("no UTF-8")) == (400, 1)


# ------------------------------------------------------------------ in pieces


class Client:
    """Of the application, without a server: takes each message only when it is let."""

    def __init__(self, body: bytes, headers: dict[str, str], version: str = "1.1") -> None:
        named = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        path = "/v2/models/echo_FP32/infer"
        self.scope: Message = {"type": "http", "asgi": {"version": "3.0"}, "http_version": version, "method": "POST"}
        self.scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": named, "scheme": "http"}
        self.scope |= {"root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
        self._body: bytes | None = body
        self.taken: list[Message] = []
        self.room = asyncio.Semaphore(10**9)
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        if self._body is None:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        await self.room.acquire()
        self.taken.append(message)

    @property
    def sizes(self) -> list[int]:
        return [len(message.get("body", b"")) for message in self.taken]

    @property
    def text(self) -> bytes:
        return b"".join(bytes(message.get("body", b"")) for message in self.taken)


def application() -> Callable[[Message, Any, Any], Awaitable[None]]:
    return create_app(furnished(), body_limit_bytes=64 * 1024 * 1024)


async def rounds_of_the_loop(during: Awaitable[None]) -> int:
    """How often others came to their turn meanwhile."""
    task, rounds = asyncio.ensure_future(during), 0
    while not task.done():
        await asyncio.sleep(0)
        rounds += 1
    await task
    return rounds


def test_the_loop_goes_round_between_pieces() -> None:
    async def scene() -> None:
        client = Client(*body_of(floats(), ELEMENTS, "FP32"))
        rounds = await rounds_of_the_loop(application()(client.scope, client.receive, client.send))
        assert max(client.sizes) < LONGEST_PIECE_BYTES
        assert rounds > ELEMENTS / json_pieces.PIECE_ELEMENTS
        assert len(values(client.text)) == ELEMENTS

    asyncio.run(scene())


def test_pieces_are_made_when_the_client_has_taken_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        made = 0
        whole = json_pieces.written

        def counted(where: str, tensor: Tensor) -> Any:
            nonlocal made
            for piece in whole(where, tensor):
                made += 1
                yield piece

        monkeypatch.setattr(json_pieces, "written", counted)
        client = Client(*body_of(floats(), ELEMENTS, "FP32"))
        client.room = asyncio.Semaphore(4)
        answering = asyncio.ensure_future(application()(client.scope, client.receive, client.send))
        while len(client.taken) < 4:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert made <= 4
        client.gone.set()  # and for one who goes no more are made
        await answering
        assert made <= 4

    asyncio.run(scene())


def test_many_take_turns() -> None:
    """Between two rounds of the loop one piece is made, however many answers are under way."""

    async def scene() -> None:
        clients = [Client(*body_of(floats(), ELEMENTS, "FP32")) for _ in range(5)]
        app = application()

        async def all_of_them() -> None:
            await asyncio.gather(*(app(client.scope, client.receive, client.send) for client in clients))

        rounds = await rounds_of_the_loop(all_of_them())
        assert rounds > len(clients) * ELEMENTS / json_pieces.PIECE_ELEMENTS

    asyncio.run(scene())


def test_a_client_of_http_1_0_gets_a_length() -> None:
    async def scene() -> None:
        client = Client(*body_of(floats(), ELEMENTS, "FP32"), version="1.0")
        await application()(client.scope, client.receive, client.send)
        headers = dict(client.taken[0]["headers"])
        assert int(headers[b"content-length"]) == len(client.text)
        assert len(values(client.text)) == ELEMENTS

    asyncio.run(scene())
