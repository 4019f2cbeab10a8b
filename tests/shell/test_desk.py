"""The desk with graphs, in this process: when they are captured, who they give way to, and what is reported."""

import queue
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from dormouse import wire
from dormouse.core.messages import (
    Cancel,
    Evict,
    EvictionFinished,
    Execute,
    ExecutionFailed,
    ExecutionFinished,
    ImageNearlyArrived,
    Load,
    LoadFinished,
)
from dormouse.core.types import FOREVER_NS, CommandId, ExecutorId, FunctionId, Reason, RequestId
from dormouse.core.types import Path as HowFound
from dormouse.device.cpu import CpuDevice
from dormouse.executor.batching import Unbatchable, cut
from dormouse.executor.compute import CpuCompute
from dormouse.executor.desk import Desk, Terms
from dormouse.executor.graphs import Graphs
from dormouse.executor.payload import encoded
from dormouse.executor.replies import Replies
from dormouse.executor.shapes import PATIENCE_RUNS
from dormouse.functions import Manifest
from dormouse.model.importing import import_model
from dormouse.model.outputs import Output
from dormouse.slab import Slab
from dormouse.store.index import PAGE_BYTES
from tests.shell.arenas import MappedArena
from tests.shell.recorder import CpuRecorder
from tests.shell.tiny_models import save_factories

EXECUTOR = ExecutorId("cpu:0")
MIB = 1024 * 1024
Message = TypeVar("Message")


@dataclass
class Office:
    """A desk, and the control side of it."""

    desk: Desk
    recorder: CpuRecorder
    requests: Slab
    replies: Slab
    folder: Path
    extents: dict[str, tuple[wire.Extent, ...]]
    messages: "queue.SimpleQueue[wire.FromExecutor]"
    seen: list[wire.FromExecutor] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 1000)))

    def load(self, source: str, lead_ns: int = FOREVER_NS) -> None:
        number, name = CommandId(next(self.numbers)), FunctionId(f"{source}/1")
        command = Load(EXECUTOR, number, name, HowFound.HOST, 0, FOREVER_NS, lead_ns)
        self.desk.load(wire.LoadImage(command, str(self.folder / source), self.extents[source]))

    def evict(self, source: str) -> None:
        self.desk.evict(Evict(EXECUTOR, CommandId(next(self.numbers)), FunctionId(f"{source}/1")))

    def execute(self, source: str, x: torch.Tensor) -> None:
        number = next(self.numbers)
        command = Execute(EXECUTOR, CommandId(number), RequestId(number), FunctionId(f"{source}/1"), 0, FOREVER_NS)
        datatype, shape, data = encoded(x)
        offset = self.requests.allocate(len(data))
        assert offset is not None
        with self.requests.view(offset, len(data)) as view:
            view[:] = data
        self.desk.execute(wire.ExecuteRequest(command, (wire.TensorRef("x", datatype, shape, offset, len(data)),), ()))

    def execute_together(self, source: str, xs: list[torch.Tensor], padded_rows: int, size_bytes: int = 0) -> Execute:
        """All of ``xs`` in one command; ``size_bytes``: what the last of them claims to have."""
        numbers = [RequestId(next(self.numbers)) for _ in xs]
        refs = []
        for x in xs:
            datatype, shape, data = encoded(x)
            offset = self.requests.allocate(len(data))
            assert offset is not None
            with self.requests.view(offset, len(data)) as view:
                view[:] = data
            claimed = size_bytes if size_bytes and x is xs[-1] else len(data)
            refs.append((wire.TensorRef("x", datatype, shape, offset, claimed),))
        name, number = FunctionId(f"{source}/1"), CommandId(int(numbers[0]))
        command = Execute(EXECUTOR, number, numbers[0], name, 0, FOREVER_NS, tuple(numbers[1:]), padded_rows)
        self.desk.execute(wire.ExecuteRequest(command, refs[0], (), tuple(refs[1:])))
        return command

    def read(self, chunk: wire.ChunkReady, name: str) -> torch.Tensor:
        (ref,) = [ref for ref in chunk.outputs if ref.name == name]
        with self.replies.view(ref.offset, ref.size_bytes) as memory:
            return torch.frombuffer(bytearray(memory), dtype=torch.float32).reshape(ref.shape)

    def until(self, kind: type[Message]) -> Message:
        while True:
            message = self.messages.get(timeout=30)
            self.seen.append(message)
            if isinstance(message, kind):
                return message

    def answered(self, source: str, x: torch.Tensor) -> None:
        self.execute(source, x)
        self.until(wire.ChunkReady)


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    code = save_factories(tmp_path / "code")
    arena = MappedArena(16 * PAGE_BYTES)
    extents = {}
    for source in ("net", "recurrent", "stream", "summing"):
        index = import_model(Manifest("m", f"factories:{source}", code=str(code)), tmp_path / source, [tmp_path])
        extents[source] = arena.read(tmp_path / source, index)
    compute, recorder = CpuCompute(), CpuRecorder()
    compute.graphs = Graphs(recorder)
    messages: queue.SimpleQueue[wire.FromExecutor] = queue.SimpleQueue()
    requests, replies = Slab.create(MIB, owner=True), Slab.create(MIB, owner=True)
    desk = Desk(
        EXECUTOR,
        device=CpuDevice(4 * MIB, 64 * 1024),
        compute=compute,
        requests=requests,
        replies=Replies(replies),
        terms=Terms(arena.address, 1024, [tmp_path], poison=True),
        send=messages.put,
    )
    yield Office(desk, recorder, requests, replies, tmp_path, extents, messages)
    desk.finish()
    arena.close()


