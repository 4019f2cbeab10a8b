"""Which graphs are kept, which shapes are wanted, and what a runner makes of it; with a recorder for the CPU."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dormouse.device.cpu import CpuDevice
from dormouse.executor.arrival import Arrival, ImageNotArrived
from dormouse.executor.compute import CpuCompute
from dormouse.executor.graphs import Graphs, Interrupted, NotCaptured
from dormouse.executor.lanes import Lane
from dormouse.executor.runner import Runner
from dormouse.executor.shapes import PATIENCE_RUNS, SAMPLES, Shapes, shape_of
from dormouse.functions import Manifest
from dormouse.model.importing import import_model
from dormouse.model.loaded import Inputs
from dormouse.model.outputs import Output
from dormouse.store.index import PAGE_BYTES
from dormouse.wire import Extent
from tests.shell.arenas import MappedArena
from tests.shell.recorder import PLENTY, CpuRecorder
from tests.shell.tiny_models import save_factories


def x(rows: int) -> Inputs:
    return {"x": torch.ones(rows, 8)}


def forward(tensors: dict[str, torch.Tensor]) -> object:
    return {name: value * 2 for name, value in tensors.items()}


def recorded(graphs: Graphs, owner: object, rows: int) -> None:
    shape = shape_of(x(rows))
    assert shape is not None
    graphs.record(owner, shape, forward, x(rows))


# ------------------------------------------------------------------ bounds


def test_the_least_recently_used_graph_goes_first() -> None:
    graphs = Graphs(CpuRecorder(), at_most=2)
    owner = object()
    recorded(graphs, owner, 1)
    recorded(graphs, owner, 2)
    assert graphs.find(owner, shape_of(x(1)))
    recorded(graphs, owner, 3)
    assert [graphs.find(owner, shape_of(x(rows))) is not None for rows in (1, 2, 3)] == [True, False, True]
    assert (graphs.count(owner), graphs.used_bytes) == (2, 20)


def test_graphs_stay_within_a_share_of_what_was_free() -> None:
    recorder = CpuRecorder(takes_bytes=100)
    graphs = Graphs(recorder)
    for rows in range(1, 5):
        recorded(graphs, graphs, rows)
    assert (graphs.count(graphs), graphs.used_bytes, recorder.free) == (2, 200, PLENTY - 200)


def test_a_graph_that_alone_is_too_large_is_given_back() -> None:
    recorder = CpuRecorder(takes_bytes=100)
    graphs = Graphs(recorder, at_most_bytes=99)
    with pytest.raises(NotCaptured, match="its graph takes 100 bytes of device memory, of 99"):
        recorded(graphs, graphs, 1)
    assert (graphs.count(graphs), graphs.used_bytes, recorder.free, recorder.trims) == (0, 0, PLENTY, 1)


def test_dropping_a_function_leaves_those_of_others() -> None:
    graphs = Graphs(CpuRecorder())
    one, other = object(), object()
    recorded(graphs, one, 1)
    recorded(graphs, other, 1)
    graphs.drop(one)
    assert (graphs.count(one), graphs.count(other), graphs.used_bytes) == (0, 1, 10)


# ------------------------------------------------------------------ shapes


def test_a_shape_is_wanted_after_its_first_run_and_overdue_after_many() -> None:
    shapes = Shapes()
    seen = []
    for _ in range(PATIENCE_RUNS):
        seen.append((shapes.wanted is not None, shapes.overdue))
        shapes.ran(x(1), {"y": torch.ones(1)})
    assert seen == [(False, False)] + [(True, False)] * (PATIENCE_RUNS - 1)
    assert shapes.overdue
    sample = shapes.wanted
    assert sample is not None
    shapes.done(sample)
    assert (shapes.wanted, shapes.overdue) == (None, False)


def test_only_so_many_shapes_are_remembered() -> None:
    shapes = Shapes()
    for rows in range(1, SAMPLES + 2):
        shapes.ran(x(rows), {})
    assert shapes.wanted is not None
    assert shapes.wanted.shape == shape_of(x(2))


@pytest.mark.parametrize(
    ("inputs", "answer", "why"),
    [({"text": [b"a"]}, {}, "text goes in"), (x(1), {"loud": [b"A"]}, "text comes out")],
)
def test_text_is_never_wanted(inputs: Inputs, answer: dict[str, Output], why: str) -> None:
    shapes = Shapes()
    shapes.ran(inputs, answer)
    shapes.ran(x(1), {})
    assert (shapes.refusal, shapes.wanted) == (why, None)


def test_a_shape_is_names_sizes_and_types_in_any_order() -> None:
    one: Inputs = {"a": torch.ones(2), "b": torch.ones(1, dtype=torch.int64)}
    assert shape_of(one) == shape_of(dict(reversed(one.items())))
    assert shape_of(one) != shape_of({**one, "b": torch.ones(1)})
    assert shape_of(one) != shape_of({**one, "a": torch.ones(3)})


# ------------------------------------------------------------------ a runner with graphs


@dataclass
class Function:
    runner: Runner
    recorder: CpuRecorder
    device: CpuDevice
    extents: tuple[Extent, ...]

    def load(self) -> Arrival:
        arrival = Arrival()
        self.runner.load(self.extents, arrival)
        return arrival

    def answer(self, arrival: Arrival, inputs: Inputs, wanted: tuple[str, ...] = ()) -> dict[str, Output]:
        return self.runner.run(arrival, inputs, wanted, lambda _: True)


Make = Callable[..., Function]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    code = save_factories(tmp_path / "code")
    arena = MappedArena(16 * PAGE_BYTES)
    device = CpuDevice(4 * 1024 * 1024, 64 * 1024)

    def function(source: str = "net") -> Function:
        image = tmp_path / f"{source}.image"
        index = import_model(Manifest("m", f"factories:{source}", code=str(code)), image, [tmp_path])
        compute = CpuCompute()
        recorder = CpuRecorder()
        compute.graphs = Graphs(recorder)
        runner = Runner(device, compute, image, arena.address, 1024, allow_code=[tmp_path], poison=True)
        return Function(runner, recorder, device, arena.read(image, index))

    yield function
    device.close()
    arena.close()


def equal(one: dict[str, Output], other: dict[str, Output]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)  # type: ignore[arg-type]


def test_the_first_run_of_a_shape_is_eager_and_the_next_is_replayed(make: Make) -> None:
    function = make()
    arrival = function.load()
    expected = function.answer(arrival, x(1))
    assert (function.runner.graphs, function.runner.capture_wanted) == ((0, ""), True)
    function.runner.capture(lambda: False)
    assert (function.runner.graphs, function.runner.capture_wanted) == ((1, ""), False)
    assert len(function.recorder.waits) > 0
    before = function.recorder.replays
    assert equal(function.answer(arrival, x(1)), expected)
    assert function.recorder.replays == before + 1


def test_a_graph_is_replayed_after_an_eviction_too(make: Make) -> None:
    function = make()
    expected = function.answer(function.load(), x(1))
    function.runner.capture(lambda: False)
    for round_ in range(3):
        function.runner.evict()
        assert equal(function.answer(function.load(), x(1)), expected)
        assert function.recorder.replays == round_ + 2


def test_a_shape_without_a_graph_runs_right_after_another_was_captured_while_arriving(make: Make) -> None:
    function = make()
    arrival = function.load()
    expected = [function.answer(arrival, x(rows)) for rows in (1, 2)]
    arrival.complete = False  # as if the last copies were still on their way
    function.runner.capture(lambda: False)
    assert arrival.waited == -1, "recording has waited for nothing"
    assert equal(function.answer(arrival, x(2)), expected[1])


def test_an_interrupted_capture_leaves_everything_as_it_was(make: Make) -> None:
    function = make()
    arrival = function.load()
    expected = function.answer(arrival, x(1))
    function.runner.capture(lambda: True)
    assert (function.runner.graphs, function.runner.capture_wanted) == ((0, ""), True)
    assert equal(function.answer(arrival, x(1)), expected)
    function.runner.capture(lambda: False)
    assert function.runner.graphs == (1, "")


def test_a_replay_that_answers_otherwise_is_not_used(make: Make) -> None:
    function = make()
    function.recorder.error = 1.0
    arrival = function.load()
    expected = function.answer(arrival, x(1))
    function.runner.capture(lambda: False)
    assert function.runner.graphs == (0, "a replay gives another 'output' than the module itself")
    assert equal(function.answer(arrival, x(1)), expected)
    assert not function.runner.capture_wanted


def test_a_graph_that_the_driver_does_not_take_is_given_up_and_the_request_answered(make: Make) -> None:
    function = make()
    arrival = function.load()
    expected = function.answer(arrival, x(1))
    function.runner.capture(lambda: False)
    function.recorder.launches_fail = True
    assert equal(function.answer(arrival, x(1)), expected)
    count, why = function.runner.graphs
    assert (count, why.startswith("its graph could not be launched: launch failed: INJECTED")) == (0, True)


@pytest.mark.parametrize(
    ("source", "rows", "why"),
    [("counter", torch.ones(2, 4), "a forward pass changes its state"), ("stream", torch.ones(1, 4), "it streams")],
)
def test_state_and_streams_stay_eager(source: str, rows: torch.Tensor, why: str, make: Make) -> None:
    function = make(source)
    function.answer(function.load(), {"x": rows})
    function.runner.capture(lambda: False)
    count, refusal = function.runner.graphs
    assert (count, refusal.startswith(why)) == (0, True)


def test_a_function_that_is_forgotten_takes_its_graphs_with_it(make: Make) -> None:
    function = make()
    function.answer(function.load(), x(1))
    function.runner.capture(lambda: False)
    function.runner.forget()
    assert (function.recorder.free, function.recorder.trims) == (PLENTY, 1)
    function.runner.capture(lambda: False)
    assert function.runner.graphs == (0, "")


# ------------------------------------------------------------------ lanes and arrivals


def test_a_lane_does_what_can_wait_when_there_is_nothing_else() -> None:
    done: list[str] = []
    lane = Lane("test")
    ready = threading.Event()
    idle = threading.Event()

    def when_idle() -> None:
        done.append(f"idle, busy {lane.busy}")
        idle.set()

    def first() -> None:
        ready.wait()
        lane.put_when_idle(when_idle)
        done.append(f"first, busy {lane.busy}")

    lane.put(first)
    lane.put(lambda: done.append("second"))
    ready.set()
    assert idle.wait(30)
    lane.put(lambda: lane.put_when_idle(lambda: done.append("never")))
    lane.finish()
    assert done[:3] == ["first, busy True", "second", "idle, busy False"]


def test_who_waits_for_the_whole_image_is_let_go_when_all_is_queued_or_nothing_comes() -> None:
    outcomes: list[str] = []

    def wait(arrival: Arrival) -> None:
        try:
            arrival.wait_whole()
            outcomes.append("whole")
        except ImageNotArrived as fault:
            outcomes.append(fault.message)

    queued, broken = Arrival(), Arrival()
    waiting = [threading.Thread(target=wait, args=(arrival,)) for arrival in (queued, broken)]
    for thread in waiting:
        thread.start()
    queued.close()
    waiting[0].join()
    broken.fail("broken")
    waiting[1].join()
    assert outcomes == ["whole", "broken"]


def test_interruptions_pass_through_the_module() -> None:
    with pytest.raises(Interrupted):
        Graphs(CpuRecorder()).record(object(), (), interrupted, {})


def interrupted(_: dict[str, torch.Tensor]) -> object:
    raise Interrupted
