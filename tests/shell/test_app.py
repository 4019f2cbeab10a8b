"""The HTTP application in process: routes, errors, limits, codings, streams, and clients that go away."""

import asyncio
import gzip
import json
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from starlette.types import Message

from dormouse.functions import Manifest
from dormouse.gateway.app import create_app
from dormouse.gateway.kserve import EXTENSIONS
from tests.shell.in_memory import InMemory, furnished

BODY_LIMIT_BYTES = 100_000
AFFINE = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
INFER = "/v2/models/affine/infer"
LINES = {"Accept": "application/x-ndjson"}

Talk = Callable[[httpx.AsyncClient], Awaitable[None]]


def talk_to(node: InMemory, talk: Talk) -> None:
    async def run() -> None:
        transport = httpx.ASGITransport(create_app(node, body_limit_bytes=BODY_LIMIT_BYTES))
        async with httpx.AsyncClient(transport=transport, base_url="http://dormouse") as client:
            await talk(client)

    asyncio.run(run())


def answer_to(method: str, path: str, node: InMemory | None = None, **options: Any) -> httpx.Response:
    """One request to a fresh node, or to the one given."""
    answers = []

    async def talk(client: httpx.AsyncClient) -> None:
        answers.append(await client.request(method, path, **options))

    talk_to(node or furnished(), talk)
    return answers[0]


def text_of(answer: httpx.Response) -> str:
    """The text of an error, which is all that its body holds."""
    assert answer.headers["content-type"] == "application/json"
    (text,) = answer.json().values()
    assert isinstance(text, str)
    assert "\n" not in text
    return text


# ------------------------------------------------------------------ routes


def test_health_is_in_the_status_and_in_the_body() -> None:
    node = furnished()
    assert answer_to("GET", "/v2/health/live", node).json() == {"live": True}
    assert answer_to("GET", "/v2/health/ready", node).json() == {"ready": True, "live": True}
    node.is_ready = False
    answer = answer_to("GET", "/v2/health/ready", node)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json() == {"ready": False, "live": True, "error": "the server is not ready"}
    node.is_live = False
    assert answer_to("GET", "/v2/health/live", node).status_code == 503


@pytest.mark.parametrize("path", ["/v2", "/v2/"])
def test_the_server_says_what_it_is(path: str) -> None:
    answer = answer_to("GET", path).json()
    assert answer["name"] == "dormouse"
    assert answer["extensions"] == list(EXTENSIONS)


def test_models_are_listed() -> None:
    assert "affine" in answer_to("GET", "/v2/models").json()["models"]


def test_a_known_model_that_is_not_ready_answers_503_and_an_unknown_one_404() -> None:
    node = furnished()
    node.deployed["affine"].loaded = False
    answer = answer_to("GET", "/v2/models/affine/ready", node)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert text_of(answer) == "function 'affine' is not ready"
    assert answer_to("GET", "/v2/models/nobody/ready", node).status_code == 404


@pytest.mark.parametrize("content", [b"", b"{}", b'{"ready": true}'])
def test_the_index_takes_any_body_and_filters(content: bytes) -> None:
    node = furnished()
    node.deployed["affine"].loaded = False
    answer = answer_to("POST", "/v2/repository/index", node, content=content)
    assert ("affine" in {entry["name"] for entry in answer.json()}) == (b"true" not in content)


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_load_and_unload_may_be_repeated_with_an_empty_body(verb: str) -> None:
    node = furnished()
    for _ in range(2):
        assert answer_to("POST", f"/v2/repository/models/affine/{verb}", node).status_code == 200
    assert node.deployed["affine"].loaded == (verb == "load")


def test_an_operator_deploys_asks_and_removes() -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        manifest = {"name": "mine", "source": "arithmetic:affine", "arguments": {"scale": 10}, "pin": "host"}
        assert (await client.post("/dormouse/check", json=manifest)).json()["admitted"] is True
        answer = await client.post("/dormouse/functions", json=manifest)
        assert (answer.status_code, answer.json()) == (201, {"name": "mine", "version": "1"})
        assert (await client.post("/dormouse/functions", json=manifest)).json()["version"] == "2"
        rows = (await client.get("/dormouse/functions")).json()["functions"]
        assert [(row["version"], row["pin"]) for row in rows if row["name"] == "mine"] == [("2", "host")]
        y = (await client.post("/v2/models/mine/infer", json=AFFINE)).json()["outputs"][0]["data"]
        assert y == [11, 21, 31]
        assert (await client.get("/dormouse/node")).json()["functions"] == len(rows)
        assert (await client.delete("/dormouse/functions/mine")).status_code == 200
        assert (await client.delete("/dormouse/functions/mine")).status_code == 404

    talk_to(furnished(), talk)


