"""Two cards: images that come from the other card, or over its link too; and what happens when they do not."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dormouse.config import MIB, Config
from dormouse.control.node import Node
from dormouse.core.messages import Command, ExecutorLost, Load, LoadFinished, RouteOpened
from dormouse.core.types import Bytes
from dormouse.device.driver import device_count
from dormouse.device.vmm import VmmDevice
from dormouse.errors import DeviceError
from dormouse.executor.arrival import Arrival
from dormouse.executor.compute import CudaCompute
from dormouse.executor.routes import FromHost, FromPeer, Route
from dormouse.executor.runner import Runner
from dormouse.functions import Manifest
from dormouse.model.importing import import_model
from dormouse.model.loaded import Inputs
from dormouse.store.index import PAGE_BYTES
from tests.node.nodes import (
    ZOO,
    Events,
    Gate,
    answer,
    array_of,
    ask,
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
from tests.shell.arenas import MappedArena

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() < 2, reason="this machine has no two NVIDIA GPUs")]

AT_ONCE_NS = 1
CHUNK: Bytes = 2 * MIB
IMAGE_MIB = 24


def assert_alike(answered: object, reference: object) -> None:
    """Other kernels than on the CPU sum in another order."""
    np.testing.assert_allclose(np.asarray(answered), np.asarray(reference), rtol=1e-2, atol=5e-3)


# ------------------------------------------------------------------ runners


class Pair:
    """Two cards with the same function: resident on the second, which the first has adopted."""

    def __init__(self, folder: Path, *faults: str) -> None:
        self.arena = MappedArena(64 * PAGE_BYTES)
        source = Manifest("stack", "zoo:stack", code=str(ZOO), arguments={"seed": 1, "mib": IMAGE_MIB})
        index = import_model(source, folder / "image", [ZOO])
        self.extents = self.arena.read(folder / "image", index)
        self.devices = [VmmDevice(0, 64 * MIB, CHUNK, faults=faults), VmmDevice(1, 64 * MIB, CHUNK)]
        here, there = self.devices
        here.register_host(self.arena.address, 64 * PAGE_BYTES)  # for every context of this process
        here.adopt("peer", there.part_bytes, there.capacity_bytes // there.part_bytes, there.share())
        self.runners = [
            Runner(
                device, CudaCompute(number), folder / "image", self.arena.address, MIB, allow_code=[ZOO], poison=True
            )
            for number, device in enumerate(self.devices)
        ]
        self.runners[1].load(self.extents, Arrival())

    def answer(self, route: Route) -> np.ndarray[Any, Any]:
        """What the first card answers after the image has come to it by a route, over memory full of garbage."""
        arrival = Arrival()
        self.runners[0].load(self.extents, arrival, route=route)
        row: Inputs = {"x": torch.from_numpy(array_of(inputs(3)).copy())}
        (output,) = self.runners[0].run(arrival, row, (), lambda _: True).values()
        assert isinstance(output, torch.Tensor)
        self.runners[0].evict()
        self.devices[0].sweep()
        assert self.devices[0].unaccounted_bytes() == 0
        return output.numpy()

    def held_by_source(self) -> bytes:
        built = self.runners[1]._built
        assert built is not None
        back = torch.empty(IMAGE_MIB * MIB, dtype=torch.uint8)
        self.devices[1].copy_out(built.region, 0, back.data_ptr(), back.nbytes)
        self.devices[1].fence().synchronize()
        return back.numpy().tobytes()

    def close(self) -> None:
        for device in self.devices:
            assert device.unaccounted_bytes() == 0
            device.close()
        self.arena.close()


def test_an_image_from_the_other_card_answers_right_and_stays_there(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    before = pair.held_by_source()
    reference = pair.answer(FromHost(pair.arena.address, pair.extents))
    for _ in range(3):
        assert (pair.answer(FromPeer("peer", pair.runners[1].held)) == reference).all()
    assert_alike(reference, expected(zoo.Stack(1, IMAGE_MIB), inputs(3)))
    assert pair.held_by_source() == before
    pair.close()


def test_an_image_over_both_links_answers_right(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.devices[0].open_detour("cuda:1")
    reference = pair.answer(FromHost(pair.arena.address, pair.extents))
    for _ in range(3):
        assert (pair.answer(FromHost(pair.arena.address, pair.extents, ("cuda:1",))) == reference).all()
        assert (pair.answer(FromHost(pair.arena.address, pair.extents)) == reference).all()
    pair.close()


@pytest.mark.parametrize("fault", ["peer-copy:5", "copy:5"])
def test_a_copy_that_fails_on_either_way_is_told_and_the_next_load_is_right(tmp_path: Path, fault: str) -> None:
    pair = Pair(tmp_path, fault)
    pair.devices[0].open_detour("cuda:1")
    detoured = FromHost(pair.arena.address, pair.extents, ("cuda:1",))
    broken = FromPeer("peer", pair.runners[1].held) if fault.startswith("peer") else detoured
    with pytest.raises(DeviceError, match="INJECTED"):
        pair.runners[0].load(pair.extents, Arrival(), route=broken)
    pair.runners[0].discard()
    assert pair.devices[0].unaccounted_bytes() == 0
    assert_alike(pair.answer(broken), expected(zoo.Stack(1, IMAGE_MIB), inputs(3)))
    pair.close()


# ------------------------------------------------------------------ a whole node


def two(state_dir: Path, **changes: Any) -> Config:
    return small(state_dir / "state", device="cuda:0,cuda:1", chunk_bytes=CHUNK, **changes)


def pids(node: Node) -> dict[str, int]:
    return {row["executor"]: row["pid"] for row in node.node()["executors"]}


async def until_introduced(node: Node, events: Events) -> None:
    while any(len(executor.routes) < 1 for executor in node._state.executors.values()):
        await events.until(RouteOpened)


def test_a_busy_card_gives_a_copy_to_the_other_which_answers_in_its_stead(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        async with opened(two(tmp_path)) as node:
            await node.deploy(manifest("f", "gated", **gate.arguments))
            events = Events(node)
            await ask(node, "f", inputs(0))
            await events.until(LoadFinished)
            waiting = asyncio.create_task(answer(node, "f", closed_gate()))
            await gate.wait_until_begun()
            answered = await answer(node, "f", inputs(1), slo_ns=AT_ONCE_NS)
            assert (await events.until(LoadFinished)).executor == "cuda:1"
            assert row_of(node, "f")["tier"] == "cuda:0+cuda:1"
            await gate.open()
            for result, given in ((answered, inputs(1)), (await waiting, closed_gate())):
                reference = zoo.Gated("", "", 1)
                row = array_of(given).copy() * reference.first.detach().numpy()
                assert_alike(result, expected(reference.rest, tensor(row)))
            assert row_of(node, "f")["unaccounted_bytes"] == 0

    run(work(), limit_s=150)


def test_a_card_whose_executor_is_killed_is_introduced_anew_and_its_pool_fits_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(two(tmp_path)) as node:
            for n in range(4):
                await node.deploy(manifest(f"f{n}", "stack", seed=n, mib=4))
            events = Events(node)
            await until_introduced(node, events)
            before = pids(node)["cuda:1"]
            os.kill(before, signal.SIGKILL)
            await events.until(ExecutorLost)
            while "cuda:1" not in node._state.executors:
                await events.until(RouteOpened)
            await until_introduced(node, events)
            for i in range(8):
                assert_alike(await answer(node, f"f{i % 4}", inputs(i)), expected(zoo.Stack(i % 4, 4), inputs(i)))
            assert all(row["capacity_bytes"] == 12 * MIB for row in node.node()["devices"])
            assert all(row["unaccounted_bytes"] == 0 for row in node.functions())

    run(work(), limit_s=150)


def test_a_large_image_comes_over_both_links_and_answers_right(tmp_path: Path) -> None:
    async def work() -> None:
        sizes = {"device_bytes": 320 * MIB, "host_bytes": 1024 * MIB, "group_bytes": 8 * MIB}
        async with opened(two(tmp_path, **sizes)) as node:
            await node.deploy(manifest("f", "stack", seed=1, mib=256))
            events = Events(node)
            await until_introduced(node, events)
            loads = []
            perform = node._controller._perform

            def watched(command: Command, outputs: Any) -> None:
                loads.extend([command] if isinstance(command, Load) else [])
                perform(command, outputs)

            node._controller._perform = watched  # type: ignore[method-assign]
            reference = expected(zoo.Stack(1, 256), inputs(1))
            assert_alike(await answer(node, "f", inputs(1)), reference)
            await events.until(LoadFinished)
            assert [load.helpers for load in loads] == [("cuda:1",)]
            assert_alike(await answer(node, "f", inputs(1)), reference)
            assert row_of(node, "f")["unaccounted_bytes"] == 0

    run(work(), limit_s=150)
