"""A whole node on a card: the same things that tests/node shows on the CPU device."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from dormouse.config import MIB, Config
from tests.node.nodes import (
    answer,
    array_of,
    ask,
    expected,
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

pytestmark = pytest.mark.gpu


def on_the_card(state_dir: Path) -> Config:
    """12 MiB of device memory in chunks of 2 MiB, poisoned between functions."""
    return small(state_dir, device="cuda:0", chunk_bytes=2 * MIB)


def assert_alike(answered: object, reference: object) -> None:
    """Other kernels than on the CPU sum in another order, five layers deep."""
    np.testing.assert_allclose(np.asarray(answered), np.asarray(reference), rtol=1e-2, atol=2e-3)


def test_many_functions_take_turns_on_a_card_and_every_answer_is_right(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(on_the_card(tmp_path)) as node:
            for n in range(6):
                await node.deploy(manifest(f"f{n}", "stack", seed=n, mib=4))
            modules = [zoo.Stack(n, 4) for n in range(6)]
            for i in range(30):
                assert_alike(await answer(node, f"f{i % 6}", inputs(i)), expected(modules[i % 6], inputs(i)))
            answers = await asyncio.gather(*(answer(node, f"f{i % 6}", inputs(i)) for i in range(60)))
            for i, answered in enumerate(answers):
                assert_alike(answered, expected(modules[i % 6], inputs(i)))
            rows = node.functions()
            assert sum(row["evictions"] for row in rows) > 12
            assert all(row["unaccounted_bytes"] == 0 for row in rows)

    run(work())


def test_functions_that_share_a_module_take_turns_on_a_card_and_every_answer_is_right(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(on_the_card(tmp_path)) as node:
            await node.deploy(manifest("f0", "stack", seed=0, mib=4))
            for n in range(1, 6):
                await node.deploy(replace(manifest(f"f{n}", "stack", seed=n, mib=4), like="f0"))
            modules = [zoo.Stack(n, 4) for n in range(6)]
            answers = await asyncio.gather(*(answer(node, f"f{i % 6}", inputs(i)) for i in range(120)))
            for i, answered in enumerate(answers):
                assert_alike(answered, expected(modules[i % 6], inputs(i)))
            await node.remove("f0")
            for i in range(20):
                assert_alike(await answer(node, f"f{1 + i % 5}", inputs(i)), expected(modules[1 + i % 5], inputs(i)))
            assert all(row["unaccounted_bytes"] == 0 for row in node.functions())

    run(work())


def test_runtime_state_survives_evictions_on_a_card(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(on_the_card(tmp_path)) as node:
            await node.deploy(manifest("count", "counter"))
            for n in range(3):
                await node.deploy(manifest(f"f{n}", "stack", seed=n, mib=5))
            for count in range(1, 5):
                assert array_of((await ask(node, "count", tensor([0.0]))).outputs[0])[0] == count
                for n in range(3):
                    await ask(node, f"f{n}", inputs(n))
            assert row_of(node, "count")["evictions"] > 0

    run(work())


def test_an_executor_killed_on_a_card_is_replaced(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(on_the_card(tmp_path)) as node:
            await node.deploy(manifest("f", "stack", seed=1))
            before = await answer(node, "f", inputs(1))
            first = pid_of(node)
            asked = [asyncio.create_task(answer(node, "f", inputs(1))) for _ in range(20)]
            await asyncio.sleep(0)
            os.kill(first, signal.SIGKILL)
            for answered in await asyncio.gather(*asked):
                assert_alike(answered, before)
            assert pid_of(node) != first

    run(work())
