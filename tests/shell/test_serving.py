"""The assembled server: it says where it is, ends on a signal, and lets open requests end first."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from dormouse.config import NO_GRPC, Config
from dormouse.errors import ConfigurationFault
from dormouse.serving import Doors, bind, run, serve
from dormouse.tenants.keyfile import KeyFile
from tests.shell.grpc_caller import Caller, Refused, total_request
from tests.shell.in_memory import InMemory, furnished
from tests.shell.running import BODY_LIMIT_BYTES, running

TOTALS = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [5]}]}


class Opener:
    """Opens an in-memory node, and remembers that it was closed."""

    def __init__(self) -> None:
        self.node = furnished()
        self.closed = False

    @contextlib.asynccontextmanager
    async def __call__(self, _: Config) -> AsyncIterator[InMemory]:
        try:
            yield self.node
        finally:
            self.closed = True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_after_open_requests_and_then_closes_the_node(
    tmp_path: Path, number: signal.Signals
) -> None:
    opener = Opener()
    answers = []

    async def main() -> None:
        ready: asyncio.Future[Doors] = asyncio.get_running_loop().create_future()
        node = opener.node
        node.gate, node.entered = asyncio.Event(), asyncio.Event()

        async def talk() -> None:
            async with httpx.AsyncClient(base_url=(await ready).http) as client:
                request = asyncio.create_task(client.post("/v2/models/running_total/infer", json=TOTALS))
                assert node.entered is not None
                assert node.gate is not None
                await node.entered.wait()
                os.kill(os.getpid(), number)
                node.gate.set()
                answers.append(await request)

        config = Config(state_dir=tmp_path, port=0)
        await asyncio.gather(serve(config, on_ready=ready.set_result, open_node=opener), talk())

    run(main())
    assert answers[0].json()["outputs"][0]["data"] == [5]
    assert opener.closed
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_signal_does_not_wait_for_open_requests(tmp_path: Path) -> None:
    opener = Opener()

    async def main() -> None:
        ready: asyncio.Future[Doors] = asyncio.get_running_loop().create_future()
        node = opener.node
        node.gate, node.entered = asyncio.Event(), asyncio.Event()

        async def talk() -> None:
            async with httpx.AsyncClient(base_url=(await ready).http) as client:
                request = asyncio.create_task(client.post("/v2/models/running_total/infer", json=TOTALS))
                assert node.entered is not None
                await node.entered.wait()
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGTERM)
                await serving
                request.cancel()

        serving = asyncio.create_task(
            serve(Config(state_dir=tmp_path, port=0), on_ready=ready.set_result, open_node=opener)
        )
        await talk()

    run(main())
    assert opener.closed


def test_an_address_in_use_is_one_clear_line() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigurationFault, match=f"cannot listen on 127.0.0.1 port {port}: .*; choose another"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no such host", "a" * 70 + ".b"])
def test_a_host_that_is_none_is_one_clear_line(host: str) -> None:
    with pytest.raises(ConfigurationFault, match=f"host = '{host}' cannot be used"):
        bind(host, 0)


def test_both_doors_are_open_when_the_server_says_so_and_end_alike(tmp_path: Path) -> None:
    """An inference over gRPC that is under way when the signal comes is answered, too."""
    opener = Opener()

    async def main() -> None:
        ready: asyncio.Future[Doors] = asyncio.get_running_loop().create_future()
        node = opener.node
        node.gate, node.arrivals = asyncio.Event(), asyncio.Semaphore(0)

        async def talk() -> None:
            doors = await ready
            assert doors.grpc is not None
            with Caller(doors.grpc) as caller:
                request = asyncio.create_task(asyncio.to_thread(caller.infer, total_request(1)))
                assert node.arrivals is not None
                assert node.gate is not None
                await node.arrivals.acquire()
                os.kill(os.getpid(), signal.SIGTERM)
                node.gate.set()
                assert len((await request).raw_output_contents) == 1

        config = Config(state_dir=tmp_path, port=0)
        await asyncio.gather(serve(config, on_ready=ready.set_result, open_node=opener), talk())

    run(main())
    assert opener.closed


def test_a_second_signal_does_not_wait_for_open_calls_either(tmp_path: Path) -> None:
    opener = Opener()

    async def main() -> None:
        ready: asyncio.Future[Doors] = asyncio.get_running_loop().create_future()
        node = opener.node
        node.gate, node.arrivals = asyncio.Event(), asyncio.Semaphore(0)
        config = Config(state_dir=tmp_path, port=0)
        serving = asyncio.create_task(serve(config, on_ready=ready.set_result, open_node=opener))
        doors = await ready
        assert doors.grpc is not None
        with Caller(doors.grpc) as caller:
            call = caller.begin(total_request(1))
            await node.arrivals.acquire()
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            await serving
            assert call.code().name in ("UNAVAILABLE", "CANCELLED")

    run(main())
    assert opener.closed


def test_without_grpc_there_is_one_door(tmp_path: Path) -> None:
    found = []

    def ready(doors: Doors) -> None:
        found.append(doors)
        os.kill(os.getpid(), signal.SIGTERM)

    run(serve(Config(state_dir=tmp_path, port=0, grpc_port=NO_GRPC), on_ready=ready, open_node=Opener()))
    assert [doors.grpc for doors in found] == [None]


def test_a_grpc_port_in_use_is_one_clear_line_and_nothing_is_opened(tmp_path: Path) -> None:
    opener = Opener()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = Config(state_dir=tmp_path, port=0, grpc_port=port)
        with pytest.raises(ConfigurationFault, match=f"cannot listen on 127.0.0.1 port {port}: .* --grpc-port"):
            run(serve(config, on_ready=lambda _: None, open_node=opener))
    assert not opener.closed


def test_nothing_is_opened_when_the_address_is_taken(tmp_path: Path) -> None:
    opener = Opener()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = Config(state_dir=tmp_path, port=taken.getsockname()[1])
        with pytest.raises(ConfigurationFault):
            run(serve(config, on_ready=lambda _: None, open_node=opener))
    assert not opener.closed


@pytest.mark.parametrize("endless", [b"a", b"\r\nX-A: b"])
def test_a_head_without_end_is_refused_before_it_fills_memory(endless: bytes) -> None:
    with running() as server:
        host, _, port = server.address.partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"GET /v2/models HTTP/1.1\r\nHost: a\r\nX-A: ")
            with pytest.raises(ConnectionError):
                while True:
                    connection.sendall(endless * 10_000)
        assert httpx.get(f"{server.url}/v2/health/live").status_code == 200


def test_a_long_head_and_a_longer_body_are_fine() -> None:
    with running() as server, httpx.Client(base_url=server.url) as client:
        for _ in range(2):  # on one connection
            answer = client.post(
                "/v2/models/running_total/infer", json=TOTALS, headers={"X-A": 60_000 * "a", "X-B": 60_000 * "b"}
            )
            assert answer.status_code == 200
            assert client.post("/v2/repository/index", content=b" " * BODY_LIMIT_BYTES).status_code == 400


# ------------------------------------------------------------------ keys


def statuses(config: Config, headers: dict[str, str]) -> list[int]:
    """What a server with this configuration answers with and without a key, over HTTP and over gRPC."""
    found = []

    async def main() -> None:
        ready: asyncio.Future[Doors] = asyncio.get_running_loop().create_future()

        async def talk() -> None:
            doors = await ready
            assert doors.grpc is not None
            try:
                async with httpx.AsyncClient(base_url=doors.http.replace("0.0.0.0", "127.0.0.1")) as client:
                    for given in ({}, headers):
                        found.append((await client.get("/v2/models", headers=given)).status_code)
                with Caller(doors.grpc) as caller, contextlib.suppress(Refused):
                    await asyncio.to_thread(caller.ask, "RepositoryIndex")
                    found.append(0)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        await asyncio.gather(serve(config, on_ready=ready.set_result, open_node=Opener()), talk())

    run(main())
    return found


def test_beyond_loopback_both_doors_ask_for_keys(tmp_path: Path) -> None:
    config = Config(state_dir=tmp_path, host="0.0.0.0", port=0)
    with pytest.raises(ConfigurationFault, match="there is no admin key"):
        statuses(config, {})
    key, _ = KeyFile(tmp_path).create("", admin=True, name="")
    assert statuses(config, {"x-api-key": key}) == [401, 200]


def test_without_auth_nobody_is_asked_anywhere(tmp_path: Path) -> None:
    config = Config(state_dir=tmp_path, host="0.0.0.0", port=0, auth=False)
    assert statuses(config, {}) == [200, 200, 0]


def test_on_loopback_nobody_is_asked_before_there_are_keys(tmp_path: Path) -> None:
    config = Config(state_dir=tmp_path, port=0)
    assert statuses(config, {}) == [200, 200, 0]
    key, _ = KeyFile(tmp_path).create("", admin=True, name="")
    assert statuses(config, {"Authorization": f"Bearer {key}"}) == [401, 200]
