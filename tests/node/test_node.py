"""A whole node, without HTTP: deploy, answer, swap, restart."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from dormouse.config import MIB
from dormouse.control.node import Node
from dormouse.core.scheduler import Scheduler
from dormouse.core.types import Pin
from dormouse.errors import (
    ConfigurationFault,
    Conflict,
    DeadlineMissed,
    DormouseError,
    HostMemoryFull,
    RefusedSource,
    UnknownFunction,
)
from dormouse.functions import LimitsManifest
from dormouse.journal import encode_commands, read_journal
from dormouse.submit import Inference
from tests.node.nodes import (
    ZOO,
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


def test_many_functions_take_turns_on_a_small_device_and_every_answer_is_right(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await asyncio.gather(*(node.deploy(manifest(f"f{n}", "stack", seed=n, mib=4)) for n in range(6)))
            rng = np.random.default_rng(1)
            order = [int(n) for n in rng.integers(0, 6, 60)]
            answers = [await answer(node, f"f{n}", inputs(i)) for i, n in enumerate(order[:20])]
            answers += await asyncio.gather(*(answer(node, f"f{n}", inputs(20 + i)) for i, n in enumerate(order[20:])))
            modules = [zoo.Stack(n, 4) for n in range(6)]
            for i, n in enumerate(order):
                assert_close(answers[i], expected(modules[n], inputs(i)))
            rows = node.functions()
            assert sum(row["evictions"] for row in rows) > 6, "swapping was real"
            assert all(row["unaccounted_bytes"] == 0 for row in rows)
            paths = {path for row in rows for path in row["paths"]}
            assert {"build", "host"} <= paths

    run(work())


def test_a_request_tells_how_it_found_its_model(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(manifest("f", "stack", seed=1))
            answers = [await ask(node, "f", inputs(0))]
            # An answer may overtake the news that its load has ended: what comes in between has waited for it too.
            while answers[-1].path != "resident":
                answers.append(await ask(node, "f", inputs(0)))
            assert {answer.path for answer in answers[:-1]} == {"build"}
            assert answers[-1].device_ns > 0

    run(work())


def test_a_resident_function_answers_while_another_is_on_its_way(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path, link_bytes_per_s=16 * MIB)) as node:
            for name, mib in (("here", 1), ("long", 8), ("other", 8)):
                await node.deploy(manifest(name, "stack", seed=mib, mib=mib))
            for name in ("here", "long"):
                while (await ask(node, name, inputs(0))).path != "resident":
                    pass  # now it is known how long it computes
            await ask(node, "other", inputs(0))
            began = time.monotonic()
            long = asyncio.create_task(ask(node, "long", inputs(1)))
            await asyncio.sleep(0)
            assert row_of(node, "long")["tier"] == "loading"
            hit = await ask(node, "here", inputs(2))
            hit_s = time.monotonic() - began
            assert (hit.path, long.done()) == ("resident", False)
            assert (await long).path == "host"
            long_s = time.monotonic() - began
            assert hit_s < long_s / 4
            assert_close(array_of(hit.outputs[0]), expected(zoo.Stack(1, 1), inputs(2)))
            assert_close(array_of(long.result().outputs[0]), expected(zoo.Stack(8, 8), inputs(1)))

    run(work())


def test_functions_survive_a_restart_and_come_back_parked(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(manifest("f", "stack", seed=1))
            await node.deploy(manifest("off", "stack", seed=2))
            await node.unload("off")
            before = await answer(node, "f", inputs(0))
        async with opened(small(tmp_path)) as node:
            await node.load("f")
            assert row_of(node, "f")["tier"] == "host"
            np.testing.assert_array_equal(await answer(node, "f", inputs(0)), before)
            assert (node.function_ready("f"), node.function_ready("off")) == (True, False)
            await node.load("off")
            assert node.function_ready("off")

    run(work())


def test_what_a_crash_left_of_a_deploy_is_removed_at_the_start(tmp_path: Path) -> None:
    leftover = tmp_path / "images" / "half" / "1"
    leftover.mkdir(parents=True)
    (leftover / "image.bin").write_bytes(b"half")

    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            assert node.functions() == []

    run(work())
    assert not leftover.exists()


def test_a_new_revision_replaces_the_old_one_which_first_serves_what_it_has(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        async with opened(small(tmp_path / "state")) as node:
            await node.deploy(manifest("f", "gated", **gate.arguments))
            old = asyncio.create_task(ask(node, "f", closed_gate()))
            await gate.wait_until_begun()
            deploy = asyncio.create_task(node.deploy(manifest("f", "stack", seed=7)))
            while node.describe("f").versions == ("1",):
                await asyncio.sleep(0.01)
            await gate.open()
            assert (await old).version == "1"
            assert await deploy == "2"
            assert_close(await answer(node, "f", inputs(3)), expected(zoo.Stack(7, 4), inputs(3)))
            with pytest.raises(UnknownFunction, match="has version 2, not '1'"):
                node.describe("f", "1")
        assert [d.name for d in (tmp_path / "state" / "images" / "f").iterdir()] == ["2"]

    run(work())


def test_runtime_state_survives_evictions_and_restarts(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path, device_bytes=4 * MIB)) as node:
            await node.deploy(manifest("count", "counter"))
            await node.deploy(manifest("other", "stack", seed=1, mib=3))
            assert row_of(node, "count")["state_bytes"] > 0
            for expected_count in (1, 2, 3):
                assert (await answer(node, "count", tensor([0.0])))[0] == expected_count
                await ask(node, "other", inputs(0))
            assert row_of(node, "count")["evictions"] >= 2
            assert (await answer(node, "count", tensor([0.0])))[0] == 4
        async with opened(small(tmp_path, device_bytes=4 * MIB)) as node:
            assert (await answer(node, "count", tensor([0.0])))[0] == 5

    run(work())


def test_full_host_memory_drops_the_coldest_to_disk_and_brings_it_back(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path, host_bytes=16 * MIB)) as node:
            for n in range(3):
                await node.deploy(manifest(f"f{n}", "stack", seed=n, mib=5))
            assert row_of(node, "f0")["tier"] == "disk"
            for n in (0, 1, 2, 0):
                assert_close(await answer(node, f"f{n}", inputs(n)), expected(zoo.Stack(n, 5), inputs(n)))
            disk = row_of(node, "f0")["disk"]
            assert disk["reads"] > 1
            assert disk["read_bytes"] == disk["reads"] * row_of(node, "f0")["image_bytes"]
            assert disk["extra_ms"] > 2
            assert disk["ahead"] == {"used": 0, "unused": 0}

    run(work())


def test_a_function_for_which_pins_leave_no_host_memory_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path, host_bytes=16 * MIB)) as node:
            await node.deploy(replace(manifest("pinned", "stack", seed=1, mib=9), pin=Pin.HOST))
            with pytest.raises(HostMemoryFull, match=r"needs 8\.0 MiB .* has 16\.0 MiB of which 10\.0 MiB are pinned"):
                await node.deploy(manifest("f", "stack", seed=2, mib=7))
            assert [row["name"] for row in node.functions()] == ["pinned"]
        assert not list((tmp_path / "images" / "f").glob("*"))

    run(work())


def test_a_model_larger_than_the_device_is_refused_with_the_numbers(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            too_large = manifest("big", "stack", seed=1, mib=13)
            verdict = await node.check(too_large)
            assert (verdict["admitted"], "12.0 MiB" in verdict["refusal"]) == (False, True)
            with pytest.raises(RefusedSource, match=r"needs 14\.0 MiB of device memory; the largest device has 12\.0"):
                await node.deploy(too_large)
            assert node.functions() == []

    run(work())


def test_a_dry_run_says_what_would_happen_and_changes_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            verdict = await node.check(manifest("f", "stack", seed=1))
            assert verdict["admitted"]
            assert verdict["inputs"][0]["name"] == "x"
            assert verdict["replaces_version"] is None
            assert node.functions() == []
        assert not list((tmp_path / "images").iterdir())

    run(work())


def test_code_outside_the_allowed_directories_is_not_run(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path, allow_code=())) as node:
            with pytest.raises(RefusedSource, match="--allow-code"):
                await node.deploy(manifest("f", "stack", seed=1))
            assert node.functions() == []

    run(work())


def test_a_removed_function_is_gone_from_memory_disk_and_catalog(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(manifest("f", "stack", seed=1))
            await ask(node, "f", inputs(0))
            await node.remove("f")
            with pytest.raises(UnknownFunction):
                node.describe("f")
            assert node.node()["host"]["used_bytes"] == 0
            assert node.node()["devices"][0]["free_bytes"] == 12 * MIB
        async with opened(small(tmp_path)) as node:
            assert node.functions() == []
        assert not list((tmp_path / "images").glob("*/*"))

    run(work())


def test_after_an_unload_its_memory_is_free(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(manifest("f", "stack", seed=1))
            await ask(node, "f", inputs(0))
            await node.unload("f")
            await node.unload("f")
            assert node.node()["host"]["used_bytes"] == 0
            assert node.node()["devices"][0]["free_bytes"] == 12 * MIB
            assert [(e.state, e.reason) for e in node.index()] == [("UNAVAILABLE", "unloaded")]
            with pytest.raises(DormouseError, match="unavailable"):
                await ask(node, "f", inputs(0))

    run(work())


def test_a_timeout_is_answered_in_time_although_the_model_goes_on(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        async with opened(small(tmp_path / "state")) as node:
            await node.deploy(manifest("f", "gated", **gate.arguments))
            late = asyncio.create_task(ask(node, "f", closed_gate(), timeout_ns=300_000_000))
            await gate.wait_until_begun()
            with pytest.raises(DeadlineMissed, match="executing"):
                await late
            queued = asyncio.create_task(ask(node, "f", inputs(0), timeout_ns=50_000_000))
            with pytest.raises(DeadlineMissed, match="queued"):
                await queued
            await gate.open()
            await ask(node, "f", inputs(0))

    run(work())


def test_a_full_queue_refuses_with_a_time_to_retry(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        async with opened(small(tmp_path / "state")) as node:
            await node.deploy(replace(manifest("f", "gated", **gate.arguments), limits=LimitsManifest(queue_length=1)))
            running = asyncio.create_task(ask(node, "f", closed_gate()))
            await gate.wait_until_begun()
            queued = asyncio.create_task(ask(node, "f", inputs(0)))
            await asyncio.sleep(0)
            with pytest.raises(DormouseError, match="queue of 'f/1' is full") as refusal:
                await ask(node, "f", inputs(1))
            assert refusal.value.status == 503
            assert refusal.value.retry_after_s is not None
            await gate.open()
            await asyncio.gather(running, queued)

    run(work())


def test_a_client_that_goes_away_gives_its_place_and_its_memory_back(tmp_path: Path) -> None:
    async def work() -> None:
        gate = Gate(tmp_path)
        async with opened(small(tmp_path / "state")) as node:
            await node.deploy(manifest("f", "gated", **gate.arguments))
            running = asyncio.create_task(ask(node, "f", closed_gate()))
            await gate.wait_until_begun()
            waiting = asyncio.create_task(ask(node, "f", inputs(0)))
            await asyncio.sleep(0)
            assert node.node()["queued"] == 1
            for gone in (waiting, running):
                gone.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await gone
            assert node.node()["queued"] == 0
            await gate.open()
            await ask(node, "f", inputs(0))
            assert row_of(node, "f")["cancelled"] == 2
            assert node._payloads.slab.used_bytes == 0

    run(work())


def test_what_a_model_raises_is_one_line_for_its_caller(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(manifest("f", "failing"))
            with pytest.raises(DormouseError, match="dislikes") as fault:
                await ask(node, "f", tensor([1.0] * 8))
            assert "\n" not in fault.value.message
            assert fault.value.status == 500
            await ask(node, "f", tensor([0.0] * 8))

    run(work())


def test_a_stream_comes_chunk_by_chunk_and_can_be_left(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(manifest("f", "counting"))
            chunks = [c async for c in node.infer(Inference("f", (tensor([4.0]),)))]
            assert [float(array_of(c.outputs[0])[0]) for c in chunks if c.outputs] == [0, 1, 2, 3]
            assert [c.final for c in chunks][-1]
            stream = node.infer(Inference("f", (tensor([100000.0]),)))
            await anext(stream)
            await stream.aclose()
            await ask(node, "f", tensor([1.0]))

    run(work())


def test_a_journal_replays_to_the_same_commands_byte_for_byte(tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    async def work() -> None:
        async with opened(small(tmp_path / "state", journal=journal)) as node:
            for n in range(4):
                await node.deploy(manifest(f"f{n}", "stack", seed=n, mib=4))
            await asyncio.gather(*(ask(node, f"f{i % 4}", inputs(i)) for i in range(20)))
            await node.remove("f0")

    run(work())
    record = read_journal(journal)
    settings, entries = record.settings, record.entries
    core, count = Scheduler(settings), 0
    for entry in entries:
        assert encode_commands(core.handle(entry.now, entry.event)) == encode_commands(entry.commands)
        count += 1
    assert count > 40


def test_a_device_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(ConfigurationFault, match="device = 'tpu'"):
            async with Node.open(small(tmp_path, device="tpu")):
                pass

    run(work())


def test_the_zoo_is_where_it_is_said_to_be() -> None:
    assert (ZOO / "zoo.py").is_file()


def test_a_second_node_is_kept_out_of_a_state_directory_in_use(tmp_path: Path) -> None:
    async def work() -> None:
        config = small(tmp_path)
        async with opened(config) as node:
            await node.deploy(manifest("f", "stack", seed=1))
            with pytest.raises(ConfigurationFault, match="another server uses it"):
                async with opened(config):
                    raise AssertionError("two nodes share one state directory")
            await ask(node, "f", inputs(0))
        async with opened(config) as node:
            await ask(node, "f", inputs(0))

    run(work())


# ------------------------------------------------------------------ images that live in memory only


def test_functions_whose_images_live_in_memory_only_are_forgotten_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(manifest("kept", "stack", seed=1))
        async with opened(small(tmp_path, images="dram")) as node:
            for n in range(4):
                await node.deploy(manifest(f"f{n}", "stack", seed=n, mib=4))
            assert {file.parent.parent.name for file in tmp_path.rglob("image.bin")} == {"kept"}
            modules = [zoo.Stack(n, 4) for n in range(4)]
            for i in range(12):
                assert_close(await answer(node, f"f{i % 4}", inputs(i)), expected(modules[i % 4], inputs(i)))
            assert sum(row["evictions"] for row in node.functions()) > 4
            assert node.node()["host"]["images_in"] == "dram"
            with pytest.raises(Conflict, match="'f0/1' lives in memory only"):
                await node.unload("f0")
            await ask(node, "f0", inputs(0))
        async with opened(small(tmp_path)) as node:
            assert [row["name"] for row in node.functions()] == ["kept"]
            assert_close(await answer(node, "kept", inputs(0)), expected(zoo.Stack(1, 4), inputs(0)))

    run(work())
    assert "deploy them again: f0, f1, f2, f3" in caplog.text
    assert {directory.name for directory in (tmp_path / "images").iterdir()} == {"kept"}


def test_in_memory_only_full_host_memory_refuses_a_deploy_and_keeps_what_is_there(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path, images="dram", host_bytes=16 * MIB)) as node:
            await node.deploy(manifest("f", "stack", seed=1, mib=8))
            with pytest.raises(HostMemoryFull, match="images = dram"):
                await node.deploy(manifest("g", "stack", seed=2, mib=8))
            assert_close(await answer(node, "f", inputs(0)), expected(zoo.Stack(1, 8), inputs(0)))
            await node.remove("f")
            await node.deploy(manifest("g", "stack", seed=2, mib=8))

    run(work())


def test_runtime_state_that_lives_in_memory_only_survives_evictions(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path, images="dram")) as node:
            await node.deploy(manifest("count", "counter"))
            for n in range(3):
                await node.deploy(manifest(f"f{n}", "stack", seed=n, mib=5))
            for count in range(1, 5):
                assert array_of((await ask(node, "count", tensor([0.0]))).outputs[0])[0] == count
                for n in range(3):
                    await ask(node, f"f{n}", inputs(n))
            assert row_of(node, "count")["evictions"] > 0

    run(work())


# ------------------------------------------------------------------ other weights for a known architecture


def test_a_function_like_another_has_weights_of_its_own_and_outlives_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(manifest("base", "stack", seed=1))
            tuned = replace(manifest("tuned", "stack", seed=2), like="base")
            assert (await node.check(tuned))["admitted"]
            await node.deploy(tuned)
            for i, (name, seed) in enumerate([("base", 1), ("tuned", 2)] * 2):
                assert_close(await answer(node, name, inputs(i)), expected(zoo.Stack(seed, 4), inputs(i)))
            await node.remove("base")
            assert_close(await answer(node, "tuned", inputs(9)), expected(zoo.Stack(2, 4), inputs(9)))
        async with opened(small(tmp_path)) as node:
            assert_close(await answer(node, "tuned", inputs(9)), expected(zoo.Stack(2, 4), inputs(9)))

    run(work())


def test_a_function_that_is_not_like_the_one_it_names_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            with pytest.raises(UnknownFunction, match="no function 'base'"):
                await node.deploy(replace(manifest("tuned", "stack", seed=2), like="base"))
            await node.deploy(manifest("base", "stack", seed=1))
            with pytest.raises(RefusedSource, match=r"zoo:stack is not like 'base': it lacks layers\.3"):
                await node.deploy(replace(manifest("tuned", "stack", seed=2, mib=3), like="base"))
            assert [row["name"] for row in node.functions()] == ["base"]

    run(work())
