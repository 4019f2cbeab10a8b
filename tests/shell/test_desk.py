"""The desk with graphs, in this process: when they are captured, who they give way to, and what is reported."""

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from dormouse import wire
from dormouse.core.messages import Evict, EvictionFinished, Execute, Load, LoadFinished
from dormouse.core.types import FOREVER_NS, CommandId, ExecutorId, FunctionId, RequestId
from dormouse.core.types import Path as HowFound
from dormouse.device.cpu import CpuDevice
from dormouse.executor.compute import CpuCompute
from dormouse.executor.desk import Desk, Terms
from dormouse.executor.graphs import Graphs
from dormouse.executor.payload import encoded
from dormouse.executor.replies import Replies
from dormouse.executor.shapes import PATIENCE_RUNS
from dormouse.functions import Manifest
from dormouse.model.importing import import_model
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
    folder: Path
    extents: dict[str, tuple[wire.Extent, ...]]
    messages: "queue.SimpleQueue[wire.FromExecutor]"
    seen: list[wire.FromExecutor] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 1000)))

    def load(self, source: str) -> None:
        command = Load(EXECUTOR, CommandId(next(self.numbers)), FunctionId(f"{source}/1"), HowFound.HOST, 0, FOREVER_NS)
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
    for source in ("net", "recurrent", "stream"):
        index = import_model(Manifest("m", f"factories:{source}", code=str(code)), tmp_path / source, [tmp_path])
        extents[source] = arena.read(tmp_path / source, index)
    compute, recorder = CpuCompute(), CpuRecorder()
    compute.graphs = Graphs(recorder)
    messages: queue.SimpleQueue[wire.FromExecutor] = queue.SimpleQueue()
    requests = Slab.create(MIB, owner=True)
    desk = Desk(
        EXECUTOR,
        device=CpuDevice(4 * MIB, 64 * 1024),
        compute=compute,
        requests=requests,
        replies=Replies(Slab.create(MIB, owner=True)),
        terms=Terms(arena.address, 1024, [tmp_path], poison=True),
        send=messages.put,
    )
    yield Office(desk, recorder, requests, tmp_path, extents, messages)
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
