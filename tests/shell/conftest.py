"""The server that client and command line tests talk to: one for all, its node furnished afresh for each test."""

from collections.abc import Iterator

import pytest

from tests.shell.running import RunningServer, running


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    shared_server.node.furnish()
    return shared_server
