"""Processes that decode pictures: they answer as decoding here would, and nobody waits for one that does not end."""

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from dormouse.core.types import Ns
from dormouse.errors import DeadlineMissed, InvalidRequest, Unavailable
from dormouse.gateway.with_tasks import WithTasks
from dormouse.submit import Inference
from dormouse.tasks.decoder import Decode, Decoded, Heavy, Refused, answers, decode_answer, encode
from dormouse.tasks.decoders import LEAST_CPU_NS, Allowance, Decoders
from dormouse.tasks.description import ImageInput
from dormouse.tasks.images import pixels_of
from dormouse.tasks.turns import Turns
from dormouse.tensors import Tensor
from tests.shell.in_memory import furnished
from tests.shell.test_tasks_images import file_of, picture, with_scans

IMAGE = ImageInput("x", 8, 8)
LARGE = ImageInput("x", 1000, 1000)
"""Its pixels are more than is copied at once, and than is kept."""
LIMIT = 1_000_000
R = TypeVar("R")


def run(work: Coroutine[Any, Any, R]) -> R:
    async def limited() -> R:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(limited())


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def stopped(decoders: Decoders) -> int:
    """Decode something, and let the one process stand still from then on, as if its next picture had no end."""
    await decoders.pixels(IMAGE, file_of(picture()), Allowance())
    (pid,) = decoders.pids
    os.kill(pid, signal.SIGSTOP)
    return pid


# ------------------------------------------------------------------ pictures


@pytest.mark.parametrize("image", [IMAGE, LARGE])
def test_a_process_sees_what_would_be_seen_here(image: ImageInput) -> None:
    files = [file_of(picture()), with_scans(50), file_of(picture(600, 600), "BMP")]

    async def work() -> None:
        decoders, allowance = Decoders(LIMIT), Allowance()
        for file in files:
            seen = await decoders.pixels(image, memoryview(file), allowance)
            np.testing.assert_array_equal(seen, pixels_of(image, file, LIMIT))
        with pytest.raises(InvalidRequest, match="no known format"):
            await decoders.pixels(image, b"no picture", allowance)
        assert len(decoders.pids) == 1
        assert allowance.cpu_ns < Allowance().cpu_ns
        await decoders.close()

    run(work())


def test_what_takes_a_while_is_put_off_and_what_is_wrong_refused() -> None:
    memory = os.memfd_create("test")

    def asked(file: bytes, *, light: bool) -> object:
        os.pwrite(memory, file, 0)
        question = Decode(IMAGE, len(file), LIMIT, 10_000_000_000, light)
        (answer,) = answers(memory, [encode(question)])
        return decode_answer(answer)

    assert isinstance(asked(with_scans(50), light=True), Heavy)
    assert isinstance(asked(with_scans(50), light=False), Decoded)
    assert asked(with_scans(101), light=True) == Refused(
        "the picture has more than 100 scans; save it as a JPEG that has fewer"
    )
    os.close(memory)


def test_a_picture_that_takes_too_long_ends_its_process_and_not_the_next_one_s() -> None:
    """A millisecond is too short for any."""

    async def work() -> None:
        decoders = Decoders(32_000_000)
        with pytest.raises(InvalidRequest, match="more than 10 s of processor time; send smaller pictures, or fewer"):
            await decoders.pixels(IMAGE, with_scans(50, side=5_000), Allowance(LEAST_CPU_NS))
        assert decoders.pids == []
        await decoders.pixels(IMAGE, file_of(picture()), Allowance())
        await decoders.close()

    run(work())


def test_too_much_memory_is_refused() -> None:
    """The limit is set for pictures of few pixels, so that a large model's tensor is beyond it."""

    async def work() -> None:
        decoders = Decoders(1_000)
        with pytest.raises(InvalidRequest, match="too much memory"):
            await decoders.pixels(ImageInput("x", 8_000, 8_000), file_of(picture(10, 10)), Allowance())
        await decoders.close()

    run(work())


# ------------------------------------------------------------------ their end


def test_who_does_not_wait_for_the_end_ends_it() -> None:
    async def work() -> None:
        decoders = Decoders(LIMIT)
        pid = await stopped(decoders)
        asked = asyncio.create_task(decoders.pixels(IMAGE, file_of(picture()), Allowance()))
        await asyncio.sleep(0)  # it has asked
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert gone(pid)
        await decoders.pixels(IMAGE, file_of(picture()), Allowance())
        await decoders.close()

    run(work())


def test_a_process_that_dies_of_a_picture_is_said_to_have_done_so() -> None:
    async def work() -> None:
        decoders = Decoders(LIMIT)
        pid = await stopped(decoders)
        asked = asyncio.create_task(decoders.pixels(IMAGE, file_of(picture()), Allowance()))
        await asyncio.sleep(0)  # it has asked
        os.kill(pid, signal.SIGSEGV)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(InvalidRequest, match="the picture cannot be read: its decoder was ended by SIGSEGV"):
            await asked
        await decoders.pixels(IMAGE, file_of(picture()), Allowance())
        await decoders.close()

    run(work())


