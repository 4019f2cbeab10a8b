"""CUDA graphs of forward passes, recorded with the driver's own calls.

Theory of operation. The module runs once, on the compute stream, while that stream records instead of working:

    inputs in the staging area -> the graph's own inputs -> kernels ... wait(event of group 7) ... kernels -> outputs

- The staging area is pinned host memory at a fixed address, shared by all graphs, because one graph is replayed at a
  time. Inputs are fetched by a kernel and not by a copy engine, which would queue them behind an image.
- Whatever the forward pass allocates comes from one memory pool that all graphs share. Nothing in it is kept between
  replays, so a later graph may use the same bytes: outputs are looked at through views that own nothing, and are
  copied to the host before the next replay.
- Waits are external: at a launch they are for what the copy lane has queued by then.

Why not torch.cuda.CUDAGraph: a capture that fails there leaves torch's random generator and allocator believing that
it still goes on. Here nothing of torch is told about captures but where to allocate; a module that draws random
numbers cannot be captured so, and is refused by torch, which is right: a graph of it would be no use for checking.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from dormouse.core.types import Bytes, round_up
from dormouse.device.driver import Driver
from dormouse.errors import DeviceError
from dormouse.executor.graphs import Forward, Interrupted, NotCaptured
from dormouse.executor.memory import memory_at
from dormouse.model.loaded import Inputs, one_line
from dormouse.model.outputs import named_outputs

STAGING_BYTES: Bytes = 64 * 1024 * 1024
"""For the inputs of one replay."""
_ALIGNMENT_BYTES: Bytes = 256


class CudaRecorder:
    """Records on ``stream``, where modules also run when they are not recorded: so what torch and its libraries set
    up for a stream at first use is there already."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream
        self._driver = Driver()
        self._pool: torch.cuda.MemPool | None = None
        self._staging: _Staging | None = None

    def events(self, count: int) -> tuple[int, ...]:
        return tuple(self._driver.create_event() for _ in range(count))

    def drop_events(self, events: Sequence[int]) -> None:
        for event in events:
            self._driver.destroy_event(event)

    def hold_back(self, event: int) -> None:
        self._driver.wait_event_in_capture(self._stream.cuda_stream, event)

    def free_bytes(self) -> Bytes:
        return self._driver.free_memory()

    def trim(self) -> None:
        self._pool = None
        torch.cuda.empty_cache()

    def record(self, forward: Forward, inputs: Inputs) -> "CudaGraph":
        try:
            return self._recorded(forward, inputs)
        except (Interrupted, NotCaptured):
            raise
        except torch.OutOfMemoryError:
            raise NotCaptured("there is no device memory left for its graph") from None
        except DeviceError as fault:
            raise NotCaptured(f"the driver makes no graph of it: {fault.message}") from None
        except Exception as fault:
            raise NotCaptured(f"it cannot be recorded: {one_line(fault)}") from None

    def _recorded(self, forward: Forward, inputs: Inputs) -> "CudaGraph":
        staging = self._staging = self._staging or _Staging(self._device)
        given = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        whole, own = _room_for(given, self._device)
        self._stream.synchronize()
        graph, outputs = self._captured(lambda: _fetched(staging, whole, forward, own))
        try:
            executable = self._driver.instantiate(graph)
        finally:
            self._driver.destroy_graph(graph)
        recorded = CudaGraph(
            self._driver, self._stream, executable, staging=staging, inputs=(whole, own), outputs=outputs
        )
        recorded.stage(inputs)
        recorded.replay(())  # the first launch brings the graph to the device
        return recorded

    def _captured(self, work: Callable[[], dict[str, torch.Tensor]]) -> tuple[int, dict[str, torch.Tensor]]:
        """The graph, and its outputs as views that own nothing."""
        stream = self._stream.cuda_stream
        pool = self._pool = self._pool or torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool, self._device), self._capturing(stream) as graphs:
            outputs = work()
        return graphs[0], {name: _unowned(value) for name, value in outputs.items()}

    @contextmanager
    def _capturing(self, stream: int) -> Iterator[list[int]]:
        graphs: list[int] = []
        self._driver.begin_capture(stream)
        try:
            yield graphs
        except BaseException:
            with suppress(DeviceError):  # what was forbidden has been raised already
                self._driver.destroy_graph(self._driver.end_capture(stream))
            raise
        graphs.append(self._driver.end_capture(stream))


