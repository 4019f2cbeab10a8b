"""The gate before the gRPC door: the same rules as over HTTP, for calls and for each request of a stream."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from dormouse.gateway.grpc_calls import METHODS
from dormouse.gateway.grpc_messages import HEALTH, INFERENCE, message
from dormouse.tenants.keyfile import KeyFile
from dormouse.tenants.limits import Limits
from tests.shell.grpc_caller import Caller, Refused, raw_request
from tests.shell.running import RunningServer, running
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
    furnish,
)

CHECK = f"/{HEALTH}/Check"
INFER = f"/{INFERENCE}/ModelInfer"


class Site:
    """A running server of two tenants."""

    def __init__(self, server: RunningServer, kept: Kept, directory: Path) -> None:
        self.server, self.kept, self.directory = server, kept, directory
        self.node = server.node
        furnish(self.node)
        kept.limits.clear()
        kept.now_ns += 10**15

    def caller(self, key: str | None = None) -> Caller:
        return Caller(self.server.grpc, () if key is None else (("authorization", f"Bearer {key}"),))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Kept, Path]]:
    directory = tmp_path_factory.mktemp("state")
    kept = Kept(directory)
    with running(gate=kept.gate) as server:
        yield server, kept, directory


@pytest.fixture
def site(served: tuple[RunningServer, Kept, Path]) -> Site:
    return Site(*served)


def request(name: str, count: int = 1) -> Any:
    return raw_request(name, "INT64", np.arange(1, count + 1))


def fields(path: str, name: str, version: str = "") -> dict[str, Any]:
    """What makes a call one of a model."""
    if path.endswith(("ModelLoad", "ModelUnload")):
        return {"model_name": name}
    return {"name": name, "version": version}


OF_A_MODEL = [
    f"/{INFERENCE}/{name}"
    for name in (
        "ModelReady",
        "ModelMetadata",
        "ModelConfig",
        "ModelStatistics",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
    )
]


# ------------------------------------------------------------------ keys


@pytest.mark.parametrize("path", [path for path, method in METHODS.items() if not method.streams])
@pytest.mark.parametrize("key", [None, "wrong"])
def test_every_call_but_health_needs_a_key_and_is_refused_before_its_message_is_looked_at(
    site: Site, path: str, key: str | None
) -> None:
    with site.caller(key) as caller:
        if path.endswith(("ServerLive", "ServerReady", "Check")):
            assert caller.ask(path) is not None
            return
        with pytest.raises(Refused) as caught:
            caller.send(path, b"\xff is no message")
    assert caught.value.status == "UNAUTHENTICATED"
    assert "key" in caught.value.text


def test_a_stream_needs_a_key(site: Site) -> None:
    with site.caller() as caller, pytest.raises(Refused, match="UNAUTHENTICATED"):
        list(caller.stream([request(MINE).SerializeToString()]))


@pytest.mark.parametrize("metadata", [("authorization", f"Bearer {ACME}"), ("x-api-key", ACME)])
def test_a_key_may_come_in_either_metadatum(site: Site, metadata: tuple[str, str]) -> None:
    with Caller(site.server.grpc, (metadata,)) as caller:
        assert caller.ask("ServerMetadata").name == "dormouse"


def test_the_health_of_a_function_is_told_to_who_may_see_it(site: Site) -> None:
    with site.caller() as stranger, pytest.raises(Refused, match="UNAUTHENTICATED"):
        stranger.ask(CHECK, service=MINE)
    with site.caller(ACME) as caller:
        assert caller.ask(CHECK, service=MINE).status == 1
        with pytest.raises(Refused, match="NOT_FOUND"):
            caller.ask(CHECK, service=THEIRS)


# ------------------------------------------------------------------ whose function


@pytest.mark.parametrize("path", OF_A_MODEL)
@pytest.mark.parametrize("version", ["", "1", "7"])
@pytest.mark.parametrize("hidden", [THEIRS, INNER])
def test_what_is_not_yours_is_answered_like_what_is_not_there(site: Site, path: str, version: str, hidden: str) -> None:
    answers = []
    with site.caller(ACME) as caller:
        for name in (hidden, UNKNOWN):
            with pytest.raises(Refused) as caught:
                caller.ask(path, **fields(path, name, version))
            answers.append((caught.value.status, caught.value.text.replace(hidden, UNKNOWN), caught.value.trailing))
    assert answers[0] == answers[1] == ("NOT_FOUND", f"no function {UNKNOWN!r}", {})
    assert site.node.deployed[hidden].loaded


@pytest.mark.parametrize("hidden", [THEIRS, INNER])
def test_neither_a_call_nor_a_stream_infers_what_is_not_yours(site: Site, hidden: str) -> None:
    with site.caller(ACME) as caller:
        texts = []
        for name in (hidden, UNKNOWN):
            with pytest.raises(Refused, match="NOT_FOUND") as caught:
                caller.infer(request(name))
            (answer,) = caller.stream([request(name).SerializeToString()])
            texts += [caught.value.text.replace(hidden, UNKNOWN), answer.error_message.replace(hidden, UNKNOWN)]
    assert texts == [f"no function {UNKNOWN!r}"] * 4
    assert not site.node.seen


@pytest.mark.parametrize("key", CALLERS)
def test_lists_have_what_a_caller_may_see_and_calls_are_on_its_account(site: Site, key: str) -> None:
    with site.caller(key) as caller:
        assert {model.name for model in caller.ask("RepositoryIndex").models} == VISIBLE[key]
        assert {each.name for each in caller.ask("ModelStatistics").model_stats} == VISIBLE[key]
        for name in sorted(VISIBLE[key]):
            caller.infer(request(name))
            list(caller.stream([request(name).SerializeToString()]))
    assert [inference.tenant for inference in site.node.seen] == [CALLERS[key].tenant] * 2 * len(VISIBLE[key])


@pytest.mark.parametrize("call", ["RepositoryModelLoad", "RepositoryModelUnload"])
@pytest.mark.parametrize("name", [MINE, SHARED])
def test_operating_needs_an_admin_key(site: Site, call: str, name: str) -> None:
    with site.caller(ACME) as caller, pytest.raises(Refused, match=r"PERMISSION_DENIED: .* needs an admin key"):
        caller.ask(call, model_name=name)
    assert site.node.deployed[name].loaded
    with site.caller(ADMIN) as caller:
        caller.ask(call, model_name=name)


# ------------------------------------------------------------------ limits


def test_over_the_rate_is_refused_with_the_time_to_come_again(site: Site) -> None:
    site.kept.limits["acme"] = Limits(rate=0.4, burst=2)
    with site.caller(ACME) as caller:
        for _ in range(2):
            caller.infer(request(MINE))
        with pytest.raises(Refused) as caught:
            caller.send(INFER, b"\xff is no message, which nobody sees")
        assert caught.value.status == "RESOURCE_EXHAUSTED"
        assert caught.value.text == "tenant 'acme' asks too much: the limit is 0.4 requests a second"
        assert caught.value.trailing == {"retry-after": "3", "grpc-retry-pushback-ms": "2500"}
        for _ in range(3):
            assert caller.ask("ServerReady").ready
        with site.caller(GLOBEX) as other:
            other.infer(request(THEIRS))
        site.kept.now_ns += 2_500_000_000
        caller.infer(request(MINE))


def test_each_request_of_a_stream_counts_and_the_stream_goes_on(site: Site) -> None:
    site.kept.limits["acme"] = Limits(rate=1, burst=2)
    with site.caller(ACME) as caller:
        answers = list(caller.stream([request(MINE).SerializeToString()] * 4))
    errors = sorted(answer.error_message for answer in answers)
    assert errors == ["", "", *["tenant 'acme' asks too much: the limit is 1 requests a second"] * 2]


def test_as_many_streams_may_be_open_as_requests(site: Site) -> None:
    site.kept.limits["acme"] = Limits(concurrency=1)
    released = threading.Event()

    def wires() -> Iterator[bytes]:
        yield request(MINE).SerializeToString()
        released.wait()

    with site.caller(ACME) as caller:
        first = caller.open_stream(wires())
        next(first)
        with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
            list(caller.stream([request(MINE).SerializeToString()]))
        caller.infer(request(MINE))  # an idle stream takes no request's place
        released.set()
        assert list(first) == []
        assert len(list(caller.stream([request(MINE).SerializeToString()]))) == 1


def test_a_key_revoked_while_a_stream_is_open_ends_its_use(site: Site) -> None:
    key, record = KeyFile(site.directory).create("acme", admin=False, name="")
    revoked = threading.Event()

    def wires() -> Iterator[bytes]:
        yield request(MINE).SerializeToString()
        revoked.wait()
        yield request(MINE).SerializeToString()

    with site.caller(key) as caller:
        answers = caller.stream(wires())
        assert next(answers).error_message == ""
        KeyFile(site.directory).revoke(record.id)
        revoked.set()
        assert next(answers).error_message == "the key is none of this server's, or was revoked"


# ------------------------------------------------------------------ slots


def held_back(site: Site, begin: Callable[[Caller], Any]) -> None:
    """Begin a call that is held back in the node, let its client go, and find its slot given back."""
    node = site.node

    async def hold() -> None:
        node.gate, node.arrivals, node.departures = asyncio.Event(), asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def arrived() -> int:
        assert node.arrivals is not None
        await node.arrivals.acquire()
        return site.kept.gate.open("acme")

    async def departed() -> None:
        assert node.departures is not None
        await node.departures.acquire()

    def there(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, site.server.loop).result(timeout=30)

    there(hold())
    with site.caller(ACME) as caller:
        call = begin(caller)
        assert there(arrived()) == 1
        call.cancel()
        there(departed())
        assert there(opened(site)) == 0


async def opened(site: Site) -> int:
    return site.kept.gate.open("acme")


def test_a_call_that_is_cancelled_gives_its_slot_back(site: Site) -> None:
    held_back(site, lambda caller: caller.begin(request(MINE)))


def test_a_stream_that_is_cancelled_gives_its_slots_back(site: Site) -> None:
    held_back(site, lambda caller: caller.open_stream([request(MINE).SerializeToString()]))


@pytest.mark.parametrize("broken", ["bug", "late"])
def test_a_failure_gives_its_slot_back(site: Site, broken: str) -> None:
    site.node.break_after_first = broken
    with site.caller(ACME) as caller:
        with pytest.raises(Refused):
            caller.infer(request(MINE))
        with pytest.raises(Refused, match="INVALID_ARGUMENT"):
            caller.send(INFER, b"\xff is no message")
        (*_, answer) = caller.stream([request(MINE, 3).SerializeToString()])
        assert answer.error_message
    assert asyncio.run_coroutine_threadsafe(opened(site), site.server.loop).result(timeout=30) == 0


def test_more_than_may_be_open_at_once_are_refused_and_none_is_lost(site: Site) -> None:
    site.kept.limits["acme"] = Limits(concurrency=3)

    async def run() -> list[str]:
        async with grpc.aio.insecure_channel(site.server.grpc) as channel:
            call = channel.unary_unary(INFER, response_deserializer=message("ModelInferResponse").FromString)
            wire, metadata = request(MINE).SerializeToString(), (("x-api-key", ACME),)

            async def ask() -> str:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await call(wire, metadata=metadata, timeout=30)
                    return "OK"
                return "refused"

            return await asyncio.gather(*(ask() for _ in range(60)))

    answers = asyncio.run(run())
    assert answers.count("OK") == len(site.node.seen) >= 3
    assert asyncio.run_coroutine_threadsafe(opened(site), site.server.loop).result(timeout=30) == 0
