"""The ledger of a whole node: every request once, whose it was and what it took, and where functions were meanwhile."""

import asyncio
import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dormouse.billing.bills import By, Item, Question, items, make_bill
from dormouse.billing.database import BUSY_S, Database
from dormouse.billing.records import RequestEnded, Unbilled
from dormouse.config import MIB
from dormouse.control import cashier
from dormouse.control.bookkeeping import Bookkeeper
from dormouse.control.node import Node
from dormouse.control.payloads import Payloads
from dormouse.core.messages import EvictionFinished, ExecutionFinished, Reply, RequestCancelled
from dormouse.core.scheduler import Scheduler
from dormouse.core.types import CommandId, ExecutorId, FunctionId, Settings
from dormouse.core.types import Path as Way
from dormouse.errors import ConfigurationFault, DeadlineMissed, ExecutionFault, StateNotKept
from dormouse.functions import BatchManifest
from dormouse.submit import Inference
from tests.node.nodes import Events, Gate, ask, closed_gate, full_disk, inputs, manifest, opened, run, small, tensor


@contextlib.contextmanager
def ledger(state_dir: Path) -> Iterator[Database]:
    """With all that has been recorded, as any other process sees it."""
    database = Database(state_dir)
    database.take_in()
    yield database
    database.close()


def recorded(state_dir: Path) -> list[Item]:
    with ledger(state_dir) as database:
        return list(items(database, Question()))


def rows(state_dir: Path, statement: str) -> list[tuple[Any, ...]]:
    with ledger(state_dir) as database:
        return database.connection.execute(statement).fetchall()


