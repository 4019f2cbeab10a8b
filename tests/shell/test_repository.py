"""Load and unload: waited for, or answered at once and seen to their end all the same."""

import asyncio
import logging

import pytest

from dormouse.errors import HostMemoryFull, InvalidRequest, UnknownFunction
from dormouse.gateway.repository import Repository
from tests.shell.grpc_caller import Caller, Refused
from tests.shell.in_memory import InMemory, furnished
from tests.shell.running import RunningServer
from tests.shell.test_app import answer_to

NO_WAIT = {"wait": False}


def test_an_answer_may_come_before_the_end() -> None:
    node = furnished()

    async def run() -> None:
        node.operations = asyncio.Event()
        repository = Repository(node)
        await repository.unload("affine", NO_WAIT)
        assert node.deployed["affine"].loaded
        waited = asyncio.create_task(repository.unload("upper", {}))
        node.operations.set()
        await waited
        assert not node.deployed["affine"].loaded, "it was asked for first"

    asyncio.run(run())


@pytest.mark.parametrize("parameters", [{}, {"wait": True}, {"wait": None}])
def test_otherwise_it_is_the_end(parameters: dict[str, object]) -> None:
    node = furnished()
    asyncio.run(Repository(node).unload("affine", parameters))
    assert not node.deployed["affine"].loaded


def test_what_cannot_be_is_refused_at_once_in_any_case() -> None:
    repository = Repository(furnished())
    with pytest.raises(UnknownFunction):
        asyncio.run(repository.load("nobody", NO_WAIT))
    with pytest.raises(InvalidRequest, match="wait is 'no', expected true or false"):
        asyncio.run(repository.unload("affine", {"wait": "no"}))
    with pytest.raises(InvalidRequest, match="'config' is not supported"):
        asyncio.run(repository.load("affine", {"config": "{}", **NO_WAIT}))


class Failing(InMemory):
    """Raises what nobody expects."""

    async def load(self, name: str) -> None:
        raise ZeroDivisionError(name)


def test_what_fails_later_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def run(node: InMemory) -> None:
        await Repository(node).load("affine", NO_WAIT)
        for _ in range(3):
            await asyncio.sleep(0)

    full, failing = furnished(), Failing()
    full.host_is_full = True
    failing.deployed = full.deployed
    with pytest.raises(HostMemoryFull):
        asyncio.run(Repository(full).load("affine", {}))
    with caplog.at_level(logging.WARNING):
        asyncio.run(run(full))
        asyncio.run(run(failing))
    first, second = caplog.records
    assert first.getMessage().startswith("function 'affine': function 'affine' needs 9.0 GiB")
    assert second.exc_info is not None


def test_both_doors_have_it(server: RunningServer) -> None:
    assert answer_to("POST", "/v2/repository/models/affine/unload", json={"parameters": NO_WAIT}).status_code == 200
    assert answer_to("POST", "/v2/repository/models/nobody/load", json={"parameters": NO_WAIT}).status_code == 404
    with Caller(server.grpc) as caller:
        wait = {"wait": {"bool_param": False}}
        assert caller.ask("RepositoryModelUnload", model_name="affine", parameters=wait).model_name == "affine"
        with pytest.raises(Refused, match="NOT_FOUND"):
            caller.ask("RepositoryModelLoad", model_name="nobody", parameters=wait)


def test_full_host_memory_is_507_and_resource_exhausted(server: RunningServer) -> None:
    server.node.host_is_full = True
    with Caller(server.grpc) as caller, pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED: .* of host memory"):
        caller.ask("RepositoryModelLoad", model_name="affine")
    assert answer_to("POST", "/v2/repository/models/affine/load", server.node).status_code == 507
