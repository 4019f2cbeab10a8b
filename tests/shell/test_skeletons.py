"""Functions of one architecture share a module, until one of them leaves something in it."""

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from dormouse.device.cpu import CpuDevice
from dormouse.executor.arrival import Arrival
from dormouse.executor.compute import CpuCompute
from dormouse.executor.graphs import Graphs
from dormouse.executor.runner import Runner
from dormouse.executor.skeletons import Skeleton, Skeletons, architecture_of
from dormouse.functions import Manifest
from dormouse.model import skeleton, sources
from dormouse.model.contents import Contents
from dormouse.model.importing import import_model
from dormouse.model.loaded import Inputs
from dormouse.model.outputs import Output, named_outputs
from dormouse.store.index import PAGE_BYTES, read_index
from dormouse.wire import Extent
from tests.shell.arenas import MappedArena
from tests.shell.recorder import CpuRecorder
from tests.shell.tiny_models import configurations, save_factories, save_huggingface

GROUP = 8 * 1024


@dataclass
class Function:
    runner: Runner
    directory: Path
    extents: tuple[Extent, ...]
    example: Inputs
    expected: dict[str, Output]

    @property
    def skeleton(self) -> Skeleton:
        built = self.runner._built
        assert built is not None
        return self.runner._skeletons._members[built].skeleton

    def answer(self, *, arriving: bool = True) -> dict[str, Output]:
        """Loaded by another thread, run meanwhile or afterwards, evicted."""
        arrival = Arrival()
        loading = threading.Thread(target=self.runner.load, args=(self.extents, arrival))
        loading.start()
        if not arriving:
            loading.join()
        arrival.wait_begun()
        answer = self.runner.run(arrival, self.example, (), lambda _: True)
        loading.join()
        self.runner.evict()
        return answer

    def is_right(self, *, arriving: bool = True) -> bool:
        answer = self.answer(arriving=arriving)
        return answer.keys() == self.expected.keys() and all(
            torch.allclose(_tensor(answer[name]), _tensor(value), rtol=1e-5, atol=1e-6)
            for name, value in self.expected.items()
        )


def _tensor(value: Output) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