def test_what_the_gateway_had_to_do_before_is_part_of_a_request_s_time(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(manifest("f", "stack", seed=1, mib=1))
            began_ns = time.monotonic_ns() - 3_000_000_000
            chunk = await ask(node, "f", inputs(1), began_ns=began_ns, slo_ns=2_000_000_000)
            ((latency_ns, queued_ns),) = rows(tmp_path, "SELECT latency_ns, queued_ns FROM requests")
            assert latency_ns > queued_ns == chunk.queued_ns >= 3_000_000_000
            assert [item.in_time for item in recorded(tmp_path)] == [False]
            with pytest.raises(DeadlineMissed):
                await ask(node, "f", inputs(1), began_ns=began_ns, timeout_ns=2_000_000_000)

    run(work())


def test_every_answer_is_in_the_ledger_under_the_name_that_its_caller_has(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(replace(manifest("f", "stack", seed=1, mib=1), tenant="owner"))
            chunks = [await ask(node, "f", inputs(n), tenant="caller") for n in range(3)]
            seen = recorded(tmp_path)  # while the server runs
            assert [item.request for item in seen] == [chunk.request for chunk in chunks]
            for item, chunk in zip(seen, chunks, strict=True):
                assert (item.tenant, item.function, item.path) == ("caller", "f/1", chunk.path)
                assert (item.queued_ns, item.device_ns) == (chunk.queued_ns, chunk.device_ns)
                assert (item.in_bytes, item.out_bytes, item.in_time, item.reason) == (256, 2048, True, "")
                assert item.ended_ns - item.arrived_ns >= item.queued_ns + item.device_ns

    run(work())
    with ledger(tmp_path) as database:
        lines = make_bill(database, Question(by=By.TENANT)).lines
    assert lines["caller"].requests == 3 and lines["caller"].memory_nanos == 0
    assert lines["owner"].memory_nanos > 0 and lines["owner"].early_nanos > 0


def test_the_parts_of_a_batch_are_all_of_the_device_s_time(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            function = manifest("f", "stack", seed=1, mib=1)
            await node.deploy(replace(function, batch=BatchManifest(4, 10_000.0)))
            events = Events(node)
            chunks = await asyncio.gather(*(ask(node, "f", inputs(n)) for n in range(4)))
            runs: list[ExecutionFinished] = []
            while sum(1 + len(run.others) for run in runs) < 4:
                runs.append(await events.until(ExecutionFinished))
            assert len(runs) < 4, "some ran together"
            assert {chunk.device_ns for chunk in chunks} == {run.device_ns for run in runs}
            assert sum(item.device_ns for item in recorded(tmp_path)) == sum(run.device_ns for run in runs)

    run(work())


def test_what_is_refused_or_fails_is_recorded_with_its_reason_and_costs_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(manifest("bad", "failing"))
            with pytest.raises(ExecutionFault):
                await ask(node, "bad", tensor([1.0] * 8), tenant="acme")
            await ask(node, "bad", tensor([-1.0] * 8))
            with pytest.raises(DeadlineMissed):
                await ask(node, "bad", tensor([-1.0] * 8), timeout_ns=1)

    run(work())
    assert [(item.tenant, item.reason, item.nanos > 0) for item in recorded(tmp_path)] == [
        ("acme", "execution_failed", False),
        ("", "", True),
        ("", "timeout", False),
    ]


def test_bring_and_go_are_intervals_with_their_causes(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            for name in ("f", "g"):
                await node.deploy(manifest(name, "stack", seed=1, mib=7))
            events = Events(node)
            await ask(node, "f", inputs(0))
            await ask(node, "g", inputs(0))
            await events.until(EvictionFinished)
            await node.unload("g")
            await node.load("g")
            await node.remove("f")

    run(work())
    statement = """SELECT kind, name, how, why FROM intervals JOIN functions ON functions.id = function
        ORDER BY name, kind, began_ns"""
    assert rows(tmp_path, statement) == [
        ("deployed", "f", "deployed", "removed"),
        ("device", "f", "build", "displaced"),
        ("host", "f", "admitted", "removed"),
        ("deployed", "g", "deployed", "stopped"),
        ("device", "g", "build", "left"),
        ("host", "g", "admitted", "unloaded"),
        ("host", "g", "read back", "stopped"),
    ]
    statement = """SELECT what, victims.name, COALESCE(causes.name, ''), how FROM occurrences
        JOIN functions AS victims ON victims.id = function LEFT JOIN functions AS causes ON causes.id = other
        ORDER BY at_ns, what"""
    assert [row for row in rows(tmp_path, statement) if row[0] == "eviction"] == [
        ("eviction", "f", "g", ""),
        ("eviction", "g", "", ""),
    ]


def test_an_image_that_drops_to_disk_is_charged_no_longer(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path, host_bytes=16 * 1024 * 1024)) as node:
            for name in ("f", "g", "h"):
                await node.deploy(manifest(name, "stack", seed=1, mib=5))
            await ask(node, "f", inputs(0))

    run(work())
    statement = """SELECT name, how, why FROM intervals JOIN functions ON functions.id = function WHERE kind = 'host'
        ORDER BY began_ns"""
    found = rows(tmp_path, statement)
    assert found[:3] == [("f", "admitted", "dropped"), ("g", "admitted", found[1][2]), ("h", "admitted", found[2][2])]
    assert ("f", "read back", "stopped") in found


def test_what_cannot_be_billed_is_not_answered_until_the_disk_has_room(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(manifest("f", "stack", seed=1, mib=1))
            first = await ask(node, "f", inputs(0))
            with full_disk():
                with pytest.raises(StateNotKept, match="what cannot be billed is not answered") as told:
                    await ask(node, "f", inputs(1))
                assert str(tmp_path) not in told.value.message
                runs = node.functions()[0]["requests"]
                with pytest.raises(StateNotKept):
                    await ask(node, "f", inputs(2))
                assert node.functions()[0]["requests"] == runs, "it was refused before it cost a device anything"
            last = await ask(node, "f", inputs(3))
            seen = recorded(tmp_path)
            answered = [item.request for item in seen if not item.reason]
            assert answered == [first.request, last.request]
            assert [item.reason for item in seen if item.reason] == ["not_recorded"]

    run(work())


def test_a_clock_that_is_behind_the_ledger_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)):
            pass
        assert "behind the ledger" not in caplog.text
        database = Database(tmp_path)
        database.begin_life(time.time_ns() + 3 * 3600 * 10**9)
        database.close()
        async with opened(small(tmp_path)):
            pass

    run(work())
    (warning,) = [record.message for record in caplog.records if "behind the ledger" in record.message]
    assert re.search(rf"clock is [23]:[05]\d:\d\d behind the ledger in {tmp_path}, which goes on from 2", warning)
    assert "begin a new ledger" in warning


def test_who_holds_the_ledger_s_sqlite_does_not_hold_the_end_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cashier, "END_S", 0.1)
    monkeypatch.setattr(cashier, "TAKE_IN_S", 0.0)

    async def work() -> None:
        with ledger(tmp_path) as holder:
            async with opened(small(tmp_path)) as node:
                holder.connection.execute("BEGIN IMMEDIATE")
                await node.deploy(manifest("f", "stack", seed=1, mib=1))
                await ask(node, "f", inputs(0))
                began_s = asyncio.get_running_loop().time()
            assert asyncio.get_running_loop().time() - began_s < BUSY_S / 2
            holder.connection.execute("ROLLBACK")

    run(work())
    assert "entries stay in" in caplog.text
    assert len(recorded(tmp_path)) == 1, "and nothing is lost"


def test_with_power_in_mind_an_answer_waits_for_the_disk(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path, ledger_sync="power")) as node:
            await node.deploy(manifest("f", "stack", seed=1, mib=1))
            chunks = await asyncio.gather(*(ask(node, "f", inputs(n)) for n in range(8)))
            assert {chunk.request for chunk in chunks} == {item.request for item in recorded(tmp_path)}

    run(work())


