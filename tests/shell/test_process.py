"""A real executor process over a socket pair: what it obeys, refuses and reports, and in which order."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dormouse import wire
from dormouse.core.messages import (
    Cancel,
    ChunkProduced,
    CommandRefused,
    Evict,
    EvictionFinished,
    Execute,
    ExecutionFailed,
    ExecutionFinished,
    Forget,
    Load,
    LoadFailed,
    LoadFinished,
)
from dormouse.core.types import FOREVER_NS, CommandId, ExecutorId, FunctionId, Reason, RequestId
from dormouse.core.types import Path as HowFound
from dormouse.executor.payload import decoded, encoded
from dormouse.functions import InputManifest, Manifest
from dormouse.model import sources
from dormouse.model.importing import import_model
from dormouse.model.loaded import Inputs, Value
from dormouse.model.outputs import Output, named_outputs
from dormouse.slab import Slab
from dormouse.store.index import PAGE_BYTES
from tests.shell.arenas import MappedArena
from tests.shell.tiny_models import configurations, save_factories, save_huggingface

EXECUTOR = ExecutorId("cpu:0")
KIB = 1024


@dataclass
class Parent:
    """The control side of one executor, reduced to what these tests ask."""

    folder: Path
    arena: MappedArena
    requests: Slab
    replies: Slab
    connection: socket.socket
    process: "subprocess.Popen[bytes]"
    extents: dict[FunctionId, tuple[wire.Extent, ...]] = field(default_factory=dict)
    manifests: dict[FunctionId, Manifest] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 1000)))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def deploy(self, source: str, **more: Any) -> FunctionId:
        """Import one of the tiny models; every call makes a function of its own."""
        name = f"{source}-{len(self.manifests)}"
        if source in configurations():
            save_huggingface(source, self.folder / name)
            manifest = Manifest(name, str(self.folder / name), **more)
        else:
            code = save_factories(self.folder / "code")
            manifest = Manifest(name, f"factories:{source}", code=str(code), **more)
        target = self.folder / f"{name}.image"
        index = import_model(manifest, target, [self.folder])
        function = FunctionId(f"{name}/1")
        self.extents[function], self.manifests[function] = self.arena.read(target, index), manifest
        return function

    def plain(self, function: FunctionId, inputs: Inputs) -> dict[str, Output]:
        """The model's own answer, without any of this."""
        with torch.inference_mode():
            return named_outputs(sources.load(self.manifests[function], [self.folder]).module(**inputs))

    def send(self, message: wire.ToExecutor) -> None:
        self.connection.sendall(wire.frame(message))

    def receive(self) -> wire.FromExecutor:
        body = wire.receive(self.connection)
        assert body is not None, "the executor is gone"
        return wire.decode_from_executor(body)

    def load(self, function: FunctionId, earliest_ns: int = 0, latest_ns: int = FOREVER_NS) -> CommandId:
        name = function.partition("/")[0]
        command = CommandId(next(self.numbers))
        load = Load(EXECUTOR, command, function, HowFound.HOST, earliest_ns, latest_ns)
        self.send(wire.LoadImage(load, str(self.folder / f"{name}.image"), self.extents[function]))
        return command

    def execute(
        self,
        function: FunctionId,
        inputs: Inputs,
        *,
        earliest_ns: int = 0,
        latest_ns: int = FOREVER_NS,
        outputs: tuple[str, ...] = (),
    ) -> CommandId:
        command = CommandId(next(self.numbers))
        execute = Execute(EXECUTOR, command, RequestId(command), function, earliest_ns, latest_ns)
        refs = tuple(self.placed(name, value) for name, value in inputs.items())
        self.send(wire.ExecuteRequest(execute, refs, outputs))
        return command

    def placed(self, name: str, value: Value) -> wire.TensorRef:
        datatype, shape, data = encoded(value)  # type: ignore[arg-type]
        offset = self.requests.allocate(len(data))
        assert offset is not None
        with self.requests.view(offset, len(data)) as view:
            view[:] = data
        return wire.TensorRef(name, datatype, shape, offset, len(data))

    def evict(self, function: FunctionId) -> CommandId:
        command = CommandId(next(self.numbers))
        self.send(Evict(EXECUTOR, command, function))
        return command

    def outputs(self, message: wire.FromExecutor) -> dict[str, Value]:
        assert isinstance(message, wire.ChunkReady), message
        outputs = {}
        for ref in message.outputs:
            with self.replies.view(ref.offset, ref.size_bytes) as view:
                outputs[ref.name] = decoded(ref.datatype, ref.shape, view)
        self.send(wire.ReplyRead(tuple(ref.offset for ref in message.outputs)))
        return outputs

    def close(self) -> None:
        self.connection.close()
        self.process.wait(timeout=30)
        self.arena.close()
        self.requests.close()
        self.replies.close()


