"""How long a request waits for a model that sleeps in host memory, against what else one could do. See README.md.

In process, over the runner and a device: no server, no sockets. Weights are random, shapes are real.
"""

import argparse
import copy
import json
import mmap
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn
from transformers import initialization

from dormouse.core.types import Bytes, round_up
from dormouse.device.base import Device
from dormouse.device.cpu import CpuDevice
from dormouse.device.vmm import VmmDevice
from dormouse.executor.arrival import Arrival
from dormouse.executor.compute import Compute, CpuCompute, CudaCompute, moved
from dormouse.executor.lanes import Lane
from dormouse.executor.runner import Runner
from dormouse.model import huggingface, skeleton
from dormouse.model.access import first_use_order
from dormouse.model.loaded import Inputs, prepared
from dormouse.model.outputs import Output
from dormouse.model.places import find_places
from dormouse.model.profiling import KeptTensor, kept_tensors, run
from dormouse.model.tasks import wrapped
from dormouse.store.image import laid_out
from dormouse.store.index import PAGE_BYTES, HuggingFaceSkeleton, ImageIndex, TensorEntry, write_index
from dormouse.tensors import Signature
from dormouse.wire import Extent

MIB: Bytes = 1024 * 1024
ROUNDING = 0.05
"""How far an answer in low precision may be from the same answer by other kernels, of its size."""
BLOCK = 1 << 22
"""So many random numbers are made; weights are that block over and over, from another start each."""


@dataclass(frozen=True)
class Shape:
    """A model by its configuration: which class, and what it is asked."""

    name: str
    architecture: str
    config: Any
    inputs: Inputs
    dtype: str = "float32"
    task: str = "raw"
    tuned: bool = False
    """CPU only: a link so slow that the copy takes as long as the forward pass."""


@dataclass(frozen=True)
class Row:
    """Milliseconds are medians. ``overlap``: how much of the shorter of copy and run was hidden behind the other."""

    model: str
    bytes: Bytes
    copy_ms: float
    resident_ms: float
    bare_graph_ms: float | None
    """A replay of the graph that the resident run replays, and nothing else; None where there are none."""
    copy_then_run_ms: float
    swap_run_ms: float
    naive_ms: float
    overlap: float
    correct: bool
    exact: bool
    """No rounding between a graph and an ordinary run."""
    eager_because: str
    """Why there are no graphs."""


def tokens(count: int, vocabulary: int) -> Inputs:
    return {"input_ids": (torch.arange(count).reshape(1, count) * 7 + 5) % vocabulary}


def picture() -> Inputs:
    return {"pixel_values": torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))}


def resnet_152() -> Any:
    return transformers.ResNetConfig(depths=[3, 8, 36, 3], hidden_sizes=[256, 512, 1024, 2048], layer_type="bottleneck")


def shapes(device: str) -> list[Shape]:
    bert, resnet = transformers.BertConfig(), resnet_152()
    if device == "cpu":
        minilm = transformers.BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536)
        return [
            Shape("MiniLM-L6 shape, 64 tokens", "BertModel", minilm, tokens(64, 30522)),
            Shape("ResNet-152 shape", "ResNetForImageClassification", resnet, picture()),
            Shape("BERT-base shape, 128 tokens", "BertModel", bert, tokens(128, 30522)),
            Shape("BERT-base shape, 128 tokens, tuned link", "BertModel", bert, tokens(128, 30522), tuned=True),
            Shape("ResNet-152 shape, tuned link", "ResNetForImageClassification", resnet, picture(), tuned=True),
        ]
    large = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    llama = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    return [
        Shape("ResNet-152 fp32", "ResNetForImageClassification", resnet, picture()),
        Shape("BERT-large fp32, 384 tokens", "BertModel", large, tokens(384, 30522)),
        Shape(
            "Llama-3-8B shape bf16, prefill 128",
            "LlamaForCausalLM",
            llama,
            tokens(128, 128256),
            dtype="bfloat16",
            task="next-token",
        ),
    ]


