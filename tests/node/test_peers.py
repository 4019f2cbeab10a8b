"""Two executors that map each other's pools: copies between them, and what happens when one of them dies."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dormouse.config import MIB, Config
from dormouse.control.node import Node
from dormouse.core.messages import ExecutorLost, LoadFinished
from dormouse.errors import ConfigurationFault
from tests.node.nodes import (
    Events,
    Gate,
    answer,
    array_of,
    ask,
    assert_close,
    closed_gate,
    expected,
    inputs,
    manifest,
    opened,
    row_of,
    run,
    small,
    tensor,
)
from tests.node.zoo import zoo

AT_ONCE_NS = 1
"""An SLO that is missed by waiting for anybody."""


def two(state_dir: Path, **changes: Any) -> Config:
    """A node of two CPU devices."""
    return small(state_dir / "state", device="cpu:0,cpu:1", **changes)


def pids(node: Node) -> dict[str, int]:
    return {row["executor"]: row["pid"] for row in node.node()["executors"]}


def device_of(node: Node, name: str) -> str:
    return str(row_of(node, name)["tier"])


def assert_right(answered: Any, given: Any, mib: int = 1) -> None:
    """The answer of a gated model to a row whose gate was open."""
    reference = zoo.Gated("", "", mib)
    row = array_of(given).copy()
    assert_close(answered, expected(reference.rest, tensor(row * reference.first.detach().numpy())))


def free_of_devices(node: Node) -> list[int]:
    return [row["free_bytes"] for row in node.node()["devices"]]


def test_a_busy_device_gives_a_copy_to_an_idle_one_which_answers_in_its_stead(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        async with opened(two(tmp_path)) as node:
            await node.deploy(manifest("f", "gated", **gate.arguments))
            await node.deploy(manifest("g", "stack", seed=1, mib=10))
            events = Events(node)
            await ask(node, "f", inputs(0))
            await events.until(LoadFinished)
            assert device_of(node, "f") == "cpu:0"
            waiting = asyncio.create_task(answer(node, "f", closed_gate()))
            await gate.wait_until_begun()
            assert_right(await answer(node, "f", inputs(1), slo_ns=AT_ONCE_NS), inputs(1))
            assert (await events.until(LoadFinished)).executor == "cpu:1"
            assert device_of(node, "f") == "cpu:0+cpu:1"
            await gate.open()
            assert_right(await waiting, closed_gate())

            # Now that both have built it: the first gives it up, and gets it back from the second.
            await ask(node, "g", inputs(0))
            await events.until(LoadFinished)
            assert (device_of(node, "g"), device_of(node, "f")) == ("cpu:0", "cpu:1")
            await node.unload("g")
            waiting = asyncio.create_task(answer(node, "f", closed_gate()))
            await gate.wait_until_begun()
            chunk = await ask(node, "f", inputs(2), slo_ns=AT_ONCE_NS)
            assert chunk.path == "peer"
            assert_right(array_of(chunk.outputs[0]), inputs(2))
            await gate.open()
            assert_right(await waiting, closed_gate())

            await events.until(LoadFinished)
            row = row_of(node, "f")
            assert (row["loads"]["peer"], row["paths"]["peer"]["requests"], row["unaccounted_bytes"]) == (1, 1, 0)
            await node.unload("f")
            assert free_of_devices(node) == [12 * MIB, 12 * MIB]

    run(work())


def test_a_source_that_is_killed_during_the_copy_is_not_trusted_and_the_host_serves(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        # 5 MiB at 4 MiB/s: the gate stands after the first tensor, so the copy is under way for a second yet.
        async with opened(two(tmp_path, link_bytes_per_s=4 * MIB)) as node:
            await node.deploy(manifest("f", "gated", mib=5, **gate.arguments))
            events = Events(node)
            await ask(node, "f", inputs(0))
            await events.until(LoadFinished)
            first = asyncio.create_task(answer(node, "f", closed_gate()))
            await gate.wait_until_begun()
            second = asyncio.create_task(answer(node, "f", closed_gate(), slo_ns=AT_ONCE_NS))
            await gate.wait_until_begun()
            assert row_of(node, "f")["tier"] == "cpu:0", "it is on its way to the other"
            (residency,) = [r for r in function_of(node).residencies.values() if r.source is not None]
            os.kill(pids(node)["cpu:0"], signal.SIGKILL)
            await events.until(ExecutorLost)
            assert residency.source is None
            await gate.open()
            for _ in range(2):
                await gate.wait_until_begun()
                await gate.open()
            assert_right(await first, closed_gate(), 5)
            assert_right(await second, closed_gate(), 5)
            row = row_of(node, "f")
            assert row["loads"].get("peer", 0) == 0, "no load by peer has ended well"
            assert row["unaccounted_bytes"] == 0
            await node.unload("f")
            assert all(free == 12 * MIB for free in free_of_devices(node))

    run(work())


def function_of(node: Node) -> Any:
    (function,) = node._state.functions.values()
    return function


def test_a_copy_that_fails_while_its_source_lives_is_made_again_after_a_pause(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        async with opened(two(tmp_path, faults=("peer-copy:1",))) as node:
            await node.deploy(manifest("f", "gated", **gate.arguments))
            await ask(node, "f", inputs(0))
            first = asyncio.create_task(answer(node, "f", closed_gate()))
            await gate.wait_until_begun()
            second = asyncio.create_task(answer(node, "f", inputs(1), slo_ns=AT_ONCE_NS))
            assert_right(await second, inputs(1))
            await gate.open()
            assert_right(await first, closed_gate())
            assert row_of(node, "f")["unaccounted_bytes"] == 0
            assert (row_of(node, "f")["refusals"], row_of(node, "f")["requests"]) == ({}, 3)

    run(work())


def test_an_executor_that_has_died_is_introduced_anew(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        async with opened(two(tmp_path)) as node:
            await node.deploy(manifest("f", "gated", **gate.arguments))
            events = Events(node)
            await ask(node, "f", inputs(0))
            await events.until(LoadFinished)
            for seed in range(2):
                os.kill(pids(node)["cpu:1"], signal.SIGKILL)
                await events.until(ExecutorLost)
                waiting = asyncio.create_task(answer(node, "f", closed_gate()))
                await gate.wait_until_begun()
                # It is back, and has the first one's memory, before anybody else answers this.
                assert_right(await answer(node, "f", inputs(seed), slo_ns=AT_ONCE_NS), inputs(seed))
                assert (await events.until(LoadFinished)).executor == "cpu:1"
                assert device_of(node, "f") == "cpu:0+cpu:1"
                await gate.open()
                assert_right(await waiting, closed_gate())

    run(work())


def test_with_ways_from_the_host_alone_executors_do_not_know_each_other(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(two(tmp_path, routes="host")) as node:
            for n in range(4):
                await node.deploy(manifest(f"f{n}", "stack", seed=n, mib=5))
            for i in range(8):
                assert_close(await answer(node, f"f{i % 4}", inputs(i)), expected(zoo.Stack(i % 4, 5), inputs(i)))
            assert {device_of(node, f"f{n}") for n in range(4)} == {"cpu:0", "cpu:1"}
            assert all(not executor.routes for executor in node._state.executors.values())

    run(work())


def test_a_device_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(ConfigurationFault, match="a device is named twice"):
            async with opened(small(tmp_path, device="cpu:0,cpu:0")):
                pass

    run(work())
