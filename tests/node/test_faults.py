"""Promised recoveries, with the fault injected: executors that die, copies that fail, images that go bad."""

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path

import msgspec
import pytest

from dormouse.config import MIB
from dormouse.control.catalog import Catalog, Deployed
from dormouse.core.messages import CommandRefused, Execute
from dormouse.core.types import Reason
from dormouse.errors import DormouseError, StateNotKept, UnknownFunction
from tests.node.nodes import (
    Gate,
    answer,
    ask,
    assert_close,
    closed_gate,
    expected,
    full_disk,
    inputs,
    manifest,
    opened,
    pid_of,
    row_of,
    run,
    small,
    tensor,
)
from tests.node.zoo import zoo

zoo_directory = Path(zoo.__file__).parent


def test_an_executor_killed_during_an_execution_is_replaced_and_the_request_answered(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        async with opened(small(tmp_path / "state")) as node:
            await node.deploy(manifest("f", "gated", **gate.arguments))
            await ask(node, "f", inputs(0))
            request = asyncio.create_task(answer(node, "f", closed_gate()))
            await gate.wait_until_begun()
            first = pid_of(node)
            os.kill(first, signal.SIGKILL)
            await gate.wait_until_begun()
            await gate.open()
            reference = zoo.Gated("", "", 1)
            assert_close(await request, expected(reference.rest, tensor(reference.first.detach().numpy()[None, :])))
            assert pid_of(node) != first
            assert node.node()["devices"][0]["free_bytes"] == (12 - 2) * MIB

    run(work())


def test_an_executor_killed_in_the_middle_of_a_load_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        # 8 MiB at 1 MiB/s: the gate stands after the first tensor, so the load is under way for seconds yet.
        async with opened(small(tmp_path / "state", link_bytes_per_s=MIB)) as node:
            await node.deploy(manifest("f", "gated", mib=8, **gate.arguments))
            await node.deploy(manifest("g", "stack", seed=3, mib=1))
            request = asyncio.create_task(ask(node, "f", closed_gate()))
            await gate.wait_until_begun()
            assert row_of(node, "f")["tier"] == "loading"
            os.kill(pid_of(node), signal.SIGKILL)
            await gate.wait_until_begun()
            os.kill(pid_of(node), signal.SIGKILL)
            with pytest.raises(DormouseError, match="was killed by SIGKILL") as lost:
                await request
            assert lost.value.status == 503
            assert_close(await answer(node, "g", inputs(1)), expected(zoo.Stack(3, 1), inputs(1)))
            assert node._payloads.slab.used_bytes == 0

    run(work())


@pytest.mark.parametrize("fault", ["copy:3", "map:2"])
def test_a_load_that_fails_once_is_rolled_back_and_done_again(tmp_path: Path, fault: str) -> None:
    async def work() -> None:
        async with opened(small(tmp_path, faults=(fault,))) as node:
            for n in range(3):
                await node.deploy(manifest(f"f{n}", "stack", seed=n, mib=5))
            for i in range(9):
                assert_close(await answer(node, f"f{i % 3}", inputs(i)), expected(zoo.Stack(i % 3, 5), inputs(i)))
            assert all(row["unaccounted_bytes"] == 0 for row in node.functions())

    run(work())


def test_an_image_that_goes_bad_on_disk_is_found_when_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(manifest("f", "stack", seed=1))
            await node.unload("f")
            damaged = tmp_path / "images" / "f" / "1" / "image.bin"
            content = bytearray(damaged.read_bytes())
            content[1000] ^= 1
            damaged.write_bytes(content)
            with pytest.raises(DormouseError, match=r"image\.bin, page 0 is damaged") as told:
                await node.load("f")
            assert str(tmp_path) not in told.value.message, "callers need not know where"
            assert f"{damaged}, page 0 is damaged" in caplog.text, "the operator must"
            assert node.live()
            await node.deploy(manifest("f", "stack", seed=2))
            await ask(node, "f", inputs(0))

    run(work())


def test_what_gives_room_back_works_on_a_full_disk(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            for name in ("f", "g"):
                await node.deploy(manifest(name, "stack", seed=1))
            largest = max(file.stat().st_size for file in tmp_path.glob("catalog.sqlite*"))
            with full_disk(largest):
                await node.unload("g")
                await node.remove("f")
                with pytest.raises(StateNotKept):
                    for _ in range(10_000):
                        node._catalog.next_revision(f"{_}" * 50)

    run(work())
    assert not (tmp_path / "images" / "f" / "1").exists()
    assert [d.available for d in _functions_in(tmp_path)] == [False]


def _functions_in(state_dir: Path) -> list[Deployed]:
    catalog = Catalog(state_dir / "catalog.sqlite")
    with contextlib.closing(catalog):
        return catalog.functions()


def test_a_function_whose_code_is_gone_is_refused_and_the_others_are_served(tmp_path: Path) -> None:
    async def work() -> None:
        code, state = tmp_path / "code", tmp_path / "state"
        shutil.copytree(zoo_directory, code)
        config = small(state, allow_code=(zoo_directory, code))
        async with opened(config) as node:
            await node.deploy(manifest("here", "stack", seed=1))
            await node.deploy(msgspec.structs.replace(manifest("gone", "stack", seed=2), code=str(code)))
        shutil.rmtree(code)
        async with opened(config) as node:
            await ask(node, "here", inputs(0))
            with pytest.raises(DormouseError, match="the directory with the code of zoo:stack is gone") as told:
                await ask(node, "gone", inputs(0))
            assert str(tmp_path) not in told.value.message
            with pytest.raises(DormouseError, match=f"code = {code} is no directory"):
                await node.deploy(msgspec.structs.replace(manifest("new", "stack", seed=2), code=str(code)))

    run(work())


def test_a_command_that_is_refused_after_its_client_has_gone_leaves_no_tensors_behind(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        async with opened(small(tmp_path / "state")) as node:
            await node.deploy(manifest("f", "gated", **gate.arguments))
            request = asyncio.create_task(ask(node, "f", closed_gate()))
            await gate.wait_until_begun()
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            assert node._payloads.slab.used_bytes > 0, "the executor may read them yet"
            (executor,) = node._state.executors.values()
            (execute,) = [command for command in executor.pending.values() if isinstance(command, Execute)]
            node._controller.post(CommandRefused(executor.id, execute.command, Reason.TOO_LATE))
            assert node._payloads.slab.used_bytes == 0
            os.kill(pid_of(node), signal.SIGKILL)  # it still stands at the gate

    run(work())


def test_a_shutdown_answers_those_who_wait(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        async with opened(small(tmp_path / "state")) as node:
            await node.deploy(manifest("f", "gated", **gate.arguments))
            running = asyncio.create_task(ask(node, "f", closed_gate()))
            await gate.wait_until_begun()
        with pytest.raises(DormouseError, match="shutting down"):
            await running

    run(work())


def test_what_cannot_be_kept_on_a_full_disk_is_not_done(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        config = small(tmp_path / "state")
        async with opened(config) as node:
            await node.deploy(manifest("f", "stack", seed=1, mib=1))
            deploying = asyncio.create_task(node.deploy(manifest("g", "slowly_imported", **gate.arguments)))
            await gate.wait_until_begun()
            with full_disk():
                await gate.open()
                for change in (deploying, node.remove("f"), node.unload("f"), node.deploy(manifest("f", "counter"))):
                    with pytest.raises(StateNotKept):
                        await change
            assert [row["name"] for row in node.functions()] == ["f"]
            assert node.node()["functions"] == 1
            await ask(node, "f", inputs(0))
        assert not list((tmp_path / "state" / "images").glob("g/*"))
        async with opened(config) as node:
            await ask(node, "f", inputs(0))
            await node.remove("f")
            assert node.node()["host"]["used_bytes"] == 0

    run(work())


def test_names_that_nobody_deployed_leave_nothing_behind(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            for n in range(10):
                for change in (node.load, node.unload, node.remove):
                    with pytest.raises(UnknownFunction):
                        await change(f"stranger-{n}")
            assert "stranger" not in str(vars(node))

    run(work())
