"""One image on one device, loaded, run and driven out in every way that is compared."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from bench.swap.image import Image
from torch import nn

from dormouse.core.types import Bytes, round_up
from dormouse.device.base import Device
from dormouse.device.cpu import CpuDevice
from dormouse.device.vmm import VmmDevice
from dormouse.executor.arrival import Arrival
from dormouse.executor.compute import Compute, CpuCompute, CudaCompute, moved
from dormouse.executor.lanes import Lane
from dormouse.executor.runner import Runner
from dormouse.model.outputs import Output
from dormouse.model.profiling import run
from dormouse.store.index import PAGE_BYTES

MIB: Bytes = 1024 * 1024


class Elapsed:
    ms = 0.0


@contextmanager
def clock() -> Iterator[Elapsed]:
    elapsed = Elapsed()
    started = time.perf_counter_ns()
    yield elapsed
    elapsed.ms = (time.perf_counter_ns() - started) / 1e6


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
        with clock() as elapsed:
            self.device.copy_in(region, 0, self.image.address, size_bytes)
            self.device.fence().synchronize()
        self.device.unmap(region)
        self.device.release(region)
        return elapsed.ms

    def sequential_and_resident(self) -> tuple[float, float]:
        """Copy, then run; and run again, now that everything is there."""
        self.clear()
        with clock() as sequential:
            arrival = self._load(self.runner)
            self._run(self.runner, arrival)
        with clock() as resident:
            self._run(self.runner, arrival)
        return sequential.ms, resident.ms

    def bare_graph(self) -> float | None:
        """The graph alone, of a function that is on the device."""
        self._run(self.runner, self._load(self.runner))
        graph = self.runner.graph_of(self.inputs)
        if graph is None:
            return None
        with self.compute.lane(), clock() as elapsed:
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

        with clock() as elapsed:
            self.lane.put(swap)
            arrival.wait_begun()
            answer = self._run(runner, arrival)
        self._settle()
        self._on_device = runner
        return elapsed.ms, answer

    def expected(self) -> dict[str, Output]:
        return self.plainly(self.image.plain(self.compute.device))

    def plainly(self, module: nn.Module) -> dict[str, Output]:
        """A forward pass of an ordinary module on the device, to its end."""
        with self.compute.lane():
            outputs = run(module, {name: moved(value, self.compute.device) for name, value in self.inputs.items()})
            return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in outputs.items()}

    def _run(self, runner: Runner, arrival: Arrival) -> dict[str, Output]:
        return runner.run(arrival, self.inputs, (), lambda _: True)

    def _settle(self) -> None:
        done = threading.Event()
        self.lane.put(done.set)
        done.wait()


def opened(kind: str, image: Image, link_bytes_per_s: int | None, graphs: bool = True) -> tuple[Device, Compute]:
    """A device with room for this image once, and torch on it."""
    if kind == "cpu":
        device = CpuDevice(round_up(image.index.image_bytes, 2 * MIB), 2 * MIB, link_bytes_per_s=link_bytes_per_s)
        return device, CpuCompute(threads=torch.get_num_threads())
    compute = CudaCompute(0, graphs=graphs)
    gpu = VmmDevice(0, round_up(image.index.image_bytes, 32 * MIB), 32 * MIB)
    gpu.register_host(image.address, round_up(image.index.image_bytes, PAGE_BYTES))
    return gpu, compute
