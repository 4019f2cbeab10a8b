"""The server that client and command line tests talk to: one for all, its node furnished afresh for each test."""

import logging
from collections.abc import Iterator

import pytest

from dormouse.logs import OURS
from tests.shell.running import RunningServer, running
from tests.shell.tenanted import Kept, furnish


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Who has begun to write logs does so for all that comes after in this process."""
    everybody, ours = logging.getLogger(), logging.getLogger(OURS)
    handlers, level = list(everybody.handlers), ours.level
    yield
    for handler in [each for each in everybody.handlers if each not in handlers]:
        everybody.removeHandler(handler)
    ours.setLevel(level)


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
