"""The server that client and command line tests talk to: one for all, its node furnished afresh for each test."""

from collections.abc import Iterator

import pytest

from tests.shell.running import RunningServer, running
from tests.shell.tenanted import Kept, furnish


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    shared_server.node.furnish()
    return shared_server


@pytest.fixture(scope="session")
def shared_tenanted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(gate=Kept(tmp_path_factory.mktemp("state")).gate) as server:
        yield server


@pytest.fixture
def tenanted_server(shared_tenanted_server: RunningServer) -> RunningServer:
    """One that asks for keys, with the functions of tenanted.py, which are affine."""
    furnish(shared_tenanted_server.node, "affine")
    return shared_tenanted_server