@pytest.mark.parametrize("path", ["/dormouse/functions", "/dormouse/check"])
@pytest.mark.parametrize(
    ("manifest", "complaint"),
    [
        ({"name": "mine"}, "manifest: Object missing required field `source`"),
        ({"name": "mine", "source": "s", "slos": {}}, "unknown field `slos`"),
        ({"name": "a b", "source": "s"}, "manifest: name = 'a b' cannot be used"),
        ({"name": "mine", "source": "s", "slo": {"percentile": 100}}, "manifest: slo.percentile"),
        ({"name": "mine", "source": "elsewhere"}, "source 'elsewhere' is none"),
        ("mine", "manifest: Expected `object`"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_refused(path: str, manifest: object, complaint: str) -> None:
    answer = answer_to("POST", path, json=manifest)
    assert answer.status_code == 400
    assert complaint in text_of(answer)


def test_a_manifest_as_struct_and_as_json_are_the_same() -> None:
    manifest = Manifest("mine", "arithmetic:upper")
    assert answer_to("POST", "/dormouse/functions", content=msgspec.json.encode(manifest)).status_code == 201


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("path", ["/v3", "/v2/nothing", "/v2/models/", "/v2/models/affine/", INFER + "/"])
def test_an_unknown_path_is_404(path: str) -> None:
    answer = answer_to("GET", path)
    assert answer.status_code == 404
    assert text_of(answer) == f"no such path: {path}"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", INFER, {"POST"}),
        ("PUT", "/dormouse/functions", {"GET", "HEAD", "POST"}),
        ("POST", "/v2", {"GET", "HEAD"}),
    ],
)
def test_a_wrong_method_is_405_and_says_which_are_right(method: str, path: str, allowed: set[str]) -> None:
    answer = answer_to(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == allowed
    assert text_of(answer).startswith(f"{method} is not allowed on {path}")


def test_retry_after_is_whole_seconds_rounded_up() -> None:
    answer = answer_to("POST", "/v2/models/fault/infer", json=fault("busy"))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")


def test_a_bug_is_one_line_for_the_client_and_a_traceback_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        answer = answer_to("POST", "/v2/models/fault/infer", json=fault("bug"))
    assert answer.status_code == 500
    assert text_of(answer) == "internal error: ZeroDivisionError; the server's log has the details"
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "secret detail" in str(record.exc_info[1])


def fault(word: str) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": [word]}]}


# ------------------------------------------------------------------ bodies


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_the_content_type_does_not_matter(content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = answer_to("POST", INFER, content=json.dumps(AFFINE).encode(), headers=headers)
    assert answer.json()["outputs"][0]["data"] == [3, 5, 7]


def test_a_chunked_body_is_read() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for byte in json.dumps(AFFINE).encode():
            yield bytes([byte])

    assert answer_to("POST", INFER, content=pieces()).status_code == 200


@pytest.mark.parametrize("coding", ["gzip", "deflate", "GZIP", "identity"])
def test_a_packed_body_is_unpacked_however_it_is_cut(coding: str) -> None:
    body = json.dumps(AFFINE).encode()
    packed = {"gzip": gzip.compress(body), "deflate": zlib.compress(body), "identity": body}[coding.lower()]

    async def pieces() -> AsyncIterator[bytes]:
        for byte in packed:
            yield bytes([byte])

    assert answer_to("POST", INFER, content=pieces(), headers={"Content-Encoding": coding}).status_code == 200


def test_gzip_may_have_several_members() -> None:
    body = json.dumps(AFFINE).encode()
    packed = gzip.compress(body[:10]) + gzip.compress(body[10:])
    assert answer_to("POST", INFER, content=packed, headers={"Content-Encoding": "gzip"}).status_code == 200


@pytest.mark.parametrize(
    ("coding", "body", "complaint"),
    [
        ("gzip", b"no gzip", "the body is no valid gzip"),
        ("deflate", gzip.compress(b"{}", mtime=0), "the body is no valid deflate"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-4], "it ends too early"),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"rest", "the body is no valid gzip"),
        ("br", b"", "Content-Encoding 'br' is not supported"),
        ("gzip, deflate", b"", "Content-Encoding 'gzip, deflate' is not supported"),
    ],
)
def test_a_body_that_does_not_unpack_is_refused(coding: str, body: bytes, complaint: str) -> None:
    answer = answer_to("POST", INFER, content=body, headers={"Content-Encoding": coding})
    assert answer.status_code == 400
    assert complaint in text_of(answer)


def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    async def never() -> Message:
        raise AssertionError("the body was read")

    status, body = asyncio.run(
        conversation(furnished(), never, [(b"content-length", str(BODY_LIMIT_BYTES + 1).encode())])
    )
    assert status == 413
    assert json.loads(body)["error"].startswith("the body is larger than 100000 bytes")


@pytest.mark.parametrize("packed", [False, True])
def test_an_endless_body_is_read_no_further_than_the_limit(packed: bool) -> None:
    unpacked_bytes = 0
    stream = zlib.compressobj()

    async def endless() -> Message:
        nonlocal unpacked_bytes
        unpacked_bytes += 10_000
        piece = bytes(10_000)
        return {
            "type": "http.request",
            "body": stream.compress(piece) + stream.flush(zlib.Z_SYNC_FLUSH) if packed else piece,
            "more_body": True,
        }

    headers = [(b"content-encoding", b"deflate")] if packed else []
    status, _ = asyncio.run(conversation(furnished(), endless, headers))
    assert status == 413
    assert unpacked_bytes <= BODY_LIMIT_BYTES + 10_000


def test_a_bomb_is_stopped_at_the_limit() -> None:
    bomb = gzip.compress(bytes(500 * BODY_LIMIT_BYTES))
    assert len(bomb) < BODY_LIMIT_BYTES
    assert answer_to("POST", INFER, content=bomb, headers={"Content-Encoding": "gzip"}).status_code == 413


def test_a_body_of_exactly_the_limit_is_read() -> None:
    body = json.dumps(AFFINE).encode().ljust(BODY_LIMIT_BYTES)
    assert answer_to("POST", INFER, content=body).status_code == 200
    assert (
        answer_to("POST", INFER, content=gzip.compress(body), headers={"Content-Encoding": "gzip"}).status_code == 200
    )


@pytest.mark.parametrize(
    ("asked", "coding"),
    [
        ("", None),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip;q=0", None),
        ("gzip;q=0.5", "gzip"),
        ("gzip, identity", "gzip"),
        ("gzip, deflate", None),
        ("gzip, deflate, br, zstd", None),
        ("br", None),
        ("*", None),
        ("gzip;q=nonsense", "gzip"),
        ("deflate;q=0.5, gzip, identity;q=0", "gzip"),
        ("deflate, br, *;q=0", "deflate"),
    ],
)
def test_an_answer_is_packed_only_when_one_coding_is_asked_for(asked: str, coding: str | None) -> None:
    answer = answer_to("POST", INFER, json=AFFINE, headers={"Accept-Encoding": asked})
    assert answer.headers.get("content-encoding") == coding
    assert answer.json()["outputs"][0]["data"] == [3, 5, 7]  # httpx unpacks


@pytest.mark.parametrize("rows", [1, 8000])
def test_the_length_header_counts_the_json_before_packing(rows: int) -> None:
    x = np.arange(rows * 3, dtype=np.float32)
    head = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [rows, 3], "parameters": {"binary_data_size": x.nbytes}}
            ],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        }
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Accept-Encoding": "gzip"}
    answer = answer_to("POST", INFER, content=head + x.tobytes(), headers=headers)
    length = int(answer.headers["inference-header-content-length"])
    assert answer.headers["content-type"] == "application/octet-stream"
    (output,) = json.loads(answer.content[:length])["outputs"]
    assert len(answer.content) - length == output["parameters"]["binary_data_size"] == x.nbytes
    assert answer.content[length:] == (x * 2 + 1).tobytes()


