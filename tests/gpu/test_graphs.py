"""CUDA graphs on a card: recorded, replayed while the image arrives, kept through evictions, given up with a reason."""

import textwrap
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dormouse.core.types import Bytes
from dormouse.device.driver import device_count
from dormouse.device.vmm import VmmDevice
from dormouse.executor.arrival import Arrival
from dormouse.executor.compute import CudaCompute
from dormouse.executor.graphs import Graphs
from dormouse.executor.runner import Runner
from dormouse.functions import Manifest
from dormouse.model import sources
from dormouse.model.importing import import_model
from dormouse.model.loaded import Inputs
from dormouse.model.outputs import Output
from dormouse.store.index import PAGE_BYTES
from dormouse.wire import Extent
from tests.shell.arenas import MappedArena
from tests.shell.tiny_models import configurations, save_huggingface

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="this machine has no NVIDIA GPU")]

MIB: Bytes = 1024 * 1024
CHUNK: Bytes = 2 * MIB
GROUP: Bytes = 16 * 1024
ALWAYS_CAPTURED = ("bert", "bert-classifier", "gpt2", "llama", "resnet", "vit")
"""Of the tiny models; whether the others can be captured is the business of transformers."""

CODE = textwrap.dedent(
    """
    import torch
    from torch import nn


    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def run(self, x):
            for layer in self.layers:
                x = layer(x).relu()
            return x


    class Plain(Layers):
        def forward(self, x):
            return {"y": self.run(x), "rows": x[:1] * 2}


    class Branching(Layers):
        def forward(self, x):
            return self.run(x) if x.sum().item() > 0 else x


    class Noisy(Layers):
        def forward(self, x):
            return self.run(x) + torch.randn_like(x)


    class Twice(Layers):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return self.run(x) + self.calls


    class Streaming(Layers):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                yield {"x": x}


    class Counting(Layers):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.count += 1
            return self.run(x)


    class Elsewhere(Layers):
        def forward(self, x):
            return {"y": self.run(x), "size": x.shape[0]}


    def made(name):
        torch.manual_seed(0)
        return globals()[name](), {"x": torch.ones(1, 64)}
    """
)


@dataclass
class Function:
    """One function of a device that it shares with others."""

    runner: Runner
    extents: tuple[Extent, ...]
    example: Inputs

    def load(self) -> Arrival:
        arrival = Arrival()
        self.runner.load(self.extents, arrival)
        return arrival

    def answer(self, arrival: Arrival, inputs: Inputs | None = None) -> dict[str, Output]:
        return self.runner.run(arrival, self.example if inputs is None else inputs, (), lambda _: True)

    def captured(self) -> dict[str, Output]:
        """Load it and have a graph made; the module's own answer."""
        answer = self.answer(self.load())
        self.runner.capture(lambda: False)
        return answer

    def while_arriving(self) -> dict[str, Output]:
        arrival = Arrival()
        loading = threading.Thread(target=self.runner.load, args=(self.extents, arrival))
        loading.start()
        arrival.wait_begun()
        try:
            return self.answer(arrival)
        finally:
            loading.join()