Start = Callable[..., Parent]


LAUNCHER = "import subprocess, sys; subprocess.Popen(sys.argv[1:], close_fds=False).wait()"
"""A parent between the test and the executor."""


def started(
    folder: Path, *, ready: bool = True, reply_bytes: int = 1024 * KIB, launcher: str = "", **settings: Any
) -> Parent:
    arena, requests = MappedArena(32 * PAGE_BYTES), Slab.create(1024 * KIB)
    replies = Slab.create(reply_bytes, owner=False)
    ours, theirs = socket.socketpair()
    with theirs, (folder / "log").open("ab") as log:
        command = [sys.executable, "-m", "dormouse.executor.process", str(theirs.fileno())]
        process = subprocess.Popen(
            [sys.executable, "-c", launcher, *command] if launcher else command,
            pass_fds=(theirs.fileno(), arena.fd, requests.fd, replies.fd),
            stderr=log,
        )
    ours.settimeout(60)
    parent = Parent(folder, arena, requests, replies, ours, process)
    chosen: dict[str, Any] = {
        "executor": EXECUTOR,
        "device": "cpu:0",
        "device_bytes": 4096 * KIB,
        "chunk_bytes": 64 * KIB,
        "group_bytes": 8 * KIB,
        "link_bytes_per_s": None,
        "arena_fd": arena.fd,
        "arena_bytes": arena.size_bytes,
        "request_slab_fd": requests.fd,
        "request_slab_bytes": requests.size_bytes,
        "reply_slab_fd": replies.fd,
        "reply_slab_bytes": replies.size_bytes,
        "threads": 1,
        "allow_code": (str(folder),),
        "poison": True,
    }
    parent.send(wire.StartExecutor(**(chosen | settings)))
    if ready:
        assert isinstance(parent.receive(), wire.ExecutorReady)
    return parent


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts executors with settings of their own; that takes seconds each."""
    parents: list[Parent] = []

    def one(**settings: Any) -> Parent:
        parents.append(started(tmp_path, **settings))
        return parents[-1]

    yield one
    for parent in parents:
        parent.close()


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parent]:
    """One executor for all tests that ask for nothing special, with a slow link and a small slab for answers."""
    parent = started(tmp_path_factory.mktemp("parent"), link_bytes_per_s=2_000_000, reply_bytes=4 * KIB)
    yield parent
    parent.close()


def close(one: dict[str, Value], other: dict[str, Output]) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(value, other[name], rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
        if isinstance(value, torch.Tensor)
        else value == other[name]
        for name, value in one.items()
    )


TEXT: Inputs = {"input_ids": torch.arange(8).reshape(2, 4), "attention_mask": torch.ones(2, 4, dtype=torch.int64)}
ROW: Inputs = {"x": torch.ones(1, 8)}


def test_it_says_what_it_has(start: Start) -> None:
    parent = start(ready=False)
    ready = parent.receive()
    assert isinstance(ready, wire.ExecutorReady)
    assert (ready.device, ready.capacity_bytes, ready.chunk_bytes) == ("cpu:0", 4096 * KIB, 64 * KIB)
    assert ready.pid == parent.process.pid
    assert torch.__version__ in ready.description


@pytest.mark.parametrize("device", ["cuda:0", "tpu:0"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so cuda:0 can be had")
def test_a_device_that_cannot_be_had_is_one_line(device: str, start: Start) -> None:
    parent = start(ready=False, device=device)
    answer = parent.receive()
    assert isinstance(answer, wire.ExecutorUnusable)
    assert device in answer.message and "\n" not in answer.message
    assert parent.process.wait(timeout=30) == 3


def test_a_request_runs_while_its_image_arrives(parent: Parent) -> None:
    bert = parent.deploy("bert")
    for _ in range(3):
        load, run = parent.load(bert), parent.execute(bert, TEXT)
        events = [parent.receive(), parent.receive()]
        finished = next(event for event in events if isinstance(event, wire.ChunkReady))
        loaded = next(event for event in events if isinstance(event, LoadFinished))
        assert loaded.command == load and finished.event.command == run
        assert isinstance(finished.event, ExecutionFinished) and finished.event.device_ns > 0
        assert close(parent.outputs(finished), parent.plain(bert, TEXT))
        eviction = parent.evict(bert)
        assert parent.receive() == EvictionFinished(EXECUTOR, eviction, bert, unaccounted_bytes=0)


def test_only_the_first_load_builds(parent: Parent) -> None:
    bert = parent.deploy("bert")
    builds = []
    for _ in range(2):
        parent.load(bert)
        loaded = parent.receive()
        assert isinstance(loaded, LoadFinished) and loaded.load_ns > 0
        builds.append(loaded.build_ns)
        parent.evict(bert)
        parent.receive()
    assert builds[0] > 0 and builds[1] == 0


def test_one_function_loads_while_another_computes(start: Start) -> None:
    """The stream's second half is asked for only when the other function has been loaded and has not run."""
    parent = start(reply_bytes=64)
    stream, net = parent.deploy("stream"), parent.deploy("net")
    parent.load(stream)
    assert isinstance(parent.receive(), LoadFinished)
    parent.execute(stream, {"x": torch.ones(1, 4)})
    first = parent.receive()
    assert isinstance(first, wire.ChunkReady)  # the second waits for room in the slab, so the compute lane is busy
    parent.load(net)
    parent.execute(net, ROW)
    assert isinstance(parent.receive(), LoadFinished)
    kinds = []
    message: wire.FromExecutor = first
    for _ in range(7):
        parent.outputs(message)
        message = parent.receive()
        assert isinstance(message, wire.ChunkReady)
        kinds.append(type(message.event))
    assert kinds == [ChunkProduced] * 5 + [ExecutionFinished] * 2
    assert close(parent.outputs(message), parent.plain(net, ROW))