class CudaGraph:
    """One executable graph. ``inputs``: all of them as one block of the device, and each by name."""

    def __init__(
        self,
        driver: Driver,
        stream: torch.cuda.Stream,
        executable: int,
        *,
        staging: "_Staging",
        inputs: tuple[torch.Tensor, dict[str, torch.Tensor]],
        outputs: dict[str, torch.Tensor],
    ) -> None:
        self.names = tuple(outputs)
        self.last_group = -1
        self._driver = driver
        self._stream = stream
        self._executable = executable
        self._whole, own = inputs  # kept for as long as the graph writes to it
        self._places = {name: (view.data_ptr(), view.nbytes) for name, view in _laid_out(staging.memory, own).items()}
        self._outputs = outputs

    def stage(self, inputs: Inputs) -> None:
        for name, (address, size_bytes) in self._places.items():
            value = inputs[name]
            assert isinstance(value, torch.Tensor) and value.nbytes == size_bytes, name
            dense = value.contiguous()
            # Not torch's copy: that wakes a team of threads, which can take longer than the forward pass.
            ctypes.memmove(address, dense.data_ptr(), size_bytes)

    def replay(self, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        try:
            self.launch()
            return {name: self._fetched(name) for name in wanted or self.names}
        finally:
            self._stream.synchronize()

    def launch(self) -> None:
        self._driver.launch(self._executable, self._stream.cuda_stream)

    def close(self) -> None:
        self._driver.destroy_executable(self._executable)

    def _fetched(self, name: str) -> torch.Tensor:
        """An output on its way to memory that torch keeps pinned and reuses: no page of it has yet to be made."""
        output = self._outputs[name]
        answer = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        if output.nbytes:
            self._driver.copy_out(answer.data_ptr(), output.data_ptr(), output.nbytes, self._stream.cuda_stream)
        return answer


class _Staging:
    """Pinned host memory through which inputs go, seen from the host and from the device."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        self.seen_by_device = memory_at(self.memory.data_ptr(), STAGING_BYTES, device)


def _room_for(inputs: dict[str, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    size_bytes = sum(round_up(value.nbytes, _ALIGNMENT_BYTES) for value in inputs.values())
    if size_bytes > STAGING_BYTES:
        raise NotCaptured(f"its inputs have {size_bytes} bytes; inputs of a graph have at most {STAGING_BYTES}")
    whole = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    return whole, _laid_out(whole, inputs)


def _laid_out(whole: torch.Tensor, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of those sizes one after another in a block of bytes."""
    views, start = {}, 0
    for name, value in like.items():
        end = start + value.nbytes
        views[name] = whole[start:end].view(value.dtype).view(value.shape)
        start = round_up(end, _ALIGNMENT_BYTES)
    return views


def _fetched(
    staging: _Staging, whole: torch.Tensor, forward: Forward, own: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The forward pass as it is recorded."""
    if whole.numel():
        fetched = staging.seen_by_device[: whole.numel()].view(torch.int64)
        torch.bitwise_or(fetched, 0, out=whole.view(torch.int64))
    result = forward(own)
    if isinstance(result, Iterator):
        raise NotCaptured("it streams its answer")
    outputs = {}
    for name, value in named_outputs(result).items():
        if not isinstance(value, torch.Tensor) or value.device != whole.device:
            raise NotCaptured(f"its output {name!r} is not made on the device")
        outputs[name] = value.contiguous()
    return outputs


def _unowned(output: torch.Tensor) -> torch.Tensor:
    if output.numel() == 0:
        return torch.empty_like(output)
    return memory_at(output.data_ptr(), output.nbytes, output.device).view(output.dtype).view(output.shape)