Make = Callable[..., Function]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes functions, each with weights of its own, that share what they can."""
    code = save_factories(tmp_path / "code")
    arena = MappedArena(64 * PAGE_BYTES)
    device = CpuDevice(4 * 1024 * 1024, 64 * 1024, link_bytes_per_s=50_000_000)
    skeletons = Skeletons(GROUP)
    compute = CpuCompute()
    made: list[Function] = []

    def function(source: str, graphs: Graphs | None = None) -> Function:
        place = tmp_path / str(len(made))
        if source in configurations():
            save_huggingface(source, place / "source", seed=len(made))
            manifest = Manifest("m", str(place / "source"))
        else:
            manifest = Manifest("m", f"factories:{source}", code=str(code))
        compute.graphs = graphs
        loaded = sources.load(manifest, [tmp_path])
        example = loaded.trials[-1].inputs
        index = import_model(manifest, place / "image", [tmp_path])
        runner = Runner(
            device,
            compute,
            place / "image",
            arena.address,
            GROUP,
            allow_code=[tmp_path],
            poison=True,
            skeletons=skeletons,
        )
        extents = arena.read(place / "image", index)
        made.append(Function(runner, place / "image", extents, example, {}))
        made[-1].expected = _plain_answer(place / "image", arena.bytes_of(extents), example, tmp_path)
        return made[-1]

    yield function
    device.close()
    arena.close()


def _plain_answer(directory: Path, image: bytes, example: Inputs, code: Path) -> dict[str, Output]:
    """Of a module that nobody shares, over a copy of the image."""
    index, memory = read_index(directory), torch.frombuffer(bytearray(image), dtype=torch.uint8)
    module = skeleton.rebuild(directory, index, [code])

    def view(offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        return memory[offset:end].view(dtype).view(shape)

    skeleton.bind(module, index, view)
    with torch.inference_mode():
        return named_outputs(module(**example))


@pytest.mark.parametrize("source", [*sorted(configurations()), "random_net", "random_recurrent"])
def test_functions_of_one_architecture_take_turns_in_one_module(source: str, make: Make) -> None:
    one, other = make(source), make(source)
    for _ in range(2):
        for function in (one, other):
            assert function.is_right()
            assert function.is_right(arriving=False)
    assert one.skeleton is other.skeleton
    assert not torch.equal(_tensor(next(iter(one.expected.values()))), _tensor(next(iter(other.expected.values()))))


def test_one_that_keeps_a_view_of_its_weights_keeps_its_module(make: Make) -> None:
    one, other, third = make("keeping"), make("keeping"), make("keeping")
    for _ in range(2):
        for function in (one, other, third):
            assert function.is_right()
    assert len({id(function.skeleton) for function in (one, other, third)}) == 3


def test_what_one_counts_another_does_not_see(make: Make) -> None:
    one, other = make("counting"), make("counting")
    first = _tensor(one.answer()["output"])
    for calls in range(1, 4):
        torch.testing.assert_close(_tensor(one.answer()["output"]), first + calls)
    assert other.is_right()
    torch.testing.assert_close(_tensor(one.answer()["output"]), first + 4)


def test_runtime_state_is_not_shared(make: Make) -> None:
    one, other = make("counter"), make("counter")
    one.answer()
    other.answer()
    assert one.skeleton is not other.skeleton


def test_what_changes_hands_between_a_capture_and_a_run_is_whole(make: Make) -> None:
    graphs = Graphs(CpuRecorder())
    one, other = make("random_net", graphs), make("random_net", graphs)
    for function in (one, other):
        arrival = Arrival()
        function.runner.load(function.extents, arrival)
        function.runner.run(arrival, function.example, (), lambda _: True)
    for function in (one, other):
        function.runner.capture(lambda: False)
        assert function.runner.graphs == (1, "")
        function.runner.evict()
    for function in (one, other):
        assert function.is_right()


def test_with_the_last_function_the_module_goes(make: Make) -> None:
    one, other = make("random_net"), make("random_net")
    one.answer()
    other.answer()
    module = weakref.ref(one.skeleton.module)
    one.runner.forget()
    assert other.is_right()
    other.runner.forget()
    gc.collect()
    assert module() is None


def test_changed_code_is_another_architecture(make: Make, tmp_path: Path) -> None:
    function = make("random_net")
    index = read_index(function.directory)
    before = architecture_of(index, function.directory)
    assert architecture_of(index, function.directory) == before
    os.utime(tmp_path / "code" / "layers.py", (1, 1))
    assert architecture_of(index, function.directory) != before


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.things: dict[str, list[int] | set[int]] = {"list": [1], "set": {1}}
        self.flag = False


def test_contents_see_what_is_put_into_a_module_however_deep() -> None:
    def change_of(do: Callable[[Keeper], object]) -> bool:
        keeper = Keeper()
        contents = Contents(keeper)
        assert not contents.changed
        do(keeper)
        return contents.changed

    changes: list[Callable[[Keeper], object]] = [
        lambda k: setattr(k, "flag", True),
        lambda k: setattr(k, "more", 1),
        lambda k: setattr(k.linear, "cache", torch.ones(1)),
        lambda k: k.things.update(more=[1]),
        lambda k: k.things["list"].append(2),  # type: ignore[union-attr]
        lambda k: k.things["set"].add(2),  # type: ignore[union-attr]
        lambda k: setattr(k.linear, "weight", nn.Parameter(torch.ones(2, 2))),
        lambda k: k.linear.register_buffer("late", torch.ones(1)),
        lambda k: delattr(k, "flag"),
    ]
    assert [change_of(do) for do in changes] == [True] * len(changes)
    assert not change_of(lambda k: k.linear(torch.ones(1, 2)))