@pytest.mark.parametrize(("shift", "reason"), [(+60, Reason.TOO_EARLY), (-60, Reason.TOO_LATE)])
def test_commands_outside_their_window_are_refused(shift: int, reason: Reason, parent: Parent) -> None:
    net = parent.deploy("net")
    at_ns = time.monotonic_ns() + shift * 1_000_000_000
    load = parent.load(net, at_ns, at_ns)
    assert parent.receive() == CommandRefused(EXECUTOR, load, reason)
    parent.load(net)
    assert isinstance(parent.receive(), LoadFinished)
    run = parent.execute(net, ROW, earliest_ns=at_ns, latest_ns=at_ns)
    assert parent.receive() == CommandRefused(EXECUTOR, run, reason)


def test_an_execution_that_waits_for_a_refused_load_is_answered_first(parent: Parent) -> None:
    bert, net = parent.deploy("bert"), parent.deploy("net")
    parent.load(bert)  # keeps the copy lane busy until the execution below has come
    load = parent.load(net, 0, 1)
    run = parent.execute(net, ROW)
    events = [parent.receive() for _ in range(3)]
    assert isinstance(events[0], LoadFinished)
    assert isinstance(events[1], ExecutionFailed) and events[1].command == run
    assert events[2] == CommandRefused(EXECUTOR, load, Reason.TOO_LATE)


