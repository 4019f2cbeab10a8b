"""Where torch runs: its device, its stream, and tensors over memory that torch did not allocate.

The one file of this room that asks whether the device is CUDA.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dormouse.device.base import Region
from dormouse.executor.cuda_graphs import CudaRecorder
from dormouse.executor.graphs import Graphs
from dormouse.executor.memory import memory_at
from dormouse.model.loaded import Value


class CpuCompute:
    """Torch on the CPU: no streams, and memory is memory."""

    device = torch.device("cpu")
    stream = 0
    graphs: Graphs | None = None

    def __init__(self, threads: int = 0) -> None:
        """``threads`` of torch; 0: one fewer than the cores, at least one, which leaves one for copies."""
        self._threads = threads or max(1, (os.cpu_count() or 1) - 1)

    def settle_in(self) -> None:
        """Called once by the thread that will run modules: torch keeps the number of threads by thread."""
        torch.set_num_threads(self._threads)

    def check(self) -> None:
        """After a failure: nothing a module does can break the CPU."""

    def memory(self, region: Region) -> torch.Tensor:
        """The whole region as bytes. Nothing is touched: most of it is not mapped yet."""
        whole = (ctypes.c_uint8 * region.reserved_bytes).from_address(region.address)
        return torch.frombuffer(whole, dtype=torch.uint8)

    @contextmanager
    def lane(self) -> Iterator[None]:
        """Inside, torch infers. What was started inside has ended when it is left."""
        with torch.inference_mode():
            yield


class CudaCompute:
    """Torch on one GPU, on a stream of its own."""

    def __init__(self, index: int, *, graphs: bool = True) -> None:
        self.device = torch.device("cuda", index)
        make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
        self._stream = make(self.device)
        self.stream: int = self._stream.cuda_stream
        self.graphs = Graphs(CudaRecorder(self.device, self._stream)) if graphs else None
        """None: everything runs eagerly."""

    def settle_in(self) -> None:
        """Called once by the thread that will run modules."""
        torch.cuda.set_device(self.device)

    def check(self) -> None:
        """After a failure: raises if the device itself is in error, which only a new process ends."""
        torch.cuda.synchronize(self.device)

    def memory(self, region: Region) -> torch.Tensor:
        """The whole region as bytes; its start must be mapped, since torch asks the driver whose address it is."""
        return memory_at(region.address, region.reserved_bytes, self.device)

    @contextmanager
    def lane(self) -> Iterator[None]:
        """Inside, torch infers on our stream. What was started inside has ended when it is left."""
        with torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()


Compute = CpuCompute | CudaCompute


def moved(value: Value, device: torch.device) -> Value:
    """An input on the device where the module runs; text stays as it is."""
    return value.to(device) if isinstance(value, torch.Tensor) else value