class Card:
    """The GPU, a pool of chunks on it, and functions from an arena."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arena = MappedArena(32 * PAGE_BYTES)
        self.compute = CudaCompute(0)
        self.device = VmmDevice(0, 32 * MIB, CHUNK)
        self.device.register_host(self.arena.address, self.arena.size_bytes)
        self.made = 0

    @property
    def graphs(self) -> Graphs:
        assert self.compute.graphs is not None
        return self.compute.graphs

    def function(self, source: str, group_bytes: Bytes = GROUP) -> Function:
        self.made += 1
        where = self.folder / str(self.made)
        if source in configurations():
            save_huggingface(source, where / "source")
            manifest = Manifest("m", str(where / "source"))
        else:
            code = self.folder / "code"
            code.mkdir(exist_ok=True)
            (code / "modules.py").write_text(CODE)
            manifest = Manifest("m", "modules:made", code=str(code), arguments={"name": source})
        image = where / "image"
        index = import_model(manifest, image, [self.folder])
        runner = Runner(
            self.device,
            self.compute,
            image,
            self.arena.address,
            group_bytes,
            allow_code=[self.folder],
            poison=True,
        )
        example = sources.load(manifest, [self.folder]).trials[-1].inputs
        return Function(runner, self.arena.read(image, index), example)


@pytest.fixture
def card(tmp_path: Path) -> Iterator[Card]:
    made = Card(tmp_path)
    yield made
    made.device.close()
    made.arena.close()


def close(one: dict[str, Output], other: dict[str, Output]) -> bool:
    return one.keys() == other.keys() and all(
        isinstance(value, torch.Tensor) and torch.allclose(value, expected, rtol=1e-3, atol=1e-4)
        for name, value in one.items()
        if isinstance(expected := other[name], torch.Tensor)
    )


@pytest.mark.parametrize("name", sorted(configurations()))
def test_a_replay_answers_as_the_module_does_resident_and_arriving(name: str, card: Card) -> None:
    function = card.function(name)
    expected = function.captured()
    count, refusal = function.runner.graphs
    assert (count == 1) != bool(refusal)
    assert count == 1 or name not in ALWAYS_CAPTURED, refusal
    for _ in range(3):
        function.runner.evict()
        card.device.sweep()
        assert close(function.while_arriving(), expected)


def test_other_inputs_of_the_same_shape_get_their_own_answer(card: Card) -> None:
    function = card.function("Plain")
    function.captured()
    arrival = function.load()
    for seed in range(3):
        inputs: Inputs = {"x": torch.randn(1, 64, generator=torch.Generator().manual_seed(seed))}
        assert function.runner.graph_of(inputs) is not None
        replayed = function.answer(arrival, inputs)
        assert torch.equal(replayed["rows"], inputs["x"] * 2)  # type: ignore[arg-type]
        card.graphs.drop(function.runner._built)
        assert close(function.answer(arrival, inputs), replayed)
        function.runner.capture(lambda: False)


def test_a_graph_outlives_an_eviction_to_other_chunks(card: Card) -> None:
    function = card.function("bert")
    expected = function.captured()
    assert function.runner._built is not None
    region = function.runner._built.region
    seen = set()
    for occupied in range(4):
        function.runner.evict()
        card.device.sweep()
        blocker = card.device.reserve(8 * CHUNK)
        card.device.map(blocker, occupied * CHUNK)
        assert close(function.while_arriving(), expected)
        seen.add(tuple(region.chunks))
        card.device.unmap(blocker)
    assert len(seen) == 4
    assert function.runner.graphs == (1, "")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("Branching", "it cannot be recorded: "),
        ("Noisy", "it cannot be recorded: "),
        ("Twice", "a replay gives another 'output' than the module itself"),
        ("Streaming", "it streams its answer"),
        ("Counting", "a forward pass changes its state"),
        ("Elsewhere", "its output 'size' is not made on the device"),
    ],
)
def test_what_cannot_be_a_graph_runs_eagerly_and_says_why(source: str, why: str, card: Card) -> None:
    function = card.function(source)
    function.captured()
    count, refusal = function.runner.graphs
    assert count == 0
    assert refusal.startswith(why)
    arrival = function.load()
    function.answer(arrival)
    other = card.function("Plain")
    expected = other.captured()
    assert other.runner.graphs == (1, ""), "a failed capture leaves the device fit for others"
    assert close(other.while_arriving(), expected)
    with card.compute.lane():
        torch.randn(4, device="cuda")
        torch.cuda.empty_cache()


def test_a_capture_without_memory_is_given_up(card: Card) -> None:
    function = card.function("Plain")
    function.answer(function.load())
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit)
    try:
        function.runner.capture(lambda: False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert function.runner.graphs == (0, "there is no device memory left for its graph")
    function.answer(function.load())


def test_a_capture_that_is_interrupted_can_be_done_later(card: Card) -> None:
    function = card.function("bert")
    expected = function.answer(function.load())
    for patience in (0, 1, 3):
        asked = iter(range(patience, -1, -1))
        function.runner.capture(lambda asked=asked: next(asked) == 0)  # type: ignore[misc]
        assert function.runner.graphs == (0, "")
        assert function.runner.capture_wanted
    function.runner.capture(lambda: False)
    assert function.runner.graphs == (1, "")
    assert close(function.while_arriving(), expected)


def test_no_more_graphs_are_kept_than_allowed_the_oldest_goes_first(card: Card) -> None:
    card.compute.graphs = Graphs(card.graphs.recorder, at_most=2)
    function = card.function("Plain")
    arrival = function.load()
    shapes: list[Inputs] = [{"x": torch.ones(size, 64)} for size in (1, 2, 3)]
    for inputs in shapes:
        function.answer(arrival, inputs)
        function.runner.capture(lambda: False)
        function.answer(arrival, shapes[0])
    assert [function.runner.graph_of(inputs) is not None for inputs in shapes] == [True, False, True]


def test_a_graph_that_is_larger_than_allowed_is_refused(card: Card) -> None:
    card.compute.graphs = Graphs(card.graphs.recorder, at_most_bytes=0)
    function = card.function("Plain")
    expected = function.captured()
    assert function.runner.graphs[1].startswith("its graph takes ")
    assert close(function.answer(function.load()), expected)


def test_graphs_that_are_dropped_give_their_memory_back(card: Card) -> None:
    functions = [card.function("Plain") for _ in range(3)]
    used = []
    for _ in range(3):
        for function in functions:
            function.captured()
        assert card.graphs.used_bytes >= 0
        for function in functions:
            function.runner.forget()
        used.append(card.graphs.used_bytes)
    assert used[1:] == [used[0]] * 2


def test_capturing_goes_on_while_another_function_is_copied_in(card: Card) -> None:
    busy, functions = card.function("bert"), [card.function("Plain") for _ in range(4)]
    expected = busy.captured()
    stop = threading.Event()
    loads = threading.Semaphore(0)

    def swap() -> None:
        while not stop.is_set():
            busy.runner.evict()
            busy.load()
            card.device.sweep()
            loads.release()

    arrivals = [function.load() for function in functions]
    answers = [function.answer(arrival) for function, arrival in zip(functions, arrivals, strict=True)]
    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for function, arrival in zip(functions, arrivals, strict=True):
            for _ in range(5):
                assert loads.acquire(timeout=30)
                function.runner.capture(lambda: False)
                assert function.runner.graphs == (1, "")
                card.graphs.drop(function.runner._built)
                function.answer(arrival)
            function.runner.capture(lambda: False)
    finally:
        stop.set()
        swapping.join()
    for function, arrival, answer in zip(functions, arrivals, answers, strict=True):
        assert function.runner.graphs == (1, "")
        assert close(function.answer(arrival), answer)
    busy.runner.evict()
    assert close(busy.while_arriving(), expected)