@pytest.mark.parametrize("fault", ["copy:18", "map:2"])
def test_a_load_that_fails_is_reported_after_those_that_waited_and_holds_nothing(fault: str, start: Start) -> None:
    parent = start(faults=(fault,), link_bytes_per_s=500_000)
    bert = parent.deploy("bert")
    load = parent.load(bert)
    runs = [parent.execute(bert, TEXT), parent.execute(bert, TEXT)]
    events = [parent.receive() for _ in range(3)]
    assert {event.command for event in events[:2] if isinstance(event, ExecutionFailed)} == set(runs)
    assert {event.reason for event in events[:2] if isinstance(event, ExecutionFailed)} == {Reason.LOAD_FAILED}
    assert isinstance(events[2], LoadFailed) and events[2].command == load
    assert "INJECTED" in events[2].message
    parent.load(bert)
    parent.execute(bert, TEXT)
    events = [parent.receive(), parent.receive()]
    finished = next(event for event in events if isinstance(event, wire.ChunkReady))
    assert close(parent.outputs(finished), parent.plain(bert, TEXT))
    parent.evict(bert)
    evicted = parent.receive()
    assert isinstance(evicted, EvictionFinished) and evicted.unaccounted_bytes == 0


def test_an_image_that_does_not_fit_the_device_fails_to_load(start: Start) -> None:
    parent = start(device_bytes=128 * KIB)
    bert = parent.deploy("bert")
    parent.load(bert)
    failed = parent.receive()
    assert isinstance(failed, LoadFailed) and "\n" not in failed.message
    net = parent.deploy("net")
    parent.load(net)
    assert isinstance(parent.receive(), LoadFinished)


def test_a_model_that_raises_is_one_line_and_the_next_request_is_served(parent: Parent) -> None:
    failing = parent.deploy("failing")
    parent.load(failing)
    parent.receive()
    parent.execute(failing, {"x": torch.full((1, 8), 1e6)})
    failed = parent.receive()
    assert isinstance(failed, ExecutionFailed)
    assert (failed.reason, failed.message) == (Reason.EXECUTION_FAILED, "the model failed: ValueError: too much")
    assert "Traceback" in parent.log
    parent.execute(failing, ROW)
    assert set(parent.outputs(parent.receive())) == {"output"}


def test_a_function_that_is_not_there_does_not_run(parent: Parent) -> None:
    net = parent.deploy("net")
    parent.execute(net, ROW)
    never = parent.receive()
    assert isinstance(never, ExecutionFailed) and never.reason is Reason.LOAD_FAILED
    parent.load(net)
    parent.evict(net)
    parent.receive(), parent.receive()
    parent.execute(net, ROW)
    gone = parent.receive()
    assert isinstance(gone, ExecutionFailed) and gone.reason is Reason.LOAD_FAILED


def test_an_answer_larger_than_the_slab_is_refused(start: Start) -> None:
    parent = start(reply_bytes=256)
    bert = parent.deploy("bert")
    parent.load(bert)
    parent.receive()
    parent.execute(bert, TEXT)
    failed = parent.receive()
    assert isinstance(failed, ExecutionFailed) and failed.reason is Reason.OUTPUT_TOO_LARGE
    parent.execute(bert, {"input_ids": torch.ones(1, 2, dtype=torch.int64)}, outputs=("pooler_output",))
    assert set(parent.outputs(parent.receive())) == {"pooler_output"}