# ------------------------------------------------------------------ streams and clients that go away


TOTALS = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [4], "data": [1, 2, 3, 4]}], "id": "s"}


def test_chunks_are_lines_when_lines_are_asked_for() -> None:
    answer = answer_to("POST", "/v2/models/running_total/infer", json=TOTALS, headers=LINES)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["outputs"][0]["data"] for line in lines] == [[1], [3], [6], [10]]
    assert {line["id"] for line in lines} == {"s"}


def test_the_last_chunk_is_the_answer_when_they_are_not() -> None:
    answer = answer_to("POST", "/v2/models/running_total/infer", json=TOTALS)
    assert answer.json()["outputs"][0]["data"] == [10]


def test_a_refusal_before_the_first_line_has_its_status() -> None:
    answer = answer_to("POST", "/v2/models/fault/infer", json=fault("late"), headers=LINES)
    assert answer.status_code == 504
    assert text_of(answer) == "the request took longer than its timeout of 5 ms"


@pytest.mark.parametrize(("break_with", "word"), [("bug", "internal error: KeyError"), ("late", "too late")])
def test_a_failure_after_the_first_line_is_the_last_line(break_with: str, word: str) -> None:
    node = furnished()
    node.break_after_first = break_with
    answer = answer_to("POST", "/v2/models/running_total/infer", node, json=TOTALS, headers=LINES)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[0]["outputs"][0]["data"] == [1]
    assert [list(line) for line in lines[1:]] == [["error"]]
    assert lines[1]["error"].startswith(word)


