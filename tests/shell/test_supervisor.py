"""The supervisor with real processes: they start, talk, die, come back and are stopped."""

import asyncio
import logging
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import uvloop
from msgspec import Struct

from dormouse import wire
from dormouse.core.messages import Cancel, CommandRefused, Evict, EvictionFinished
from dormouse.core.types import CommandId, ExecutorId, FunctionId, RequestId
from dormouse.executor.supervisor import Supervisor

STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in_executor.py")))
E = ExecutorId("cpu:0")
T = TypeVar("T")


class Lost(Struct, frozen=True):
    message: str


class Unusable(Struct, frozen=True):
    message: str


class Recorder:
    """Keeps what a supervisor reports, in order."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[object] = asyncio.Queue()
        self.joined = self.reports.put_nowait
        self.received = self.reports.put_nowait

    def lost(self, message: str) -> None:
        self.reports.put_nowait(Lost(message))

    def unusable(self, message: str) -> None:
        self.reports.put_nowait(Unusable(message))

    async def next(self, kind: type[T]) -> T:
        report = await asyncio.wait_for(self.reports.get(), 30)
        assert isinstance(report, kind), report
        return report


class Run(Protocol):
    """Runs a scenario with a started supervisor; afterwards no process and no descriptor is left."""

    def __call__(
        self, scenario: Callable[[Supervisor, Recorder], Awaitable[None]], *faults: str, **options: Any
    ) -> None: ...


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    with asyncio.Runner(loop_factory=request.param) as runner:
        runner.run(asyncio.sleep(0))  # what a loop opens once in a process is no leak

    def run_it(scenario: Callable[[Supervisor, Recorder], Awaitable[None]], *faults: str, **options: Any) -> None:
        before = open_descriptors()
        arena = os.memfd_create("arena")
        os.write(arena, b"shared")
        start = wire.StartExecutor(E, "cpu", None, None, 1, None, arena, 6, arena, 6, arena, 6, 1, faults=faults)

        async def whole() -> None:
            recorder = Recorder()
            options.setdefault("command", STAND_IN)
            supervisor = Supervisor(start, recorder, tmp_path / "logs" / "executor.log", **options)
            supervisor.start()
            try:
                await scenario(supervisor, recorder)
            finally:
                await supervisor.stop()
            assert recorder.reports.empty(), recorder.reports.get_nowait()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(whole())
        os.close(arena)
        assert children() == []
        assert open_descriptors() == before

    return run_it


def open_descriptors() -> Counter[str]:
    """How many of each kind; not which: a new loop opens anew what loops share, under whatever number is free."""
    kinds: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one through which the directory is read
            kinds[re.sub(r"\[?\d+\]?", "", str(entry.readlink()))] += 1
    return kinds


OTHERS = "multiprocessing"
"""What the command lines of servers say that Python keeps for the whole test process, once anything was imported."""


def children() -> list[str]:
    """Process ids of our children, without Python's own servers."""
    every = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [child for child in every if OTHERS not in Path(f"/proc/{child}/cmdline").read_text()]


def cancel(number: int) -> Cancel:
    return Cancel(E, CommandId(number), RequestId(number))