def test_answers_wait_for_room_in_the_slab(start: Start) -> None:
    parent = start(reply_bytes=64)
    net = parent.deploy("net")
    parent.load(net)
    parent.receive()
    for _ in range(3):
        parent.execute(net, ROW)
    for _ in range(3):
        assert close(parent.outputs(parent.receive()), parent.plain(net, ROW))


def test_an_unknown_output_is_the_clients_fault(parent: Parent) -> None:
    net = parent.deploy("net")
    parent.load(net)
    parent.receive()
    parent.execute(net, ROW, outputs=("nothing",))
    failed = parent.receive()
    assert isinstance(failed, ExecutionFailed) and failed.reason is Reason.INVALID_INPUT


def test_text_crosses_both_slabs(parent: Parent) -> None:
    declared = (InputManifest("text", "BYTES", (-1, 1)), InputManifest("x", "FP32", (-1, 2)))
    echo = parent.deploy("echo", inputs=declared)
    parent.load(echo)
    parent.receive()
    parent.execute(echo, {"text": [[b"one"], ["zw\u00f6lf".encode()]], "x": torch.ones(1, 2)})
    assert parent.outputs(parent.receive())["loud"] == [[b"ONE"], [b"ZW\xc3\xb6LF"]]


def test_a_stream_comes_chunk_by_chunk_and_ends(parent: Parent) -> None:
    stream = parent.deploy("stream")
    parent.load(stream)
    parent.receive()
    parent.execute(stream, {"x": torch.ones(1, 4)})
    events = [parent.receive() for _ in range(7)]
    assert all(isinstance(event, wire.ChunkReady) and isinstance(event.event, ChunkProduced) for event in events[:6])
    last = events[6]
    assert isinstance(last, wire.ChunkReady) and isinstance(last.event, ExecutionFinished) and last.outputs == ()


def test_a_cancelled_stream_stops_between_chunks_and_still_ends(start: Start) -> None:
    parent = start(reply_bytes=64)
    stream = parent.deploy("stream")
    parent.load(stream)
    parent.receive()
    run = parent.execute(stream, {"x": torch.ones(1, 4)})
    first = parent.receive()  # the second chunk waits for room
    parent.send(Cancel(EXECUTOR, CommandId(900), RequestId(run)))
    chunks, message = 0, first
    while isinstance(message, wire.ChunkReady):
        chunks += 1
        parent.outputs(message)
        message = parent.receive()
    assert isinstance(message, ExecutionFailed) and message.reason is Reason.CANCELLED
    assert chunks < 3


def test_runtime_state_survives_evictions(parent: Parent) -> None:
    counter = parent.deploy("counter")
    counts = []
    for _ in range(3):
        parent.load(counter)
        parent.receive()
        parent.execute(counter, {"x": torch.ones(2, 4)})
        count = parent.outputs(parent.receive())["count"]
        assert isinstance(count, torch.Tensor)
        counts.append(count.item())
        parent.evict(counter)
        parent.receive()
    assert counts == [1, 2, 3]


def test_a_forgotten_function_can_be_loaded_anew(parent: Parent) -> None:
    net = parent.deploy("net")
    parent.load(net)
    parent.receive()
    parent.evict(net)
    parent.receive()
    parent.send(Forget(EXECUTOR, CommandId(901), net))
    parent.load(net)
    loaded = parent.receive()
    assert isinstance(loaded, LoadFinished) and loaded.build_ns > 0


def test_it_ends_when_asked_to_and_when_nobody_is_left(start: Start) -> None:
    asked, left = start(), start()
    asked.send(wire.Shutdown())
    assert asked.process.wait(timeout=30) == 0
    left.connection.shutdown(socket.SHUT_RDWR)
    assert left.process.wait(timeout=30) == 0


def test_it_dies_with_the_process_that_started_it(start: Start) -> None:
    """Its socket stays open here, so that only the kernel can tell it."""
    parent = start(launcher=LAUNCHER)
    parent.process.kill()
    assert wire.receive(parent.connection) is None
