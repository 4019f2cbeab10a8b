"""Connections that never get as far as HTTP: they count, they end in time, and there may be no files for them."""

import contextlib
import http.client
import logging
import resource
import socket
import ssl
import threading
from collections.abc import Iterator

import httpx
import pytest

from dormouse.connections import Patience
from dormouse.tls import Identity, identity
from tests.shell.running import RunningServer, running
from tests.shell.test_tls import made

HELLO = b"\x16\x03\x01"
"""How a handshake begins."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    files = made(tmp_path_factory.mktemp("pem"))
    return identity(files.cert, files.key)


@contextlib.contextmanager
def stalled(server: RunningServer) -> Iterator[socket.socket]:
    """A connection whose handshake does not go on."""
    host, _, port = server.url.removeprefix("https://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(HELLO)
        yield connection


def trusting(known: Identity) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=known.certificates.decode())


def served(server: RunningServer, known: Identity) -> bool:
    return httpx.get(f"{server.url}/v2/health/live", verify=trusting(known)).status_code == 200


def has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_handshake_that_stalls_is_ended(known: Identity) -> None:
    with running(identity=known, patience=Patience(head_s=0.3)) as server, stalled(server) as connection:
        assert has_ended(connection)
        assert served(server, known)


def test_stalled_handshakes_count_and_make_room_the_longest_stalled_first(known: Identity) -> None:
    with running(identity=known, patience=Patience(connections=3)) as server, contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(stalled(server)) for _ in range(3))
        client = stack.enter_context(httpx.Client(verify=trusting(known)))
        assert client.get(f"{server.url}/v2/health/live").status_code == 200
        assert has_ended(first)
        stack.enter_context(stalled(server))
        assert has_ended(second)
        assert client.get(f"{server.url}/v2/health/live").status_code == 200
        third.setblocking(False)
        with pytest.raises(BlockingIOError):
            third.recv(1)


def test_a_server_with_stalled_handshakes_ends_without_them(known: Identity) -> None:
    with contextlib.ExitStack() as stack:
        with running(identity=known) as server:
            connection = stack.enter_context(stalled(server))
            assert served(server, known)
        assert has_ended(connection)


class Heard(logging.Handler):
    """Says when a line is written."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.said = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.said.set()


@contextlib.contextmanager
def no_files() -> Iterator[None]:
    """Inside, this process can open none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_files_for_it_a_connection_waits_and_those_that_rest_make_room() -> None:
    heard = Heard()
    logger = logging.getLogger("dormouse.connections")
    logger.addHandler(heard)
    try:
        with running() as server, socket.socket() as resting, socket.socket() as late:
            host, _, port = server.address.partition(":")
            for connection in (resting, late):
                connection.settimeout(30)
            resting.connect((host, int(port)))
            assert answered(resting) == 200
            with no_files():
                late.connect((host, int(port)))
                assert heard.said.wait(timeout=30)
                assert has_ended(resting)
            assert answered(late) == 200
    finally:
        logger.removeHandler(heard)
    assert heard.lines[0] == "no connection can be accepted for a moment: Too many open files"


def answered(connection: socket.socket) -> int:
    connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n")
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status
