"""A function on the CPU device: loaded, run while it arrives, evicted, rolled back, over garbage."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dormouse.core.types import Bytes
from dormouse.device.cpu import CpuDevice
from dormouse.errors import DeviceError, InvalidRequest, OutOfChunks, RefusedSource
from dormouse.executor.arrival import Arrival, ImageNotArrived
from dormouse.executor.compute import CpuCompute
from dormouse.executor.copying import pieces_of
from dormouse.executor.runner import Runner
from dormouse.executor.skeletons import Skeleton
from dormouse.functions import InputManifest, Manifest
from dormouse.model import sources
from dormouse.model.importing import import_model
from dormouse.model.loaded import Inputs
from dormouse.model.outputs import Output, named_outputs
from dormouse.store.index import PAGE_BYTES, ImageIndex
from dormouse.wire import Extent
from tests.shell.arenas import MappedArena
from tests.shell.tiny_models import configurations, save_factories, save_huggingface

CHUNK: Bytes = 64 * 1024
GROUP: Bytes = 8 * 1024


@dataclass
class Bench:
    """One function, its image in an arena, and a device of small chunks."""

    runner: Runner
    device: CpuDevice
    arena: MappedArena
    index: ImageIndex
    extents: tuple[Extent, ...]
    manifest: Manifest
    allow_code: list[Path]

    def load(self) -> Arrival:
        arrival = Arrival()
        self.runner.load(self.extents, arrival)
        return arrival

    def answer(self, arrival: Arrival, inputs: Inputs, wanted: tuple[str, ...] = ()) -> dict[str, Output]:
        return self.runner.run(arrival, inputs, wanted, lambda _: True)

    def worn(self) -> Skeleton:
        built = self.runner._built
        assert built is not None
        return self.runner._skeletons.worn_by(built)

    def plain(self) -> Callable[[Inputs], dict[str, Output]]:
        """The model itself, without any of this."""
        loaded = sources.load(self.manifest, self.allow_code)

        def run(inputs: Inputs) -> dict[str, Output]:
            with torch.inference_mode():
                return named_outputs(loaded.module(**inputs))

        return run

    def example(self) -> Inputs:
        return sources.load(self.manifest, self.allow_code).trials[-1].inputs


Make = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Bench] = []

    def bench(source: str, *, link: int | None = None, faults: tuple[str, ...] = (), **more: Any) -> Bench:
        if source in configurations():
            save_huggingface(source, tmp_path / "source")
            manifest, allow_code = Manifest("m", str(tmp_path / "source"), **more), []
        else:
            code = save_factories(tmp_path / "code")
            manifest, allow_code = Manifest("m", f"factories:{source}", code=str(code), **more), [tmp_path]
        index = import_model(manifest, tmp_path / "image", allow_code)
        arena = MappedArena(64 * PAGE_BYTES)
        extents = arena.read(tmp_path / "image", index)
        device = CpuDevice(4 * 1024 * 1024, CHUNK, link_bytes_per_s=link, faults=faults)
        runner = Runner(
            device, CpuCompute(), tmp_path / "image", arena.address, GROUP, allow_code=allow_code, poison=True
        )
        made.append(Bench(runner, device, arena, index, extents, manifest, allow_code))
        return made[-1]

    yield bench
    for item in made:
        item.device.close()
        item.arena.close()


def same(one: dict[str, Output], other: dict[str, Output]) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(value, other[name], rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
        if isinstance(value, torch.Tensor)
        else value == other[name]
        for name, value in one.items()
    )


def while_arriving(bench: Bench, inputs: Inputs) -> dict[str, Output]:
    """Run on this thread while another loads."""
    arrival = Arrival()
    loading = threading.Thread(target=bench.runner.load, args=(bench.extents, arrival))
    loading.start()
    arrival.wait_begun()
    try:
        return bench.answer(arrival, inputs)
    finally:
        loading.join()


@pytest.mark.parametrize("name", sorted(configurations()))
def test_a_model_answers_right_while_it_arrives_again_and_again(name: str, make: Make) -> None:
    bench = make(name, link=20_000_000)
    inputs = bench.example()
    expected = bench.plain()(inputs)
    for _ in range(3):
        assert same(while_arriving(bench, inputs), expected)
        bench.runner.evict()
        assert bench.device.free_bytes == bench.device.capacity_bytes
        assert bench.device.unaccounted_bytes() == 0


@pytest.mark.parametrize("source", ["net", "recurrent", "random_net"])
def test_factories_too(source: str, make: Make) -> None:
    bench = make(source)
    inputs = bench.example()
    first = while_arriving(bench, inputs)
    bench.runner.evict()
    assert same(while_arriving(bench, inputs), first)
    if source != "random_net":
        assert same(first, bench.plain()(inputs))


def test_a_resident_model_runs_without_a_guard(make: Make) -> None:
    bench = make("bert")
    inputs = bench.example()
    arrival = bench.load()
    bench.answer(arrival, inputs)
    module = bench.worn().module
    assert {type(inner._parameters) for inner in module.modules()} == {dict}
    assert same(bench.answer(arrival, inputs), bench.plain()(inputs))


def test_every_tensor_lies_in_the_region_at_the_same_address_for_life(make: Make) -> None:
    bench = make("mixtral")
    bench.load()
    module = bench.worn().module
    before = [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]
    bench.runner.evict()
    bench.load()
    module = bench.worn().module
    after = [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]
    assert before == after
    start = bench.worn().wearer.region.address
    assert all(start <= address < start + bench.index.image_bytes for address in before)


def test_runtime_state_comes_home_when_a_function_is_evicted(make: Make) -> None:
    bench = make("counter")
    plain = bench.plain()
    for round_ in range(3):
        inputs: Inputs = {"x": torch.full((2, 4), float(round_ + 1))}
        arrival = bench.load()
        for _ in range(2):
            assert same(bench.answer(arrival, inputs), plain(inputs))
        bench.runner.evict()
    state = bench.arena.bytes_of(bench.extents)[bench.index.weight_bytes :]
    assert (6).to_bytes(8, "little") in state[: bench.index.state_bytes]


def test_state_assigned_while_the_image_arrives_is_kept(make: Make) -> None:
    bench = make("counter", link=40_000_000)
    plain = bench.plain()
    for round_ in range(3):
        inputs: Inputs = {"x": torch.full((2, 4), float(round_ + 1))}
        assert same(while_arriving(bench, inputs), plain(inputs))
        bench.runner.evict()


@pytest.mark.parametrize("fault", ["copy:1", "copy:5", "map:1", "map:2", "reserve:1"])
def test_a_load_that_fails_is_rolled_back_and_can_be_done_again(fault: str, make: Make) -> None:
    bench = make("bert", faults=(fault,))
    with pytest.raises(DeviceError):
        bench.load()
    bench.runner.discard()
    assert bench.device.free_bytes == bench.device.capacity_bytes
    assert bench.device.unaccounted_bytes() == 0
    inputs = bench.example()
    assert same(bench.answer(bench.load(), inputs), bench.plain()(inputs))


def test_who_waits_for_an_image_that_fails_is_told(make: Make) -> None:
    bench = make("bert", link=2_000_000, faults=("copy:9",))
    arrival = Arrival()
    failures: list[DeviceError] = []

    def load() -> None:
        try:
            bench.runner.load(bench.extents, arrival)
        except DeviceError as fault:
            failures.append(fault)
            arrival.fail(fault.message)

    loading = threading.Thread(target=load)
    loading.start()
    arrival.wait_begun()
    with pytest.raises(ImageNotArrived):
        bench.answer(arrival, bench.example())
    loading.join()
    assert failures


def test_a_function_without_room_is_refused_and_holds_nothing(make: Make) -> None:
    bench = make("bert", dtype="float32")
    blocker = bench.device.reserve(bench.device.capacity_bytes)
    bench.device.map(blocker, bench.device.capacity_bytes - CHUNK)
    with pytest.raises(OutOfChunks):
        bench.load()
    bench.runner.discard()
    assert bench.device.free_bytes == CHUNK


def test_an_evicted_function_does_not_run(make: Make) -> None:
    bench = make("net")
    arrival = bench.load()
    bench.runner.evict()
    with pytest.raises(ImageNotArrived):
        bench.answer(arrival, bench.example())


def test_a_damaged_image_directory_is_refused(make: Make, tmp_path: Path) -> None:
    bench = make("bert")
    (tmp_path / "image" / "config.json").write_text(
        (tmp_path / "image" / "config.json").read_text().replace("32", "16")
    )
    with pytest.raises(RefusedSource):
        bench.load()
    assert bench.device.free_bytes == bench.device.capacity_bytes


def test_forgetting_gives_the_addresses_back(make: Make) -> None:
    bench = make("net")
    bench.load()
    bench.runner.forget()
    assert bench.device.free_bytes == bench.device.capacity_bytes
    assert same(bench.answer(bench.load(), bench.example()), bench.plain()(bench.example()))


def test_text_goes_in_and_comes_out(make: Make) -> None:
    bench = make("echo", inputs=(InputManifest("text", "BYTES", (-1, 1)), InputManifest("x", "FP32", (-1, 2))))
    answer = bench.answer(bench.load(), {"text": [[b"one"], [b"two"]], "x": torch.ones(1, 2)})
    assert answer["loud"] == [[b"ONE"], [b"TWO"]]


def test_a_stream_gives_its_chunks_one_by_one_and_stops_when_told(make: Make) -> None:
    bench = make("stream")
    expected = list(bench.plain()({"x": torch.ones(1, 4)}).items())
    assert expected == []  # a generator has no outputs of its own
    chunks: list[dict[str, Output]] = []

    def emit(chunk: dict[str, Output]) -> bool:
        chunks.append(chunk)
        return len(chunks) < 7

    arrival = bench.load()
    assert bench.runner.run(arrival, {"x": torch.ones(1, 4)}, (), emit) == {}
    assert len(chunks) == 6
    bench.runner.run(arrival, {"x": torch.ones(1, 4)}, (), emit)
    assert len(chunks) == 7
    assert same(chunks[6], chunks[0])


def test_only_the_outputs_that_are_asked_for_come_back(make: Make) -> None:
    bench = make("bert")
    arrival = bench.load()
    assert set(bench.answer(arrival, bench.example(), ("pooler_output",))) == {"pooler_output"}
    with pytest.raises(InvalidRequest, match="no output 'logits'"):
        bench.answer(arrival, bench.example(), ("logits",))


def test_pieces_are_cut_at_groups_and_extents() -> None:
    extents = (Extent(100, 10), Extent(0, 4), Extent(50, 20))
    groups = [[(p.offset, p.host_offset, p.size_bytes) for p in group] for group in pieces_of(extents, 30, 8)]
    assert groups == [
        [(0, 100, 8)],
        [(8, 108, 2), (10, 0, 4), (14, 50, 2)],
        [(16, 52, 8)],
        [(24, 60, 6)],
    ]


def test_copies_of_several_groups_begin_small() -> None:
    copies = list(pieces_of((Extent(0, 1000),), 230, 10, 8))
    assert [sum(piece.size_bytes for piece in copy) for copy in copies] == [10, 20, 40, 80, 80]