@pytest.mark.parametrize("headers", [{}, LINES])
def test_a_client_that_goes_away_cancels_its_request(headers: dict[str, str]) -> None:
    node = furnished()

    async def run() -> None:
        node.gate, node.entered = asyncio.Event(), asyncio.Event()
        messages = body_then_gone(TOTALS, after=node.entered)
        await conversation(node, messages, encoded(headers), "/v2/models/running_total/infer")

    asyncio.run(run())
    assert node.cancelled == 1


def test_a_client_that_goes_away_between_lines_cancels_its_request() -> None:
    node = furnished()

    async def run() -> None:
        first_line = asyncio.Event()
        node.gate = asyncio.Event()
        node.gate.set()

        def on_body(body: bytes) -> None:
            if body and not first_line.is_set():
                assert node.gate is not None
                node.gate.clear()
                first_line.set()

        messages = body_then_gone(TOTALS, after=first_line)
        await conversation(node, messages, encoded(LINES), "/v2/models/running_total/infer", on_body)

    asyncio.run(run())
    assert node.cancelled == 1


def test_a_client_that_goes_away_while_sending_leaves_no_request() -> None:
    node = furnished()
    messages: Iterator[Message] = iter(
        [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    )

    async def receive() -> Message:
        return next(messages)

    asyncio.run(conversation(node, receive))
    assert node.seen == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/dormouse/functions"), ("POST", "/v2/repository/models/affine/unload"), ("GET", "/v2")],
)
def test_a_page_of_another_site_may_not_ask(method: str, path: str) -> None:
    refused = answer_to(method, path, headers={"Origin": "http://elsewhere.example", "Content-Type": "text/plain"})
    assert refused.status_code == 403
    assert "elsewhere.example" in text_of(refused)


def test_a_page_of_this_server_may_ask() -> None:
    assert answer_to("GET", "/v2", headers={"Origin": "http://here:8000", "Host": "here:8000"}).status_code == 200


def test_a_request_cut_off_by_a_shutdown_is_told_so_and_cancelled() -> None:
    node = furnished()

    async def run() -> tuple[int, bytes]:
        node.gate, node.entered = asyncio.Event(), asyncio.Event()
        messages = body_then_gone(TOTALS, after=asyncio.Event())
        request = asyncio.create_task(conversation(node, messages, path="/v2/models/running_total/infer"))
        await node.entered.wait()
        request.cancel()
        return await request

    status, body = asyncio.run(run())
    assert (status, json.loads(body)) == (503, {"error": "the server is shutting down"})
    assert node.cancelled == 1


def encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def body_then_gone(request: object, *, after: asyncio.Event) -> Callable[[], Awaitable[Message]]:
    """A client that sends a request, and leaves once ``after`` has happened."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(request).encode(), "more_body": False}
        await after.wait()
        return {"type": "http.disconnect"}

    return receive


async def conversation(
    node: InMemory,
    receive: Callable[[], Awaitable[Message]],
    headers: list[tuple[bytes, bytes]] | None = None,
    path: str = INFER,
    on_body: Callable[[bytes], None] = lambda _: None,
) -> tuple[int, bytes]:
    """One request in ASGI's own terms. Returns status and body."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers or [],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    status = 0
    body = bytearray()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            body.extend(message["body"])
            on_body(message["body"])

    await create_app(node, body_limit_bytes=BODY_LIMIT_BYTES)(scope, receive, send)
    return status, bytes(body)