class Image:
    """A model's image in shared memory, made without ever making the model."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        self.shape = shape
        self.directory = directory
        shape.config.architectures = [shape.architecture]
        shape.config.save_pretrained(directory)
        self._skeleton = HuggingFaceSkeleton(shape.architecture, shape.task)
        with initialization.no_init_weights():
            template = self._template()
        self.index = self._index(template)
        write_index(directory, self.index)
        size_bytes = round_up(self.index.image_bytes, PAGE_BYTES)
        self._fd = os.memfd_create("image")
        os.ftruncate(self._fd, size_bytes)
        self._memory = mmap.mmap(self._fd, size_bytes)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.extents = (Extent(0, size_bytes),)
        self._fill(template)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    def view(self, offset: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[offset:end].view(dtype).view(shape)

    def plain(self, device: torch.device) -> nn.Module:
        """The model as PyTorch has it: tensors of its own, on that device."""
        module = skeleton.rebuild(self.directory, self.index, ())
        skeleton.bind(module, self.index, lambda *place: self.view(*place).to(device, copy=True))
        return module

    def _template(self) -> nn.Module:
        """On the CPU, with real buffers and parameters that nobody has written to, so that they take no memory."""
        model_class = huggingface.class_of(self.shape.architecture, self.directory)
        config = model_class.config_class.from_pretrained(self.directory)
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.shape.dtype))
        try:
            return prepared(wrapped(model_class(config), self.shape.task, self.directory), None)
        finally:
            torch.set_default_dtype(before)

    def _index(self, template: nn.Module) -> ImageIndex:
        kept = kept_tensors(template)
        order = self._order(template, kept)
        tensors, weight_bytes, image_bytes = laid_out([_entry(kept[place]) for place in order], ())
        return ImageIndex(
            tensors, weight_bytes, image_bytes, (), self._skeleton, Signature((), ()), "", self.shape.dtype
        )

    def _order(self, template: nn.Module, kept: list[KeptTensor]) -> list[int]:
        """First-use order, from a forward pass over memory that nobody has written to."""
        used, _ = first_use_order(template, [item.tensor for item in kept], lambda: run(template, self.shape.inputs))
        seen = set(used)
        return [*used, *(place for place in range(len(kept)) if place not in seen)]

    def _fill(self, template: nn.Module) -> None:
        values = {place.name: place for place in find_places(template)}
        block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).to(getattr(torch, self.shape.dtype))
        for number, entry in enumerate(self.index.tensors):
            target = self.view(entry.offset, getattr(torch, entry.dtype), entry.shape)
            if entry.kind == "parameter" and len(entry.shape) > 1:
                _fill_random(target, block.roll(-number * 4099) if number < 64 else block, target[0].numel() ** -0.5)
            elif entry.kind == "parameter":
                target.fill_(1.0 if entry.names[0].endswith("weight") else 0.0)
            else:
                source = values[entry.names[0]].tensor
                assert source is not None
                target.copy_(source)

    def close(self) -> None:
        os.close(self._fd)


def _entry(item: KeptTensor) -> TensorEntry:
    return TensorEntry(
        names=tuple(place.name for place in item.places),
        kind=item.kind,
        dtype=str(item.tensor.dtype).removeprefix("torch."),
        shape=tuple(item.tensor.shape),
        offset=0,
        size_bytes=item.tensor.nbytes,
    )


def _fill_random(target: torch.Tensor, block: torch.Tensor, scale: float) -> None:
    flat = target.view(-1)
    whole = flat.numel() // len(block)
    flat[: whole * len(block)].view(whole, len(block)).copy_((block * scale).expand(whole, len(block)))
    flat[whole * len(block) :].copy_(block[: flat.numel() - whole * len(block)] * scale)


class Bench:
    """One image on one device. Every method answers in milliseconds."""

    def __init__(self, image: Image, device: Device, compute: Compute, group_bytes: Bytes) -> None:
        self.image = image
        self.device = device
        self.compute = compute
        self.lane = Lane("copy-lane")
        self.inputs = image.shape.inputs
        # The device holds one image: two functions that take turns drive each other out, as on a full device.
        self.runner, self.rival = (self._runner(group_bytes, poison=False) for _ in range(2))
        self.poisoned = self._runner(group_bytes, poison=True)
        self._on_device: Runner | None = None
        self.resident_answers: dict[Runner, dict[str, Output]] = {}
        for runner in (self.runner, self.rival, self.poisoned):
            self._warm(runner)

    def _runner(self, group_bytes: Bytes, *, poison: bool) -> Runner:
        address = self.image.address
        return Runner(self.device, self.compute, self.image.directory, address, group_bytes, poison=poison)

    def _warm(self, runner: Runner) -> None:
        """Built, run once, and captured where there are graphs."""
        arrival = self._load(runner)
        self._run(runner, arrival)
        runner.capture(lambda: False)
        self.resident_answers[runner] = self._run(runner, arrival)

    def _load(self, runner: Runner) -> Arrival:
        self.clear()
        arrival = Arrival()
        runner.load(self.image.extents, arrival)
        self._on_device = runner
        return arrival

    def clear(self) -> None:
        """Whoever is on the device leaves it."""
        if self._on_device is not None:
            self._on_device.evict()
            self.device.sweep()
            self._on_device = None

    def copy(self) -> float:
        """All bytes in one copy, into memory that is mapped already."""
        self.clear()
        size_bytes = self.image.index.image_bytes
        region = self.device.reserve(size_bytes)
        self.device.map(region, size_bytes)
        with _clock() as elapsed:
            self.device.copy_in(region, 0, self.image.address, size_bytes)
            self.device.fence().synchronize()
        self.device.unmap(region)
        self.device.release(region)
        return elapsed.ms

    def sequential_and_resident(self) -> tuple[float, float]:
        """Copy, then run; and run again, now that everything is there."""
        self.clear()
        with _clock() as sequential:
            arrival = self._load(self.runner)
            self._run(self.runner, arrival)
        with _clock() as resident:
            self._run(self.runner, arrival)
        return sequential.ms, resident.ms

    def bare_graph(self) -> float | None:
        """The graph alone, of a function that is on the device."""
        self._run(self.runner, self._load(self.runner))
        graph = self.runner.graph_of(self.inputs)
        if graph is None:
            return None
        with self.compute.lane(), _clock() as elapsed:
            graph.launch()
            self.compute.check()
        return elapsed.ms

    def swap_run(self, runner: Runner) -> tuple[float, dict[str, Output]]:
        """As an executor does it: one lane makes room and copies, this thread runs."""
        if self._on_device is None or self._on_device is runner:
            self._load(self.rival)
        leaving, arrival = self._on_device, Arrival()
        assert leaving is not None

        def swap() -> None:
            leaving.evict()
            runner.load(self.image.extents, arrival, meanwhile=self.device.sweep)

        with _clock() as elapsed:
            self.lane.put(swap)
            arrival.wait_begun()
            answer = self._run(runner, arrival)
        self._settle()
        self._on_device = runner
        return elapsed.ms, answer

    def naive(self) -> float:
        """What a process without any of this does: weights from ordinary memory, tensor by tensor, then run."""
        module = self.image.plain(torch.device("cpu"))
        with _clock() as elapsed:
            here = copy.deepcopy(module) if self.compute.device.type == "cpu" else module.to(self.compute.device)
            self._plain(here)
        return elapsed.ms

    def expected(self) -> dict[str, Output]:
        return self._plain(self.image.plain(self.compute.device))

    def _plain(self, module: nn.Module) -> dict[str, Output]:
        with self.compute.lane():
            outputs = run(module, {name: moved(value, self.compute.device) for name, value in self.inputs.items()})
            return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in outputs.items()}

    def _run(self, runner: Runner, arrival: Arrival) -> dict[str, Output]:
        return runner.run(arrival, self.inputs, (), lambda _: True)

    def _settle(self) -> None:
        done = threading.Event()
        self.lane.put(done.set)
        done.wait()


class _Elapsed:
    ms = 0.0


@contextmanager
def _clock() -> Iterator[_Elapsed]:
    elapsed = _Elapsed()
    started = time.perf_counter_ns()
    yield elapsed
    elapsed.ms = (time.perf_counter_ns() - started) / 1e6


def measure(bench: Bench, repeats: int) -> Row:
    """Everything about one model, medians of ``repeats`` each; comparisons are within this run."""
    checks = _Checks(bench)
    for runner in (bench.poisoned, bench.poisoned, bench.runner):
        checks.see(runner, bench.swap_run(runner)[1])
    # In turns, so that a slow moment of the machine falls on all of them alike.
    copies, pairs, swaps, bare = [], [], [], []
    for _ in range(repeats + 1):
        copies.append(bench.copy())
        pairs.append(bench.sequential_and_resident())
        bare.append(bench.bare_graph())
        for runner in (bench.rival, bench.runner):
            took_ms, answer = bench.swap_run(runner)
            swaps.append(took_ms)
            checks.see(runner, answer)
    copy_ms, swap_ms = median(copies[1:]), median(swaps[2:])
    sequential_ms, resident_ms = (median(pair[place] for pair in pairs[1:]) for place in (0, 1))
    bare_ms = [took for took in bare[1:] if took is not None]
    checks.see(bench.poisoned, bench.swap_run(bench.poisoned)[1])
    bench.clear()
    naive = [bench.naive() for _ in range(1 if bench.image.index.image_bytes > 4096 * MIB else 3)]
    return Row(
        model=bench.image.shape.name,
        bytes=bench.image.index.image_bytes,
        copy_ms=copy_ms,
        resident_ms=resident_ms,
        bare_graph_ms=median(bare_ms) if bare_ms else None,
        copy_then_run_ms=sequential_ms,
        swap_run_ms=swap_ms,
        naive_ms=median(naive),
        overlap=(sequential_ms - swap_ms) / min(copy_ms, resident_ms),
        correct=checks.same and checks.close,
        exact=checks.same and checks.equal,
        eager_because=bench.runner.graphs[1],
    )


class _Checks:
    """Every answer is looked at when it comes and then let go, as a server does.

    ``same``: an answer of a function that has just arrived equals, bit by bit, what the same function answers when it
    is resident. ``close`` and ``equal``: the resident answer against the plain model's; a graph may have been captured
    with other kernels than an ordinary run chooses, so there may be rounding between them.
    """

    def __init__(self, bench: "Bench") -> None:
        self._bench = bench
        expected = bench.expected()
        answers = bench.resident_answers.values()
        self.same = True
        self.close = all(_close(answer, expected) for answer in answers)
        self.equal = all(_equal(answer, expected) for answer in answers)

    def see(self, runner: Runner, answer: dict[str, Output]) -> None:
        self.same = self.same and _equal(answer, self._bench.resident_answers[runner])


def _equal(one: dict[str, Output], other: dict[str, Output]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(_tensor(value), _tensor(other[name])) for name, value in one.items()
    )


def _close(one: dict[str, Output], other: dict[str, Output]) -> bool:
    return one.keys() == other.keys() and all(
        _relative_error(_tensor(value), _tensor(other[name])) <= ROUNDING for name, value in one.items()
    )


def _relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    """In the 2-norm; not a number if one of them is none."""
    return float((one.double() - other.double()).norm()) / float(other.double().norm())


def _tensor(value: Output) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def opened(kind: str, image: Image, link_bytes_per_s: int | None, graphs: bool = True) -> tuple[Device, Compute]:
    """A device with room for this image once, and torch on it."""
    if kind == "cpu":
        device = CpuDevice(round_up(image.index.image_bytes, 2 * MIB), 2 * MIB, link_bytes_per_s=link_bytes_per_s)
        return device, CpuCompute(threads=torch.get_num_threads())
    compute = CudaCompute(0, graphs=graphs)
    gpu = VmmDevice(0, round_up(image.index.image_bytes, 32 * MIB), 32 * MIB)
    gpu.register_host(image.address, round_up(image.index.image_bytes, PAGE_BYTES))
    return gpu, compute


def bench_of(kind: str, shape: Shape, repeats: int, group_bytes: Bytes, graphs: bool) -> Row:
    with tempfile.TemporaryDirectory() as directory:
        image = Image(shape, Path(directory))
        link = tuned_link(image, group_bytes) if shape.tuned else None
        device, compute = opened(kind, image, link, graphs)
        row = measure(Bench(image, device, compute, group_bytes), repeats)
        device.close()
        image.close()
        return row


def tuned_link(image: Image, group_bytes: Bytes) -> int:
    """Bytes a second at which the copy takes as long as a forward pass."""
    device, compute = opened("cpu", image, None)
    bench = Bench(image, device, compute, group_bytes)
    took_ms = median([bench.sequential_and_resident()[1] for _ in range(5)])
    device.close()
    return round(image.index.image_bytes / took_ms * 1000)


def setting(kind: str) -> dict[str, object]:
    """Where and with what this was measured."""
    gpu = torch.cuda.get_device_name(0) if kind == "cuda" else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": kind,
        "gpu": gpu,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "weights": "random, of the shapes named",
    }


def print_table(rows: list[Row]) -> None:
    head = (
        "model",
        "MB",
        "copy",
        "bare",
        "resident",
        "copy+run",
        "swap+run",
        "naive",
        "overlap",
        "swap/copy",
        "correct",
    )
    print("{:40} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>7} {:>9} {}".format(*head))
    for row in rows:
        times = (row.copy_ms, row.bare_graph_ms, row.resident_ms, row.copy_then_run_ms, row.swap_run_ms, row.naive_ms)
        said = " ".join("       -" if took is None else f"{took:8.2f}" for took in times)
        correct = "exact" if row.exact else "close" if row.correct else "NO"
        ratio = row.swap_run_ms / row.copy_ms
        print(f"{row.model:40} {row.bytes / 1e6:8.0f} {said} {row.overlap:7.2f} {ratio:9.3f} {correct}")
        if row.eager_because:
            print(f"    no graphs: {row.eager_because}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write rows and setting here")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--group-mib", type=float, default=8)
    parser.add_argument("--graphs", choices=("auto", "off"), default="auto")
    parser.add_argument("--only", default="", help="models whose name contains this")
    asked = parser.parse_args()
    sys.setswitchinterval(0.0005)  # as an executor does
    if asked.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
    rows = []
    for shape in shapes(asked.device):
        if asked.only in shape.name:
            group_bytes = round(asked.group_mib * MIB)
            rows.append(bench_of(asked.device, shape, asked.repeats, group_bytes, asked.graphs == "auto"))
            print_table(rows[-1:])
    if asked.json:
        asked.json.write_text(json.dumps({**setting(asked.device), "rows": [asdict(row) for row in rows]}, indent=1))
    return 0 if all(row.correct for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