def test_a_graph_is_captured_when_the_lane_is_idle_and_reported(office: Office) -> None:
    office.load("net")
    office.answered("net", torch.ones(1, 8))
    assert office.until(wire.GraphsHeld) == wire.GraphsHeld("net/1", 1, "")
    replays = office.recorder.replays
    office.answered("net", torch.ones(1, 8))
    assert office.recorder.replays == replays + 1


def test_why_there_is_no_graph_is_reported_once(office: Office) -> None:
    office.load("stream")
    for _ in range(2):
        office.execute("stream", torch.ones(1, 4))
    assert office.until(wire.GraphsHeld) == wire.GraphsHeld("stream/1", 0, "it streams its answer")
    office.evict("stream")
    office.until(EvictionFinished)
    assert sum(isinstance(message, wire.GraphsHeld) for message in office.seen) == 1


def test_on_a_lane_that_is_never_idle_a_graph_is_made_all_the_same(office: Office) -> None:
    office.load("net")
    office.until(LoadFinished)
    for _ in range(PATIENCE_RUNS + 4):
        office.execute("net", torch.ones(1, 8))
    office.until(wire.GraphsHeld)
    runs = sum(isinstance(message, wire.ChunkReady) for message in office.seen)
    assert 1 <= runs <= PATIENCE_RUNS
    for _ in range(PATIENCE_RUNS + 4 - runs):
        office.until(wire.ChunkReady)


def test_an_eviction_is_reported_before_the_load_that_it_makes_room_for(office: Office) -> None:
    office.load("net")
    office.until(LoadFinished)
    for leaving, coming in (("net", "recurrent"), ("recurrent", "net")):
        office.evict(leaving)
        office.load(coming)
        assert office.until(EvictionFinished).unaccounted_bytes == 0
        assert office.until(LoadFinished).function == f"{coming}/1"


def test_every_eviction_is_reported_when_nothing_follows_or_the_desk_closes(office: Office) -> None:
    for source in ("net", "recurrent"):
        office.load(source)
    for source in ("net", "recurrent"):
        office.evict(source)
    for source in ("net", "recurrent"):
        assert office.until(EvictionFinished).function == f"{source}/1"
    office.load("net")
    office.until(LoadFinished)
    office.evict("net")
    office.desk.finish()
    assert office.until(EvictionFinished).function == "net/1"


