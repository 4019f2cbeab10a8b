"""The gate before the HTTP application: keys, whose function is whose, limits, and slots that are given back."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message

from dormouse.gateway.app import create_app
from dormouse.gateway.openapi import document
from dormouse.tenants.keyfile import KeyFile
from dormouse.tenants.limits import Limits
from tests.shell.tenanted import (
    ACME,
    ADMIN,
    CALLERS,
    GLOBEX,
    INNER,
    MINE,
    SHARED,
    THEIRS,
    UNKNOWN,
    VISIBLE,
    Kept,
    bearer,
    tenanted,
)

BODY_LIMIT_BYTES = 100_000
TOTALS = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [2], "data": [5, 6]}]}
LINES = {"Accept": "application/x-ndjson"}
OWNED = {ACME: {MINE}, GLOBEX: {THEIRS, SHARED}, ADMIN: VISIBLE[ADMIN]}
OPEN = ("/v2/health/live", "/v2/health/ready", "/openapi.json")


class Site:
    """An application with its node and its gate, and a client in the same process."""

    def __init__(self, directory: Path) -> None:
        self.node = tenanted()
        self.kept = Kept(directory)
        self.app: ASGIApp = create_app(self.node, body_limit_bytes=BODY_LIMIT_BYTES, gate=self.kept.gate)

    def ask(self, method: str, path: str, key: str | None = None, **options: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://dormouse") as client:
                headers = options.pop("headers", {}) | (bearer(key) if key else {})
                return await client.request(method, path, headers=headers, **options)

        return asyncio.run(run())

    def infer(self, name: str, key: str, **options: Any) -> httpx.Response:
        return self.ask("POST", f"/v2/models/{name}/infer", key, json=TOTALS, **options)

    def open_requests(self) -> int:
        return self.kept.gate.open("acme")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def routes() -> list[tuple[str, str]]:
    """Every method and path there is."""
    return [
        (method.upper(), path)
        for path, operations in document()["paths"].items()
        for method in operations
        if method != "parameters" and path not in OPEN
    ]


# ------------------------------------------------------------------ keys


@pytest.mark.parametrize(("method", "path"), routes())
def test_without_a_key_every_route_answers_401_and_says_how_to_send_one(site: Site, method: str, path: str) -> None:
    answer = site.ask(method, path.format(name=MINE, version="1"), content=b"no JSON at all")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer realm="dormouse"'
    assert list(answer.json()) == ["error"]
    said = answer.json()["error"]
    assert "Authorization: Bearer" in (said["message"] if path.startswith("/v1/") else said)
    assert not site.node.seen


def test_a_path_that_is_not_there_is_not_told_from_one_that_is(site: Site) -> None:
    assert site.ask("GET", "/nowhere").status_code == 401
    assert site.ask("GET", "/nowhere", ACME).status_code == 404


@pytest.mark.parametrize("path", OPEN)
def test_health_and_the_document_need_no_key(site: Site, path: str) -> None:
    assert site.ask("GET", path).status_code == 200
    assert site.ask("GET", path, "wrong").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {ACME}"},
        {"Authorization": f"bearer  {ACME} "},
        {"x-api-key": ACME},
        {"Authorization": "Basic YTpi", "X-API-KEY": ACME},
    ],
)
def test_a_key_may_come_in_either_header(site: Site, headers: dict[str, str]) -> None:
    assert site.ask("GET", "/v2", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {ACME}"},
        {"Authorization": ACME},
        {"Authorization": "Bearer wrong", "x-api-key": ACME},
        {"x-api-key": ""},
        {"x-api-key": ACME + "x"},
        {"x-api-key": b"\xff\xfe"},
    ],
)
def test_what_is_no_key_of_this_server_is_401(site: Site, headers: dict[str, Any]) -> None:
    assert site.ask("GET", "/v2", headers=headers).status_code == 401


def test_a_wrong_key_is_not_repeated(site: Site) -> None:
    assert "secret" not in site.ask("GET", "/v2", "secret").text


# ------------------------------------------------------------------ whose function


NAMED = [(method, path) for method, path in routes() if "{name}" in path]


@pytest.mark.parametrize(("method", "path"), NAMED)
@pytest.mark.parametrize("hidden", [THEIRS, INNER])
def test_what_is_not_yours_is_answered_like_what_is_not_there(site: Site, method: str, path: str, hidden: str) -> None:
    """For the version that it has, and for one that it has not."""
    for version in ("1", "7"):
        answers = [
            site.ask(method, path.format(name=name, version=version), ACME, json=TOTALS if "infer" in path else None)
            for name in (hidden, UNKNOWN)
        ]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].text.replace(hidden, UNKNOWN) == answers[1].text
        assert answers[0].headers.keys() == answers[1].headers.keys()
    assert not site.node.seen
    assert hidden in site.node.deployed
    assert site.node.deployed[hidden].loaded


@pytest.mark.parametrize("key", CALLERS)
def test_lists_have_what_a_caller_may_see(site: Site, key: str) -> None:
    seen = VISIBLE[key]
    assert set(site.ask("GET", "/v2/models", key).json()["models"]) == seen
    assert {entry["name"] for entry in site.ask("POST", "/v2/repository/index", key).json()} == seen
    assert {each["name"] for each in site.ask("GET", "/v2/models/stats", key).json()["model_stats"]} == seen
    rows = {row["name"] for row in site.ask("GET", "/dormouse/functions", key).json()["functions"]}
    assert rows == OWNED[key]


@pytest.mark.parametrize("key", CALLERS)
def test_what_a_caller_may_see_it_may_call_and_it_pays(site: Site, key: str) -> None:
    for name in sorted(VISIBLE[key]):
        assert site.infer(name, key).json()["outputs"][0]["data"] == [11]
        for path in ("", "/ready", "/config", "/stats", "/versions/1/ready"):
            assert site.ask("GET", f"/v2/models/{name}{path}", key).status_code == 200
    assert {inference.tenant for inference in site.node.seen} == {CALLERS[key].tenant}
    assert len(site.node.seen) == len(VISIBLE[key])


def test_a_client_cannot_choose_who_pays(site: Site) -> None:
    request = TOTALS | {"parameters": {"tenant": "globex"}, "tenant": "globex"}
    headers = {"tenant": "globex", "x-tenant": "globex"}
    assert site.ask("POST", f"/v2/models/{MINE}/infer", ACME, json=request, headers=headers).status_code == 200
    assert [inference.tenant for inference in site.node.seen] == ["acme"]


OPERATIONS = [
    ("POST", f"/v2/repository/models/{MINE}/load"),
    ("POST", f"/v2/repository/models/{MINE}/unload"),
    ("POST", f"/v2/repository/models/{SHARED}/unload"),
    ("DELETE", f"/dormouse/functions/{MINE}"),
    ("POST", "/dormouse/functions"),
    ("POST", "/dormouse/check"),
    ("GET", "/dormouse/node"),
]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_operating_needs_an_admin_key(site: Site, method: str, path: str) -> None:
    manifest = {"name": "fresh", "source": "arithmetic:affine"}
    refused = site.ask(method, path, ACME, json=manifest)
    assert refused.status_code == 403
    assert "needs an admin key" in refused.json()["error"]
    assert "fresh" not in site.node.deployed
    assert all(each.loaded for each in site.node.deployed.values())
    assert site.ask(method, path, ADMIN, json={} if "repository" in path else manifest).status_code < 300


def test_a_deploy_is_whose_the_manifest_says_or_the_keys(site: Site, tmp_path: Path) -> None:
    key, _ = KeyFile(tmp_path).create("acme", admin=True, name="")
    for name, says in (("a", {}), ("b", {"tenant": "globex"}), ("c", {"public": True})):
        manifest = {"name": name, "source": "arithmetic:affine", **says}
        assert site.ask("POST", "/dormouse/functions", key, json=manifest).status_code == 201
    owners = [site.node.owner(name) for name in "abc"]
    assert [(owner.tenant, owner.public) for owner in owners] == [("acme", False), ("globex", False), ("acme", True)]
    site.infer(MINE, key)
    assert site.node.seen[0].tenant == "acme"


def test_a_key_revoked_while_the_server_runs_is_none(site: Site, tmp_path: Path) -> None:
    key, record = KeyFile(tmp_path).create("acme", admin=False, name="")
    assert site.infer(MINE, key).status_code == 200
    KeyFile(tmp_path).revoke(record.id)
    assert site.infer(MINE, key).status_code == 401


# ------------------------------------------------------------------ limits


def test_over_the_rate_is_429_with_the_time_to_come_again(site: Site) -> None:
    site.kept.limits["acme"] = Limits(rate=0.4, burst=2)
    assert [site.infer(MINE, ACME).status_code for _ in range(2)] == [200, 200]
    refused = site.infer(MINE, ACME)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
    assert refused.json() == {"error": "tenant 'acme' asks too much: the limit is 0.4 requests a second"}
    assert site.infer(THEIRS, GLOBEX).status_code == 200, "others are none the worse"
    site.kept.now_ns += 2_500_000_000
    assert site.infer(MINE, ACME).status_code == 200


def test_health_and_the_operator_have_no_limit(site: Site) -> None:
    site.kept.limits["acme"] = Limits(rate=0.1)
    site.infer(MINE, ACME)
    for _ in range(5):
        assert site.ask("GET", "/v2/health/ready", ACME).status_code == 200
        assert site.ask("GET", "/dormouse/node", ADMIN).status_code == 200


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(ACME)])
def test_a_refusal_comes_before_the_body_is_read(site: Site, headers: dict[str, str]) -> None:
    site.kept.limits["acme"] = Limits(rate=0.1)
    site.infer(MINE, ACME)

    async def receive() -> Message:
        raise AssertionError("somebody reads the body")

    status, _ = asyncio.run(conversation(site.app, receive, headers))
    assert status == (429 if headers == bearer(ACME) else 401)


# ------------------------------------------------------------------ slots


def test_as_many_may_be_open_as_the_limit_says_and_more_when_they_end(site: Site) -> None:
    site.kept.limits["acme"] = Limits(concurrency=2)

    async def run() -> list[int]:
        node = site.node
        node.gate, node.arrivals = asyncio.Event(), asyncio.Semaphore(0)
        transport = httpx.ASGITransport(site.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://dormouse", headers=bearer(ACME)) as client:
            path = f"/v2/models/{MINE}/infer"
            open_ones = [asyncio.create_task(client.post(path, json=TOTALS)) for _ in range(2)]
            for _ in open_ones:
                await node.arrivals.acquire()
            refused = await client.post(path, json=TOTALS)
            assert refused.headers["retry-after"] == "1"
            node.gate.set()
            answers = [*await asyncio.gather(*open_ones), await client.post(path, json=TOTALS)]
            return [refused.status_code, *(answer.status_code for answer in answers)]

    assert asyncio.run(run()) == [429, 200, 200, 200]
    assert site.open_requests() == 0


@pytest.mark.parametrize("path", ["/v2", "/nowhere", f"/v2/models/{UNKNOWN}/infer", f"/v2/models/{MINE}/ready"])
def test_every_answer_gives_its_slot_back(site: Site, path: str) -> None:
    site.kept.limits["acme"] = Limits(concurrency=1)
    for method in ("GET", "POST", "PUT", "HEAD"):
        assert site.ask(method, path, ACME, content=b"{").status_code != 429
        assert site.open_requests() == 0


@pytest.mark.parametrize("broken", ["bug", "late"])
@pytest.mark.parametrize("headers", [{}, LINES])
def test_a_failure_gives_its_slot_back(site: Site, broken: str, headers: dict[str, str]) -> None:
    """Before the answer has begun, and in the midst of it."""
    site.node.break_after_first = broken
    site.infer(MINE, ACME, headers=headers)
    assert site.open_requests() == 0


@pytest.mark.parametrize("headers", [bearer(ACME), bearer(ACME) | LINES])
def test_a_client_that_goes_gives_its_slot_back(site: Site, headers: dict[str, str]) -> None:
    async def run() -> int:
        site.node.gate, site.node.entered = asyncio.Event(), asyncio.Event()
        await conversation(site.app, body_then_gone(site.node.entered), headers)
        return site.open_requests()

    assert asyncio.run(run()) == 0
    assert site.node.cancelled == 1


def test_a_client_that_goes_in_the_midst_of_a_stream_gives_its_slot_back(site: Site) -> None:
    async def run() -> None:
        begun = asyncio.Event()
        site.node.break_after_first = ""

        def seen(body: bytes) -> None:
            if body:
                site.node.gate = asyncio.Event()  # the second chunk never comes
                begun.set()

        await conversation(site.app, body_then_gone(begun), bearer(ACME) | LINES, seen)

    asyncio.run(run())
    assert site.open_requests() == 0


def test_a_request_that_is_cancelled_gives_its_slot_back(site: Site) -> None:
    async def run() -> int:
        site.node.gate, site.node.entered = asyncio.Event(), asyncio.Event()
        request = asyncio.create_task(conversation(site.app, body_then_gone(asyncio.Event()), bearer(ACME)))
        await site.node.entered.wait()
        assert site.open_requests() == 1
        request.cancel()
        status, _ = await request
        return status

    assert asyncio.run(run()) == 503
    assert site.open_requests() == 0


def test_an_answer_that_cannot_be_sent_gives_its_slot_back(site: Site) -> None:
    async def run() -> None:
        def broken(_: bytes) -> None:
            raise OSError("the connection is gone")

        with pytest.raises(OSError, match="gone"):
            await conversation(site.app, body_then_gone(asyncio.Event()), bearer(ACME), broken)

    asyncio.run(run())
    assert site.open_requests() == 0


def body_then_gone(after: asyncio.Event) -> Callable[[], Awaitable[Message]]:
    """A client that sends a request, and leaves once ``after`` has happened."""
    messages = iter([{"type": "http.request", "body": json.dumps(TOTALS).encode(), "more_body": False}])

    async def receive() -> Message:
        message = next(messages, None)
        if message is None:
            await after.wait()
            return {"type": "http.disconnect"}
        return message

    return receive


async def conversation(
    app: ASGIApp,
    receive: Callable[[], Awaitable[Message]],
    headers: dict[str, str],
    on_body: Callable[[bytes], None] = lambda _: None,
) -> tuple[int, bytes]:
    """One inference in ASGI's own terms. Returns status and body."""
    path = f"/v2/models/{MINE}/infer"
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }
    status, parts = 0, []

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message["body"])
            on_body(message["body"])

    await app(scope, receive, send)
    return status, b"".join(parts)
