"""What somebody who watches a real node sees of it."""

import asyncio
import os
import signal
from pathlib import Path

from dormouse.config import MIB
from dormouse.control.catalog import Deployed
from dormouse.control.node import Node
from dormouse.control.portrait import COUNTED_AT_ONCE, FRESH_NS, Portrait
from dormouse.control.waiting import why_waiting
from dormouse.core.messages import ExecutorJoined, ExecutorLost
from dormouse.core.scheduler import Scheduler
from dormouse.core.state import Function, new_function
from dormouse.core.types import ExecutorId, FunctionId, FunctionSpec, Settings
from dormouse.core.types import Path as Way
from dormouse.functions import Manifest, function_id
from dormouse.tensors import Signature
from dormouse.watch.history import BUCKET_NS
from dormouse.watch.picture import Picture
from dormouse.wire import GraphsHeld
from tests.node.nodes import Events, Gate, ask, closed_gate, inputs, manifest, opened, pid_of, run, small


def fresh(node: Node) -> Picture:
    """One that nobody has seen yet."""
    portrait: Portrait = node._watching._portrait
    portrait._last = None
    return node.picture()


def function(node: Node, name: str) -> Function:
    return node._state.functions[function_id(name, 1)]


def test_a_picture_has_the_device_with_its_functions_in_order_and_what_they_take(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(small(tmp_path)) as node:
            for name in ("first", "second"):
                await node.deploy(manifest(name, "stack", seed=1, mib=2))
                await ask(node, name, inputs(1))
            await ask(node, "first", inputs(2))
            picture = fresh(node)
        (device,) = picture.devices
        assert (device.executor, device.here, device.restarts) == ("cpu:0", True, 0)
        assert [(place.function, place.state) for place in device.places] == [
            ("first", "resident"),
            ("second", "resident"),
        ]
        assert device.capacity_bytes - device.free_bytes == sum(place.bytes for place in device.places)
        assert all(place.bytes % device.chunk_bytes == 0 for place in device.places)
        row = picture.functions["first"]
        assert (row.requests, row.in_time, row.compliant, row.tier, row.on) == (2, 2, True, "cpu:0", ("cpu:0",))
        assert row.paths == {"build": 1, "resident": 1} and row.loads == {"build": 1}
        assert row.waste_bytes == device.places[0].bytes - row.image_bytes
        assert 0 < row.p50_ms <= row.p95_ms <= row.p98_ms
        assert (picture.totals.functions, picture.totals.compliant, picture.totals.requests) == (2, 2, 3)
        assert picture.host is not None and picture.host.images == 2
        assert not picture.loads and not picture.queue

    run(scenario())


def test_a_load_in_flight_is_told_with_its_rate_and_who_waits_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(small(tmp_path, link_bytes_per_s=8 * MIB)) as node:
            await node.deploy(manifest("f", "stack", seed=1, mib=4))
            asked = asyncio.create_task(ask(node, "f", inputs(1)))
            await asyncio.sleep(0)
            picture = fresh(node)
            (load,) = picture.loads
            assert (load.function, load.to, load.source, load.helpers) == ("f", "cpu:0", None, ())
            assert load.bytes == picture.functions["f"].image_bytes
            assert abs(load.expected_ms - 1000 * load.bytes / (8 * MIB)) < 1
            assert 0 <= picture.at_ms - load.started_ms < 10_000
            assert picture.devices[0].places[0].state in ("loading", "streaming")
            assert picture.functions["f"].tier == "loading"
            await asked
            assert fresh(node).loads == ()

    run(scenario())


def test_who_waits_is_told_how_long_and_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(small(tmp_path)) as node:
            gate = Gate(tmp_path)
            await node.deploy(manifest("busy", "gated", **gate.arguments))
            await node.deploy(manifest("other", "stack", seed=1, mib=1))
            await ask(node, "other", inputs(1))
            running = asyncio.create_task(ask(node, "busy", closed_gate()))
            await gate.wait_until_begun()
            given = [("busy", closed_gate()), ("other", inputs(1)), ("other", inputs(1))]
            waiting = [asyncio.create_task(ask(node, name, tensor)) for name, tensor in given]
            await asyncio.sleep(0)
            picture = fresh(node)
            assert picture.devices[0].executing == "busy"
            assert [(each.function, each.requests, each.why) for each in picture.queue] == [
                ("busy", 1, "requests before it run on cpu:0"),
                ("other", 2, "cpu:0 runs another function"),
            ]
            assert picture.functions["other"].queued == 2 and picture.totals.queued == 3
            assert all(0 <= picture.at_ms - each.since_ms < 60_000 for each in picture.queue)
            await gate.open()
            await running
            await gate.wait_until_begun()
            await gate.open()
            await asyncio.gather(*waiting)
            assert fresh(node).queue == ()

    run(scenario())


def test_an_executor_that_dies_is_shown_as_gone_and_then_with_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(small(tmp_path)) as node:
            events = Events(node)
            await node.deploy(manifest("f", "stack", seed=1, mib=1))
            os.kill(pid_of(node), signal.SIGKILL)
            await events.until(ExecutorLost)
            (device,) = fresh(node).devices
            assert (device.here, device.places, device.executor) == (False, (), "cpu:0")
            assert why_waiting(node._state, function(node, "f")) == "no executor is here; one is expected back"
            await events.until(ExecutorJoined)
            (device,) = fresh(node).devices
            assert (device.here, device.restarts) == (True, 1)
            assert node.node()["executors"][0]["restarts"] == 1

    run(scenario())


class Nobody:
    """No executor, and no memory."""

    peak_bytes = 0

    def present(self) -> list[tuple[ExecutorId, str, int]]:
        return []

    def graphs_of(self, function: FunctionId) -> dict[str, GraphsHeld]:
        assert function
        return {}


def deployed_as(name: str) -> Deployed:
    return Deployed(Manifest(name, "source"), 1, 10, 0, Signature((), ()), "pytorch_module")


def test_percentiles_of_many_functions_come_in_turns_and_each_has_its_turn() -> None:
    state = Scheduler(Settings(MIB)).state
    fleet = {name: deployed_as(name) for name in (f"f{number}" for number in range(COUNTED_AT_ONCE + 7))}
    for name in fleet:
        asked = new_function(FunctionSpec(function_id(name, 1), 10), state.settings)
        asked.ledger.answered(Way.HOST, 5_000_000, 1, in_time=True)
        state.functions[asked.id] = asked
    portrait = Portrait(state, Nobody(), Nobody())
    for picture, counted in (
        (portrait.picture(fleet, 0), COUNTED_AT_ONCE),
        (portrait.picture(fleet, 10**9), len(fleet)),
    ):
        assert sum(row.p98_ms > 0 for row in picture.functions.values()) == counted
        assert all(row.requests == 1 for row in picture.functions.values())


def test_one_picture_serves_all_who_ask_at_the_same_time() -> None:
    portrait = Portrait(Scheduler(Settings(MIB)).state, Nobody(), Nobody())
    first = portrait.picture({}, 0)
    assert portrait.picture({}, FRESH_NS) is first
    assert portrait.picture({}, FRESH_NS + 1) is not first


def test_points_are_taken_by_the_clock_and_costs_come_while_somebody_watches(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(manifest("f", "stack", seed=1, mib=1))
            for _ in range(3):
                await ask(node, "f", inputs(1))
            watching, before = node._watching, node.picture()
            assert watching._looking is not None
            await watching._looking
            watching.start()
            await watching._looking
            after = fresh(node)
            assert after.bucket == before.bucket + 1
            (*_, point) = after.histories["f"]
            assert point is not None and (point.requests, point.answers) == (3, 3)
            row = after.functions["f"]
            assert row.requests_per_s == round(3 * 1e9 / BUCKET_NS / min(2, len(after.histories["f"])), 2)
            assert after.currency == "USD" and row.cost_nanos is not None and row.cost_nanos > 0
            assert row.cost_in_time in (2, 3), "the ledger knows what came before its last entry"
            assert after.totals.nanos_per_request_in_time == row.cost_nanos // row.cost_in_time

    run(scenario())


def test_without_a_ledger_nothing_is_said_of_costs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(small(tmp_path, ledger="off")) as node:
            await node.deploy(manifest("f", "stack", seed=1, mib=1))
            await ask(node, "f", inputs(1))
            picture = node.picture()
            assert picture.currency == "" and picture.functions["f"].cost_nanos is None
            assert picture.totals.nanos_per_request_in_time is None

    run(scenario())