def test_an_answer_whose_entry_did_not_reach_the_disk_is_not_given_and_not_billed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def work() -> None:
        async with opened(small(tmp_path, ledger_sync="power")) as node:
            await node.deploy(manifest("f", "stack", seed=1, mib=1))
            with monkeypatch.context() as patch:
                patch.setattr(os, "fdatasync", failing)
                with pytest.raises(StateNotKept, match="Input/output error"):
                    await ask(node, "f", inputs(0))
            await ask(node, "f", inputs(1))
            assert [(item.reason, item.nanos > 0) for item in recorded(tmp_path)] == [
                ("not_recorded", False),
                ("", True),
            ]

    run(work())


def test_without_a_ledger_nothing_is_recorded_and_answers_have_no_name(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path, ledger="off")) as node:
            await node.deploy(manifest("f", "stack", seed=1, mib=1))
            assert (await ask(node, "f", inputs(0))).request == ""

    run(work())
    assert not (tmp_path / "ledger.sqlite").exists()


def test_a_restart_goes_on_with_other_names_and_charges_for_the_time_it_runs(tmp_path: Path) -> None:
    async def work(do: Callable[[Node], Any]) -> None:
        async with opened(small(tmp_path)) as node:
            await do(node)
            await ask(node, "f", inputs(0))

    run(work(lambda node: node.deploy(manifest("f", "stack", seed=1, mib=1))))
    run(work(lambda node: node.load("f")))
    assert [item.request for item in recorded(tmp_path)] == ["1-1", "2-1"]
    found = rows(tmp_path, "SELECT life, how, why FROM intervals WHERE kind = 'deployed' ORDER BY began_ns")
    assert found == [(1, "deployed", "stopped"), (2, "restored", "stopped")]


def test_a_tariff_file_holds_from_the_start_on(tmp_path: Path) -> None:
    file = tmp_path / "tariff.toml"

    async def work() -> None:
        async with opened(small(tmp_path / "state", tariff=file)):
            pass

    file.write_text("idle_percent = 25\n")
    run(work())
    run(work())
    assert len(rows(tmp_path / "state", "SELECT * FROM tariffs")) == 2
    file.write_text("idle_percent = 25\ndevice_hour = free\n")
    with pytest.raises(ConfigurationFault, match=r"tariff\.toml: .*line 2"):
        run(work())


def test_a_request_that_its_caller_gives_up_is_recorded_as_such(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        async with opened(small(tmp_path / "state")) as node:
            await node.deploy(manifest("f", "gated", **gate.arguments))
            waiting = asyncio.create_task(ask(node, "f", closed_gate()))
            await gate.wait_until_begun()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await gate.open()

    run(work())
    assert [(item.reason, item.nanos) for item in recorded(tmp_path / "state")] == [("cancelled", 0)]


def test_device_time_that_nobody_waited_for_is_recorded_as_such() -> None:
    payloads = Payloads(MIB)
    state = Scheduler(Settings(host_capacity_bytes=MIB)).state
    books = Bookkeeper(payloads, offset_ns=1_000)
    first, second = (payloads.accept(FunctionId("f/1"), Inference("f", (inputs(0),)), 0) for _ in range(2))
    books.records(4, RequestCancelled(second), [], {}, state)
    ran = ExecutionFinished(ExecutorId("cpu:0"), CommandId(1), first, 100, (second,))
    entry, unbilled = books.records(5, ran, [Reply(first, True, Way.HOST, 1, 100, 60)], {}, state)
    assert isinstance(entry, RequestEnded) and (entry.number, entry.device_ns) == (first, 60)
    assert unbilled == Unbilled(FunctionId("f/1"), "cpu:0", 1_005, 40)
    payloads.close()