def test_an_image_that_nears_is_told_of_before_it_has_come(office: Office) -> None:
    office.load("net", lead_ns=3_600_000_000_000)
    near = office.until(ImageNearlyArrived)
    assert not any(isinstance(message, LoadFinished) for message in office.seen)
    assert office.until(LoadFinished).command == near.command


def test_nobody_is_told_who_did_not_ask(office: Office) -> None:
    office.load("net")
    office.until(LoadFinished)
    assert not any(isinstance(message, ImageNearlyArrived) for message in office.seen)


# ------------------------------------------------------------------ requests that run together


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def test_requests_that_run_together_get_the_rows_that_each_would_get_alone(office: Office) -> None:
    office.load("net")
    xs = [rows(2, 1), rows(1, 2), rows(3, 3)]
    alone = []
    for x in xs:
        office.execute("net", x)
        alone.append(office.read(office.until(wire.ChunkReady), "output"))
    command = office.execute_together("net", xs, padded_rows=8)
    chunk = office.until(wire.ChunkReady)
    assert isinstance(chunk.event, ExecutionFinished)
    assert (chunk.event.request, chunk.event.others) == (command.request, command.others)
    assert chunk.rows == (2, 1, 3)
    torch.testing.assert_close(office.read(chunk, "output"), torch.cat(alone))


def test_batches_of_a_few_sizes_are_replayed_by_one_graph(office: Office) -> None:
    office.load("net")
    office.execute_together("net", [torch.ones(2, 8), torch.ones(1, 8)], padded_rows=4)
    office.until(wire.GraphsHeld)
    replays = office.recorder.replays
    for parts in ((4,), (1, 1, 2), (3,)):
        office.execute_together("net", [torch.ones(count, 8) for count in parts], padded_rows=4)
        assert office.until(wire.ChunkReady).rows == parts
    assert office.recorder.replays == replays + 3


@pytest.mark.parametrize(
    ("source", "width", "why"), [("stream", 4, "streams its answer"), ("summing", 8, r"output 'total' has shape \[\]")]
)
def test_what_cannot_be_cut_apart_says_why(office: Office, source: str, width: int, why: str) -> None:
    office.load(source)
    command = office.execute_together(source, [torch.ones(1, width), torch.ones(2, width)], padded_rows=4)
    failed = office.until(ExecutionFailed)
    assert (failed.reason, failed.others) == (Reason.UNBATCHABLE, command.others)
    assert re.search(why, failed.message)


def test_a_request_that_lies_about_its_size_fails_the_batch(office: Office) -> None:
    office.load("net")
    office.execute_together("net", [rows(1, 1), rows(2, 2)], padded_rows=4, size_bytes=60)
    assert office.until(ExecutionFailed).reason is Reason.INVALID_INPUT


def test_a_batch_is_given_up_when_all_have_gone(office: Office) -> None:
    office.load("net")
    office.until(LoadFinished)
    release = threading.Event()

    def hold_the_lane() -> None:
        release.wait(30)

    office.desk._computing.put(hold_the_lane)
    command = office.execute_together("net", [rows(1, 1), rows(2, 2)], padded_rows=4)
    half = office.execute_together("net", [rows(1, 1), rows(2, 2)], padded_rows=4)
    for request in (*command.requests, half.request):
        office.desk.cancel(Cancel(EXECUTOR, CommandId(next(office.numbers)), request))
    release.set()
    assert office.until(ExecutionFailed).reason is Reason.CANCELLED
    assert office.until(wire.ChunkReady).rows == (1, 2)


@pytest.mark.parametrize(
    ("answer", "why"), [({"y": [b"text"]}, "is text"), ({"y": torch.ones(3)}, r"shape \[3\] for 4 rows")]
)
def test_an_answer_without_a_row_for_each_row_is_not_cut(answer: dict[str, Output], why: str) -> None:
    with pytest.raises(Unbatchable, match=why):
        cut(answer, 3, 4)
