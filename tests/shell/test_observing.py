"""What is said of requests: ids, counts, lines of the log, and nothing that nobody may know."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse import logs
from dormouse.gateway.notes import Note
from dormouse.gateway.observing import Observer
from dormouse.logs import MOST_LINES, SECOND_NS, Pace
from tests.shell.running import RunningServer, running
from tests.shell.tenanted import ACME, ADMIN, Kept, bearer, furnish

SECRET = "4815162342"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
INFER = "/v2/models/affine/infer"


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What the server writes, as JSON lines."""
    root, ours = logging.getLogger(), logging.getLogger(logs.OURS)
    before, level, our_level = root.handlers[:], root.level, ours.level
    stream = io.StringIO()
    root.handlers[:] = []
    logs.begin("json", "debug", stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)
    ours.setLevel(our_level)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in found if line["logger"] == "dormouse.requests"]


@pytest.fixture
def observer() -> Observer:
    return Observer()


@pytest.fixture
def server(observer: Observer) -> Iterator[RunningServer]:
    with running(observer=observer) as started:
        yield started


# ------------------------------------------------------------------ ids


def test_a_given_id_comes_back_and_one_is_made_where_there_is_none(server: RunningServer) -> None:
    given_id = httpx.get(f"{server.url}/v2", headers={"x-request-id": "abc-1"}).headers["x-request-id"]
    made = {httpx.get(f"{server.url}/v2").headers["x-request-id"] for _ in range(3)}
    assert given_id == "abc-1"
    assert len(made) == 3


def test_the_id_of_a_v2_request_is_its_id_unless_its_head_has_another(server: RunningServer) -> None:
    named = httpx.post(server.url + INFER, json={**BODY, "id": "mine"})
    both = httpx.post(server.url + INFER, json={**BODY, "id": "mine"}, headers={"x-request-id": "outer"})
    wild = httpx.post(server.url + INFER, json={**BODY, "id": "two\nlines"})
    assert named.headers["x-request-id"] == "mine"
    assert (both.headers["x-request-id"], both.json()["id"]) == ("outer", "mine")
    assert "\n" not in wild.headers["x-request-id"]
    assert wild.json()["id"] == "two\nlines"


@given(st.text())
def test_only_short_printable_ids_are_taken(text: str) -> None:
    taken = Note("v2", "GET /", text, None).id == text
    sane = 0 < len(text) <= 128 and text.isascii() and text.isprintable() and " " not in text
    assert taken == sane


def test_refusals_have_ids_too_and_grpc_calls_in_their_trailers(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/nowhere", headers={"x-request-id": "lost"}).headers["x-request-id"] == "lost"
    with grpc.insecure_channel(server.grpc) as channel:
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        _, call = live.with_call(b"", metadata=(("x-request-id", "g1"),))
        assert ("x-request-id", "g1") in [(each.key, each.value) for each in call.trailing_metadata()]


# ------------------------------------------------------------------ counts


def test_answers_are_counted_by_door_and_status(observer: Observer) -> None:
    with running(observer=observer) as server:
        httpx.post(server.url + INFER, json=BODY)
        httpx.post(f"{server.url}/v2/models/nobody/infer", json=BODY)
        httpx.get(f"{server.url}/v1/models")
        httpx.get(f"{server.url}/nowhere")
        with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"")
    assert observer.answers == {
        ("v2", 200): 1,
        ("v2", 404): 1,
        ("openai", 200): 1,
        ("other", 404): 1,
        ("grpc", 404): 1,
    }


def test_who_is_turned_away_at_the_gate_is_counted(
    observer: Observer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kept = Kept(tmp_path_factory.mktemp("keys"))
    with running(kept.gate, observer=observer) as server:
        furnish(server.node)
        assert httpx.get(f"{server.url}/v2/models").status_code == 401
        assert httpx.get(f"{server.url}/metrics", headers=bearer(ACME)).status_code == 403
        scrape = httpx.get(f"{server.url}/metrics", headers=bearer(ADMIN))
        with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"")
    assert "dormouse_answers_total{" in scrape.text
    assert observer.answers["v2", 401] == observer.answers["metrics", 403] == observer.answers["metrics", 200] == 1
    assert observer.answers["grpc", 401] == 1


# ------------------------------------------------------------------ lines


def test_refused_and_failed_requests_are_told_of_and_others_are_not(written: io.StringIO) -> None:
    with running() as server:
        httpx.post(server.url + INFER, json=BODY)
        httpx.post(f"{server.url}/v2/models/nobody/infer", json=BODY, headers={"x-request-id": "r1"})
    (line,) = lines(written)
    assert line["message"] == "request refused"
    assert (line["level"], line["id"], line["status"], line["function"]) == ("info", "r1", 404, "nobody")
    assert "no function" in str(line["why"])


def test_with_every_request_a_line_says_how_the_model_was_found(written: io.StringIO) -> None:
    with running(observer=Observer(log_all=True)) as server:
        httpx.post(server.url + INFER, json={**BODY, "id": "a1"})
    (line,) = lines(written)
    assert (line["message"], line["id"], line["status"], line["function"]) == ("request", "a1", 200, "affine")
    assert {"path", "queued_ms", "device_ms", "ms", "door", "call"} <= line.keys()


def test_a_slow_request_is_told_of(written: io.StringIO) -> None:
    with running(observer=Observer(slow_ns=1)) as server:
        httpx.get(f"{server.url}/v2")
    assert [line["message"] for line in lines(written)] == ["slow request"]


def test_neither_keys_nor_inputs_are_ever_written(written: io.StringIO, tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    with running(kept.gate, observer=Observer(log_all=True)) as server:
        furnish(server.node)
        wrong = {"Authorization": f"Bearer {SECRET}"}
        tensor = {"name": "x", "datatype": "INT64", "shape": [1], "data": [int(SECRET)]}
        for body in ({"inputs": [tensor]}, {"inputs": [{**tensor, "shape": [2]}]}, {"inputs": SECRET}):
            httpx.post(f"{server.url}/v2/models/mine/infer", json=body, headers=bearer(ACME))
        httpx.post(f"{server.url}/v2/models/mine/infer?key={SECRET}", json={}, headers=wrong)
        httpx.get(f"{server.url}/v2", headers={"x-api-key": SECRET})
        with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError):
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            call(SECRET.encode(), metadata=(("authorization", f"Bearer {SECRET}"),))
    assert len(lines(written)) == 6
    assert SECRET not in written.getvalue()
    assert ACME not in written.getvalue()


def test_text_keeps_a_line_for_each_record_whatever_is_in_it() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs._Text())
    record = logging.LogRecord("dormouse.x", logging.INFO, "", 0, "two\nlines", None, None)
    vars(record)[logs._FIELDS] = {"a": "plain", "b": 'with "quotes" and\nlines', "c": ""}
    handler.emit(record)
    assert stream.getvalue() == 'INFO dormouse.x: two\\nlines a=plain b="with \\"quotes\\" and\\nlines" c=""\n'


def test_a_flood_is_a_few_lines_a_second_and_then_a_number() -> None:
    pace = Pace()
    allowed = [pace.allows(number) for number in range(3 * MOST_LINES)]
    assert allowed.count(True) == MOST_LINES
    assert pace.allows(SECOND_NS)
    assert (pace.said(), pace.unsaid) == (2 * MOST_LINES, 0)


def test_nothing_of_opentelemetry_is_imported_where_nobody_asks_for_it() -> None:
    code = "import sys, dormouse.serving; from dormouse.gateway import tracing; tracing.begin({}); "
    code += "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
