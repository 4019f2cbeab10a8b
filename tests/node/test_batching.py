"""Requests that run together on a whole node: every answer is its own, and one that is bad is bad alone."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from dormouse.control.batching import likeness, parted
from dormouse.core.messages import Execute, LoadFinished
from dormouse.errors import ExecutionFault, RefusedSource, UnknownFunction
from dormouse.functions import BatchManifest
from dormouse.journal import read_journal
from dormouse.submit import Inference
from dormouse.tensors import Tensor
from dormouse.wire import TensorRef
from tests.node.nodes import Events, answer, assert_close, expected, manifest, opened, row_of, run, small, tensor
from tests.node.zoo import zoo

LONG_MS = 10_000.0
"""So long the oldest waits for company: only a full batch goes sooner."""


def given(rows: int, seed: int) -> Tensor:
    return tensor(np.random.default_rng(seed).standard_normal((rows, zoo.WIDTH)))


def batches(journal: Path) -> list[tuple[int, int]]:
    """Of every execution: how many requests, and to how many rows it was filled up."""
    entries = read_journal(journal).entries
    runs = [command for entry in entries for command in entry.commands if isinstance(command, Execute)]
    return [(len(command.requests), command.padded_rows) for command in runs]


def test_requests_of_different_rows_run_together_and_each_gets_its_own_answer(tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    async def work() -> None:
        async with opened(small(tmp_path / "state", journal=journal)) as node:
            alone = manifest("alone", "stack", seed=7, mib=1)
            await node.deploy(alone)
            await node.deploy(replace(alone, name="f", batch=BatchManifest(11, LONG_MS)))
            asked = [given(rows, rows) for rows in (2, 1, 5, 3)]
            single = [await answer(node, "alone", x) for x in asked]
            together = await asyncio.gather(*(answer(node, "f", x) for x in asked))
            for x, one, other in zip(asked, single, together, strict=True):
                assert other.shape == (x.shape[0], 512)
                assert_close(other, one)
                assert_close(other, expected(zoo.Stack(7, 1), x))
            row = row_of(node, "f")
            assert row["batch"] == {"rows": 11, "wait_ms": LONG_MS, "refused": {}}
            assert row["requests"] == 4

    run(work())
    assert (3, 16) in batches(journal) or (4, 16) in batches(journal)


def test_of_a_batch_with_one_bad_request_only_that_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(replace(manifest("f", "picky"), batch=BatchManifest(4, LONG_MS)))
            await answer(node, "f", given(4, 0))  # it is there now, and what is asked next waits for company
            bad = tensor(np.full((1, zoo.WIDTH), np.nan))
            asked = [given(1, 1), bad, given(2, 3)]
            answers = await asyncio.gather(*(answer(node, "f", x) for x in asked), return_exceptions=True)
            assert isinstance(answers[1], ExecutionFault)
            assert "wants numbers" in answers[1].message
            for n in (0, 2):
                assert not isinstance(answers[n], BaseException)
                assert_close(answers[n], expected(zoo.Picky(7, 1), asked[n]))  # type: ignore[arg-type]

    run(work())


def test_who_waits_for_company_in_vain_is_answered_when_the_wait_is_over(tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    async def work() -> None:
        async with opened(small(tmp_path / "state", journal=journal)) as node:
            await node.deploy(replace(manifest("f", "picky"), batch=BatchManifest(4, 20.0)))
            for seed in range(2):
                x = given(3, seed)
                assert_close(await answer(node, "f", x), expected(zoo.Picky(7, 1), x))

    run(work())
    assert batches(journal) == [(1, 4), (1, 4)]


def test_a_model_that_cannot_be_batched_is_refused_with_one_line(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            wanted = replace(manifest("f", "counter"), batch=BatchManifest(4))
            with pytest.raises(RefusedSource, match=r"^batch\.rows = 4: [^\n]*changes the model's state$"):
                await node.deploy(wanted)
            with pytest.raises(RefusedSource, match=r"batch\.rows = 4"):
                await node.check(wanted)

    run(work())


def asked(*inputs: Tensor, **more: Any) -> Inference:
    return Inference("f", inputs, **more)


def text(rows: int) -> Tensor:
    return Tensor("t", "BYTES", (rows,), b"\x01\0\0\0a" * rows)


def test_requests_are_alike_but_for_their_rows() -> None:
    one, other = likeness(asked(given(1, 0))), likeness(asked(given(3, 0)))
    assert (one[0], other[0]) == (1, 3)
    assert one[1] == other[1] != ""
    x, y = given(2, 0), replace(given(2, 0), name="y")
    assert likeness(asked(x, y)) == likeness(asked(y, x))
    distinct = [
        likeness(asked(x)),
        likeness(asked(y)),
        likeness(asked(x, outputs=("output",))),
        likeness(asked(replace(x, datatype="INT32"))),
        likeness(asked(replace(x, shape=(2, 8, 8)))),
    ]
    assert len(set(distinct)) == len(distinct)


@pytest.mark.parametrize(
    "inference",
    [
        asked(),
        asked(text(2)),
        asked(given(2, 0), text(2)),
        asked(given(2, 0), replace(given(3, 0), name="y")),
        asked(Tensor("x", "FP32", (), bytes(4))),
        asked(Tensor("x", "FP32", (0, 4), b"")),
    ],
    ids=["nothing", "text", "text too", "other rows", "no rows", "none"],
)
def test_what_has_no_rows_of_numbers_is_like_nothing(inference: Inference) -> None:
    assert likeness(inference) == (1, "")


def test_an_output_is_parted_by_rows() -> None:
    memory = memoryview(bytes(range(24)))
    parts = parted(TensorRef("y", "INT16", (4, 3), 0, 24), memory, (1, 3))
    assert [(part.shape, part.data) for part in parts] == [
        ((1, 3), bytes(range(6))),
        ((3, 3), bytes(range(6, 24))),
    ]


def test_statistics_tell_runs_from_answers_and_refusals_from_both(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(replace(manifest("f", "picky"), batch=BatchManifest(2, LONG_MS)))
            begun_ms = time.time_ns() // 1_000_000
            events = Events(node)
            await answer(node, "f", given(2, 0))
            await events.until(LoadFinished)  # which the answer may overtake; until then nobody waits for company
            (one,) = node.statistics("f", "1")
            assert (one.answered.count, one.executions, one.failed.count) == (1, 1, 0)
            assert one.answered.ns >= one.queued_ns + one.device_ns > 0
            assert begun_ms <= one.last_ms <= time.time_ns() // 1_000_000
            assert sum(tally.count for tally in one.paths.values()) == 1
            await asyncio.gather(*(answer(node, "f", given(1, seed)) for seed in (1, 2)))
            with pytest.raises(ExecutionFault):
                await answer(node, "f", tensor(np.full((2, zoo.WIDTH), np.nan)))
            (one,) = node.statistics()
            assert (one.answered.count, one.executions, one.failed.count) == (3, 2, 1)
            assert one.failed.ns > 0
            with pytest.raises(UnknownFunction):
                node.statistics("nobody")

    run(work())


def test_one_request_may_have_more_rows_than_a_batch(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(small(tmp_path)) as node:
            await node.deploy(replace(manifest("f", "picky"), batch=BatchManifest(2)))
            x = given(5, 0)
            assert_close(await answer(node, "f", x), expected(zoo.Picky(7, 1), x))

    run(work())