def test_an_executor_that_could_be_started_once_is_tried_again(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "program"

    def install() -> None:
        program.write_text(f'#!/bin/sh\nexec {" ".join(STAND_IN)} "$@"\n')
        program.chmod(0o755)

    class Reinstaller(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "cannot be started" in record.getMessage():
                install()

    async def scenario(_: Supervisor, recorder: Recorder) -> None:
        ready = await recorder.next(wire.ExecutorReady)
        program.unlink()
        os.kill(ready.pid, signal.SIGKILL)
        await recorder.next(Lost)
        assert (await recorder.next(wire.ExecutorReady)).pid != ready.pid

    install()
    handler = Reinstaller()
    logging.getLogger("dormouse.executor").addHandler(handler)
    try:
        run(scenario, command=(str(program),), delays_s=(0.0,))
    finally:
        logging.getLogger("dormouse.executor").removeHandler(handler)


def test_an_executor_starts_inherits_the_arena_and_is_ready(run: Run) -> None:
    async def scenario(_: Supervisor, recorder: Recorder) -> None:
        ready = await recorder.next(wire.ExecutorReady)
        assert (ready.device, ready.description) == ("cpu:0", "arena shared")
        assert children() == [str(ready.pid)]

    run(scenario)


def test_messages_go_both_ways_in_order(run: Run) -> None:
    async def scenario(supervisor: Supervisor, recorder: Recorder) -> None:
        await recorder.next(wire.ExecutorReady)
        for number in range(0, 1000, 2):
            supervisor.send(cancel(number))
            supervisor.send(Evict(E, CommandId(number + 1), FunctionId("f/1")))
        for number in range(0, 1000, 2):
            assert (await recorder.next(CommandRefused)).command == number
            assert (await recorder.next(EvictionFinished)).command == number + 1

    run(scenario)


def test_a_killed_executor_is_lost_once_and_joins_again(run: Run) -> None:
    async def scenario(supervisor: Supervisor, recorder: Recorder) -> None:
        for number in range(3):
            ready = await recorder.next(wire.ExecutorReady)
            os.kill(ready.pid, signal.SIGKILL)
            lost = await recorder.next(Lost)
            assert f"executor cpu:0 (pid {ready.pid}) was killed by SIGKILL" in lost.message
            assert str(ready.pid) not in children(), f"death {number} was not reaped"
            supervisor.send(cancel(number))
        await recorder.next(wire.ExecutorReady)
        supervisor.send(cancel(99))
        assert (await recorder.next(CommandRefused)).command == 99

    run(scenario, delays_s=(0.0, 0.01))


def test_an_unusable_device_is_given_up_with_its_line(run: Run) -> None:
    async def scenario(_: Supervisor, recorder: Recorder) -> None:
        assert (await recorder.next(Unusable)).message == "cpu:0 cannot be had: no such thing"

    run(scenario, "unusable")


def test_an_executor_that_never_gets_ready_is_given_up_with_its_last_words(run: Run) -> None:
    async def scenario(_: Supervisor, recorder: Recorder) -> None:
        message = (await recorder.next(Unusable)).message
        assert "exited with status 1; it last wrote: ImportError: no module named nothing" in message
        assert "given up after 3 starts" in message

    run(scenario, "dies", delays_s=(0.0, 0.01))


def test_a_command_that_does_not_exist_is_unusable(run: Run, tmp_path: Path) -> None:
    async def scenario(_: Supervisor, recorder: Recorder) -> None:
        assert "cannot be started: " in (await recorder.next(Unusable)).message

    run(scenario, command=(str(tmp_path / "nothing"),))


def test_an_executor_that_hangs_at_start_is_killed_and_given_up(run: Run) -> None:
    async def scenario(_: Supervisor, recorder: Recorder) -> None:
        assert "was not ready within 0.3 s and was killed" in (await recorder.next(Unusable)).message

    run(scenario, "hangs", start_limit_s=0.3, delays_s=())


def test_what_is_no_message_ends_the_executor(run: Run) -> None:
    async def scenario(_: Supervisor, recorder: Recorder) -> None:
        assert "sent what is no message" in (await recorder.next(Unusable)).message

    run(scenario, "babbles", delays_s=())


def test_an_executor_that_does_not_read_is_killed_when_its_buffer_is_full(run: Run) -> None:
    async def scenario(supervisor: Supervisor, recorder: Recorder) -> None:
        await recorder.next(wire.ExecutorReady)
        for number in range(20_000):
            supervisor.send(cancel(number))
        assert "did not read its messages" in (await recorder.next(Lost)).message
        await recorder.next(wire.ExecutorReady)
        await supervisor.stop(limit_s=0.1)

    run(scenario, "deaf", outgoing_limit_bytes=64 * 1024)


def test_an_executor_that_closes_its_socket_and_lives_on_is_killed(run: Run) -> None:
    async def scenario(_: Supervisor, recorder: Recorder) -> None:
        await recorder.next(wire.ExecutorReady)
        assert "closed its socket and lived on and was killed" in (await recorder.next(Lost)).message

    run(scenario, "closes", delays_s=(60.0,), reap_limit_s=0.1)


def test_stop_kills_an_executor_that_does_not_end(run: Run) -> None:
    async def scenario(supervisor: Supervisor, recorder: Recorder) -> None:
        ready = await recorder.next(wire.ExecutorReady)
        await supervisor.stop(limit_s=0.1)
        with pytest.raises(ProcessLookupError):
            os.kill(ready.pid, 0)

    run(scenario, "stubborn")


def test_stop_ends_an_executor_that_is_starting_or_waiting_to_be(run: Run) -> None:
    async def starting(supervisor: Supervisor, _: Recorder) -> None:
        await asyncio.sleep(0)  # one turn of the loop: the process is being made
        await supervisor.stop()

    async def backing_off(supervisor: Supervisor, recorder: Recorder) -> None:
        os.kill((await recorder.next(wire.ExecutorReady)).pid, signal.SIGTERM)
        assert "SIGTERM" in (await recorder.next(Lost)).message
        await supervisor.stop()
        supervisor.send(cancel(1))

    run(starting)
    run(backing_off, delays_s=(3600.0,))
