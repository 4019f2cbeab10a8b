"""Connections that are slow, silent, half closed or many: they are ended, and do not stop the rest."""

import asyncio
import contextlib
import http.client
import json
import logging
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from dormouse import logs
from dormouse.connections import MOST_WAITING, SLICE_BYTES, Patience, connection_class
from dormouse.tenants.callers import OPERATOR, Caller
from dormouse.tenants.gate import OpenGate
from tests.shell.running import RunningServer, running
from tests.shell.tenanted import Kept

SOON = Patience(head_s=0.3, body_s=0.3, connections=5_000)
TOTALS = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [2], "data": [5, 6]}]}
HEAD = b"POST /v2/models/running_total/infer HTTP/1.1\r\nHost: a\r\n"
BODY = json.dumps(TOTALS).encode()
WHOLE = HEAD + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY


@pytest.fixture(scope="module")
def impatient() -> Iterator[RunningServer]:
    with running(patience=SOON) as server:
        yield server


@pytest.fixture
def server(impatient: RunningServer) -> RunningServer:
    impatient.node.furnish()
    return impatient


@contextlib.contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    host, _, port = server.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        yield connection


def answered(connection: socket.socket) -> int:
    """The status of the next answer, which is read to its end, in however many pieces it comes."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def trickled(connection: socket.socket, text: bytes) -> bytes:
    """Send it over and over, a byte at a time and slowly, until the server answers; what it answers."""
    connection.settimeout(0.02)
    for _ in range(1_000):
        for byte in text:
            try:
                connection.sendall(bytes([byte]))
                first = connection.recv(1)
            except TimeoutError:
                continue
            except ConnectionError:
                return b""
            connection.settimeout(30)
            return first + rest_of(connection)
    raise AssertionError("the server never lost its patience")


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


def error_of(answer: bytes) -> Any:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return json.loads(body)["error"]


def serves(server: RunningServer) -> bool:
    return httpx.post(f"{server.url}/v2/models/running_total/infer", json=TOTALS).status_code == 200


# ------------------------------------------------------------------ slow


def test_a_head_that_trickles_is_408(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(HEAD)
        assert serves(server)
        answer = trickled(connection, b"X-A: b\r\n")
    assert status_of(answer) == 408
    assert error_of(answer) == "the request's head took longer than 0.3 s to arrive"


def test_a_head_that_is_never_ended_is_408(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(b"G")
        assert status_of(rest_of(connection)) == 408


@pytest.mark.parametrize("kind", [b"Content-Length: 100000", b"Transfer-Encoding: chunked"])
def test_a_body_that_trickles_is_408_and_asks_nothing(server: RunningServer, kind: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(HEAD + kind + b"\r\n\r\n")
        answer = trickled(connection, b"1\r\n \r\n" if b"chunked" in kind else b" ")
    assert status_of(answer) == 408
    assert error_of(answer) == "the request's body took longer than 0.3 s to arrive"
    assert not server.node.seen


def test_a_second_request_on_a_connection_is_timed_afresh(server: RunningServer) -> None:
    with connected(server) as connection:
        for _ in range(3):
            connection.sendall(WHOLE)
            assert answered(connection) == 200
        connection.sendall(HEAD + b"Content-Length: 5\r\n\r\n12")
        assert status_of(rest_of(connection)) == 408


def test_a_request_in_pieces_that_comes_in_time_is_answered(server: RunningServer) -> None:
    with connected(server) as connection:
        for start in range(0, len(WHOLE), 40):
            connection.sendall(WHOLE[start : start + 40])
        assert answered(connection) == 200


def test_a_long_answer_does_not_count_against_the_next_request(server: RunningServer) -> None:
    """What waits behind an answer that takes its time is not slow."""

    async def hold() -> asyncio.Event:
        server.node.gate = asyncio.Event()
        return server.node.gate

    async def release() -> None:
        # After many times the patience: the loop's own timers come in order.
        loop, waited = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(3 * SOON.head_s, waited.set)
        await waited.wait()
        gate.set()

    gate = there(server, hold())
    with connected(server) as connection:
        connection.sendall(WHOLE + HEAD)
        connection.sendall(b"X-A: b\r\n")
        there(server, release())
        assert re.findall(rb"HTTP/1.1 ([0-9]+)", rest_of(connection)) == [b"200", b"408"]


def test_a_body_that_still_trickles_after_the_answer_ends_the_connection(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with running(Kept(tmp_path_factory.mktemp("state")).gate, SOON) as server, connected(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
        assert answered(connection) == 401
        assert trickled(connection, b" ") == b""


class Watched(OpenGate):
    """Says when a request has been left, for whatever reason."""

    def __init__(self) -> None:
        self.left = threading.Semaphore(0)

    def leave(self, caller: Caller) -> None:
        del caller
        self.left.release()


def test_a_client_that_takes_nothing_of_its_answer_is_given_up() -> None:
    numbers = {"name": "x", "datatype": "INT64", "shape": [60_000], "data": [1] * 60_000}
    body = json.dumps({"inputs": [numbers]}).encode()
    gate = Watched()
    with running(gate, SOON) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # else the system takes megabytes for it
        connection.settimeout(30)
        host, _, port = server.address.partition(":")
        connection.connect((host, int(port)))
        accept = f"Accept: application/x-ndjson\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(HEAD + accept.encode() + body)
        assert gate.left.acquire(timeout=30)
        assert not rest_of(connection).endswith(b"\r\n0\r\n\r\n")


def test_what_is_no_http_is_refused_like_everything_else(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = rest_of(connection)
    assert (status_of(answer), error_of(answer)) == (400, "Invalid HTTP request received.")


# ------------------------------------------------------------------ half closed


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, HEAD + b"Content-Length: 9\r\n\r\n123", WHOLE])
def test_a_half_closed_connection_ends(server: RunningServer, sent: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        rest_of(connection)
    assert serves(server)


# ------------------------------------------------------------------ many


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_thousand_idle_connections_do_not_stop_the_rest(server: RunningServer) -> None:
    """Half of them silent, half of them after a request."""
    with contextlib.ExitStack() as idle:
        for number in range(1_000):
            connection = idle.enter_context(connected(server))
            if number % 2:
                connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n")
                assert answered(connection) == 200
        assert serves(server)


def test_resting_connections_make_room_for_new_ones_the_longest_resting_first() -> None:
    with running(patience=Patience(connections=3)) as server, contextlib.ExitStack() as stack:
        first, second, third = (asked(stack.enter_context(connected(server))) for _ in range(3))
        asked(first)  # rests since later than the second now
        fourth = asked(stack.enter_context(connected(server)))
        assert second.recv(1) == b""
        for connection in (first, third, fourth):
            asked(connection)


def test_where_none_rests_a_new_connection_is_turned_away() -> None:
    with running(patience=Patience(connections=2)) as server, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connected(server)) for _ in range(2)]
        for connection in busy:
            connection.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
            assert status_of(connection.recv(4096)) == 100
        with connected(server) as late:
            answer = rest_of(late)
        assert status_of(answer) == 503
        assert b"Retry-After: 1\r\n" in answer
        assert "too many connections" in error_of(answer)
        busy[0].close()
        busy[1].sendall(b"12345")
        assert answered(busy[1]) == 400


def asked(connection: socket.socket) -> socket.socket:
    connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n")
    assert answered(connection) == 200
    return connection


def there(server: RunningServer, work: Any) -> Any:
    """Done on the server's event loop."""
    return asyncio.run_coroutine_threadsafe(work, server.loop).result(timeout=30)


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "connections", "files"),
    [
        (256, 20_000, 10, 10, 4_116),
        (8_000, 20_000, 10, 10, 8_000),
        (256, 20_000, 10**6, 7_952, 20_000),
        (256, 1_024, 10_000, 256, 1_024),
    ],
)
def test_files_for_as_many_connections_are_asked_of_the_system(
    soft: int, hard: int, wanted: int, connections: int, files: int
) -> None:
    """In a process of its own, as a lower limit cannot be raised again."""
    code = (
        "import resource; from dormouse.connections import within_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        f"print(within_files({wanted}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(connections), str(files)]
    assert ("connections = " in done.stderr) == (connections < wanted)


def test_an_open_gate_lets_everybody_in() -> None:
    gate = OpenGate()
    assert gate.caller_of({"authorization": "Bearer whatever"}) == OPERATOR
    with gate.inside(OPERATOR), gate.streaming(OPERATOR):
        gate.check(OPERATOR)


# ------------------------------------------------------------------ many requests on one connection

TINY = b"GET /v2/health/live HTTP/1.1\r\n\r\n"
UNKNOWN = b"GET /nowhere HTTP/1.1\r\n\r\n"


def statuses(connection: socket.socket, count: int) -> list[int]:
    """Of so many answers, which may come in one piece."""
    found = []
    with connection.makefile("rb") as answers:
        for _ in range(count):
            found.append(int(answers.readline().split()[1]))
            length = 0
            while (line := answers.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            assert len(answers.read(length)) == length
    return found


def test_requests_in_one_write_are_answered_in_their_order(server: RunningServer) -> None:
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
    with connected(server) as connection:
        connection.sendall((TINY + WHOLE + UNKNOWN + chunked) * 100)
        assert statuses(connection, 400) == [200, 200, 404, 200] * 100


def test_a_long_body_among_other_requests_is_read_whole(server: RunningServer) -> None:
    body = b" " * 300_000 + BODY
    longer = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    with connected(server) as connection:
        sent = threading.Thread(target=connection.sendall, args=((TINY * 40 + longer + UNKNOWN) * 5,))
        sent.start()
        assert statuses(connection, 5 * 42) == ([200] * 41 + [404]) * 5
        sent.join()


def test_what_is_no_http_is_refused_after_the_answers_before_it(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(WHOLE * 30 + b"\x16\x03\x01 hello\r\n\r\n" + WHOLE)
        assert statuses(connection, 31) == [200] * 30 + [400]
        assert rest_of(connection) == b""


def test_after_a_request_that_says_it_is_the_last_none_is_answered(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(TINY * 100 + b"GET /nowhere HTTP/1.1\r\nConnection: close\r\n\r\n" + TINY * 100)
        assert statuses(connection, 101) == [200] * 100 + [404]
        assert rest_of(connection) == b""


class Wire(asyncio.Transport):
    """The server's end of a connection, of which a test is the system. Like uvloop's it cannot be used once gone."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.reads = True
        self.gone = False

    def is_closing(self) -> bool:
        return self.gone

    def is_reading(self) -> bool:
        return self.reads

    def pause_reading(self) -> None:
        assert not self.gone
        self.reads = False

    def resume_reading(self) -> None:
        assert not self.gone
        self.reads = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.gone
        self.written += data

    def close(self) -> None:
        self.gone = True


@contextlib.contextmanager
def wired() -> Iterator[tuple[HttpToolsProtocol, Wire, asyncio.Event]]:
    """A connection whose requests are answered once the event is set."""
    answering = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await answering.wait()
        await Response(status_code=204)(scope, receive, send)

    config = uvicorn.Config(app, log_config=None, ws="none", lifespan="off", timeout_keep_alive=75)
    connection, wire = connection_class(SOON)(config, ServerState(), {}), Wire()
    connection.connection_made(wire)
    yield connection, wire, answering
    connection.connection_lost(None)


async def settled(connection: HttpToolsProtocol) -> None:
    while connection.tasks:
        await asyncio.wait(connection.tasks)


COUNTED = b"POST /a HTTP/1.1\r\nContent-Length: 3000\r\n\r\n" + (TINY * 94)[:3000]


@pytest.mark.parametrize("first", [TINY, COUNTED])
def test_of_many_requests_few_wait_and_nothing_is_read_so_long(first: bytes) -> None:
    async def flood() -> None:
        with wired() as (connection, wire, answering):
            connection.data_received(first + TINY * 9_999)
            assert len(connection.pipeline) < MOST_WAITING + SLICE_BYTES // len(TINY)
            for _ in range(10):
                await asyncio.sleep(0)
            assert not wire.is_reading()
            connection.data_received(TINY * 10)  # which TLS may have decrypted already
            answering.set()
            await settled(connection)
            assert wire.written.count(b"HTTP/1.1 204") == 10_010
            assert wire.is_reading()
            assert not connection.pipeline

    asyncio.run(flood())


@pytest.mark.parametrize("count", [2, 30, 10_000])
def test_a_client_that_hangs_up_leaves_nothing_behind(count: int, caplog: pytest.LogCaptureFixture) -> None:
    async def hang_up() -> None:
        with wired() as (connection, wire, answering):
            connection.data_received(TINY * count)
            await asyncio.sleep(0)
            wire.close()
            connection.connection_lost(None)
            answering.set()
            await settled(connection)
            assert not wire.written

    asyncio.run(hang_up())
    assert not caplog.records


# ------------------------------------------------------------------ what is said of it


@pytest.mark.parametrize("said", [b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"])
def test_what_is_no_http_is_logged_a_few_times_a_second(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    began_ns = time.monotonic_ns()
    with running() as server:
        for _ in range(100):
            with connected(server) as connection:
                connection.sendall(said)
                assert status_of(rest_of(connection)) == 400
    seconds = 2 + (time.monotonic_ns() - began_ns) // logs.SECOND_NS
    lines = [record for record in caplog.records if record.name == "dormouse.connections"]
    assert 0 < len(lines) <= min(99, logs.MOST_LINES * seconds)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn") and record.levelno > 20]


def test_a_websocket_is_answered_as_if_it_had_not_been_asked_for(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(server) as connection:
        connection.sendall(TINY.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"))
        assert answered(connection) == 200
        asked(connection)
    assert not caplog.records