def test_a_process_that_cannot_begin_is_not_the_picture_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        decoders = Decoders(LIMIT)
        monkeypatch.setattr("sys.executable", "/bin/false")
        with pytest.raises(Unavailable, match="cannot be decoded now: the process for it ended with status 1"):
            await decoders.pixels(IMAGE, file_of(picture()), Allowance())
        monkeypatch.setattr("sys.executable", "/nowhere")
        with pytest.raises(Unavailable, match="cannot be decoded now: No such file"):
            await decoders.pixels(IMAGE, file_of(picture()), Allowance())
        await decoders.close()

    run(work())


def test_closing_ends_them_at_once_whatever_they_do() -> None:
    async def work() -> None:
        decoders = Decoders(LIMIT)
        pid = await stopped(decoders)
        asked = asyncio.create_task(decoders.pixels(IMAGE, file_of(picture()), Allowance()))
        await asyncio.sleep(0)  # it has asked
        await decoders.close()
        assert gone(pid)
        for _ in range(2):
            with pytest.raises(Unavailable, match="the server is shutting down"):
                await asked
            asked = asyncio.create_task(decoders.pixels(IMAGE, file_of(picture()), Allowance()))
        asked.cancel()

    run(work())


# ------------------------------------------------------------------ turns


def test_what_takes_a_while_leaves_a_process_to_the_others() -> None:
    async def work() -> None:
        decoders = Decoders(LIMIT)
        async with decoders._heavy.turn("somebody"):
            heavy = [asyncio.create_task(decoders.pixels(IMAGE, with_scans(50), Allowance())) for _ in range(3)]
            await asyncio.sleep(0)  # they have asked
            await decoders.pixels(IMAGE, file_of(picture()), Allowance())
            assert not any(each.done() for each in heavy)
        await asyncio.gather(*heavy)
        await decoders.close()

    run(work())


def test_those_who_wait_take_turns_however_much_they_want() -> None:
    served: list[str] = []

    async def work() -> None:
        turns = Turns(1)

        async def want(whose: str) -> None:
            async with turns.turn(whose):
                served.append(whose)

        async with asyncio.TaskGroup() as group, turns.turn("first"):
            tasks = [group.create_task(want(whose)) for whose in ("a", "a", "a", "a", "b", "b")]
            await asyncio.sleep(0)  # all have asked
            tasks[1].cancel()
        await want("last")

    run(work())
    assert served == ["a", "b", "a", "b", "a", "last"]


def test_who_goes_while_waiting_is_forgotten() -> None:
    async def work() -> None:
        turns = Turns(1)

        async def want() -> None:
            async with turns.turn("a"):
                raise AssertionError("nobody has called it")

        async with turns.turn("first"):
            waiting = [asyncio.create_task(want()) for _ in range(2)]
            await asyncio.sleep(0)  # both have asked
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert all(task.cancelled() for task in waiting)
        async with asyncio.timeout(1), turns.turn("b"):
            pass

    run(work())


def test_who_goes_in_the_moment_of_being_called_passes_the_place_on() -> None:
    async def work() -> None:
        turns, served = Turns(1), asyncio.Event()

        async def want() -> None:
            async with turns.turn("a"):
                served.set()

        async with asyncio.TaskGroup() as group:
            async with turns.turn("first"):
                called, following = group.create_task(want()), group.create_task(want())
                await asyncio.sleep(0)  # both have asked
            called.cancel()  # the place is its own already
            await following
        assert called.cancelled()
        assert served.is_set()

    run(work())


# ------------------------------------------------------------------ the request's time


def asked(node: WithTasks, *, began_ns: Ns | None = None, timeout_ns: Ns | None = None) -> Coroutine[Any, Any, object]:
    file = file_of(picture())
    image = Tensor("image", "BYTES", (1,), len(file).to_bytes(4, "little") + file)
    return anext(node.infer(Inference("looker", (image,), began_ns=began_ns, timeout_ns=timeout_ns)))


def test_decoding_counts_in_a_request_s_time() -> None:
    async def work() -> None:
        node = furnished()
        async with WithTasks(node, clock=lambda: 7) as served:
            await asked(served)
            (pid,) = served._decoders.pids
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(DeadlineMissed, match="'looker' gave no answer within 20 ms; its inputs were prepared"):
                await asked(served, timeout_ns=20_000_000)
            assert gone(pid)
            await asked(served)
        assert [inference.began_ns for inference in node.seen] == [7, 7]

    run(work())


def test_a_request_that_has_begun_elsewhere_keeps_its_time() -> None:
    async def work() -> None:
        node = furnished()
        async with WithTasks(node, clock=lambda: 1_000_000_007) as served:
            await asked(served, began_ns=5)
            with pytest.raises(DeadlineMissed, match="within 900 ms"):
                await asked(served, began_ns=5, timeout_ns=900_000_000)
        assert [inference.began_ns for inference in node.seen] == [5]

    run(work())
