"""One function on one device: built once, loaded and evicted many times, run while it is still arriving.

Theory of operation. The function's tensors are views into its region and never move; only the memory behind them
comes and goes. The image is cut into groups of equal size, copied in order of first use, with a fence behind each:

    image     | group 0 | group 1 | group 2 | ...        cut also where host pages are not neighbours
    region    | chunk 0      | chunk 1      | ...        mapped from the start, ahead of the copies, in growing steps
    fences              f0        f1        f2

While an image arrives, a Watch stands between the module's code and its tensors: the first touch of a tensor whose
group has not been waited for waits for its fence. A run that starts when all has arrived goes without the watch.

Threads: ``load``, ``evict`` and ``discard`` belong to the copy lane, ``run`` to the compute lane. Whoever calls sees
to it that a run and an ``evict`` or ``discard`` never overlap; a run and a ``load`` do, on purpose.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from dormouse.core.types import Bytes, Ns
from dormouse.device.base import Device, Region
from dormouse.errors import DeviceError, InvalidRequest
from dormouse.executor.arrival import Arrival, ImageNotArrived
from dormouse.executor.compute import Compute, moved
from dormouse.executor.copying import Piece, pieces_of
from dormouse.model import skeleton
from dormouse.model.access import Watch
from dormouse.model.loaded import Inputs
from dormouse.model.outputs import Output, named_outputs
from dormouse.model.places import Place, find_places
from dormouse.store.index import ImageIndex, read_index
from dormouse.wire import Extent

HEAD_START_GROUPS = 64
"""Copies that are queued before the module may run. Queueing one takes microseconds, but two threads that want the
interpreter by turns lose tens of microseconds at every turn; so what is soon queued is queued undisturbed."""

POISON = 0xFF
"""As floating-point numbers, NaN."""


class Runner:
    """``host_address`` is where the arena is mapped. Nothing is read or reserved before the first load."""

    def __init__(
        self,
        device: Device,
        compute: Compute,
        directory: Path,
        host_address: int,
        group_bytes: Bytes,
        *,
        allow_code: Sequence[Path] = (),
        poison: bool = False,
    ) -> None:
        self._device = device
        self._compute = compute
        self._directory = directory
        self._host_address = host_address
        self._group_bytes = group_bytes
        self._allow_code = allow_code
        self._poison = poison
        self._built: _Built | None = None
        self._current: Arrival | None = None
        self._extents: tuple[Extent, ...] = ()

    def load(self, extents: tuple[Extent, ...], arrival: Arrival) -> Ns:
        """Bring the image in; the time spent on building, which is 0 after the first load.

        Raises DeviceError or RefusedSource; then call ``discard``.
        """
        started = time.monotonic_ns()
        fresh = self._built is None
        built = self._built or self._build()
        build_ns = time.monotonic_ns() - started if fresh else 0
        self._extents = extents
        built.guard.passed = -1
        self._current = arrival
        self._copy_in(built, arrival)
        arrival.settle()
        return build_ns

    def run(
        self, arrival: Arrival, inputs: Inputs, wanted: Sequence[str], emit: Callable[[dict[str, Output]], bool]
    ) -> dict[str, Output]:
        """One forward pass with keyword inputs; tensors of the answer are on the CPU, ``wanted`` empty: all.

        If the module streams, every chunk goes to ``emit``, which says whether to go on, and the answer is empty.
        Raises ImageNotArrived, InvalidRequest, or whatever the module raises.
        """
        built = self._built
        if built is None or arrival is not self._current:
            raise ImageNotArrived("the function is not on the device")
        if arrival.complete:
            built.guard.disarm()
        with self._compute.lane():
            built.guard.touched = lambda group: _wait(built.guard, arrival, group, self._compute.stream)
            built.guard.begin()
            result = built.module(**{name: moved(value, self._compute.device) for name, value in inputs.items()})
            answer = self._emitted(result, wanted, emit) if isinstance(result, Iterator) else _on_cpu(result, wanted)
            self._keep_state(built, arrival)
        return answer

    def evict(self) -> str:
        """Write runtime state home and give the chunks back; what was lost on the way, which is nothing but after a
        broken copy. Raises DeviceError if the chunks cannot be given back, after which the device is of no use."""
        lost = ""
        if self._built is not None and self._current is not None and self._built.index.state_bytes:
            try:
                self._copy_state_out(self._built)
            except DeviceError as fault:
                lost = f"its runtime state could not be copied home: {fault.message}"
        self.discard()
        return lost

    def discard(self) -> None:
        """Give the chunks back as they are, after the lane's last copy; all of a load that failed goes."""
        self._current = None
        if self._built is not None:
            _drain(self._device)
            self._device.unmap(self._built.region)
            self._built.guard.disarm()
            self._built.rescan()
            self._built.guard.arm()

    def forget(self) -> None:
        """Drop the module and the reserved range."""
        self.discard()
        if self._built is not None:
            region, self._built = self._built.region, None
            self._device.release(region)

    def _build(self) -> "_Built":
        index = read_index(self._directory)
        region = self._device.reserve(index.image_bytes)
        try:
            self._device.map(region, min(index.image_bytes, self._device.chunk_bytes))
            module = skeleton.rebuild(self._directory, index, self._allow_code)
            self._built = _Built(index, region, module, self._compute.memory(region), self._group_bytes)
        except BaseException:
            self._device.unmap(region)
            self._device.release(region)
            raise
        return self._built

    def _copy_in(self, built: "_Built", arrival: Arrival) -> None:
        region, total, chunk = built.region, built.index.image_bytes, self._device.chunk_bytes
        if self._poison:
            self._device.map(region, total)
            self._device.fill(region, POISON)
        mapped, step = len(region.chunks) * chunk, chunk
        for group in pieces_of(self._extents, total, self._group_bytes):
            end = group[-1].offset + group[-1].size_bytes
            if end > mapped:
                # Growing steps: the first copies start after one chunk, and few calls are made for a large image.
                mapped = min(max(end, mapped + step), region.reserved_bytes)
                step *= 2
                self._device.map(region, mapped)
            for piece in group:
                address = self._host_address + piece.host_offset
                self._device.copy_in(region, piece.offset, address, piece.size_bytes)
            arrival.announce(self._device.fence())
            if arrival.announced == HEAD_START_GROUPS:
                arrival.begin()
        arrival.begin()

    def _copy_state_out(self, built: "_Built") -> None:
        for piece in _state_pieces(self._extents, built.index):
            address = self._host_address + piece.host_offset
            self._device.copy_out(built.region, piece.offset, address, piece.size_bytes)
        self._device.fence().synchronize()

    def _emitted(
        self, result: Iterator[object], wanted: Sequence[str], emit: Callable[[dict[str, Output]], bool]
    ) -> dict[str, Output]:
        for chunk in result:
            if not emit(_on_cpu(chunk, wanted)):
                break
        close = getattr(result, "close", None)
        if callable(close):
            close()
        return {}

    def _keep_state(self, built: "_Built", arrival: Arrival) -> None:
        """Runtime state that a forward has assigned anew goes into the image's memory, where eviction finds it."""
        if not built.state:
            return
        if not arrival.complete:
            arrival.wait(built.groups - 1, self._compute.stream)
        for place, view in built.state:
            now = place.tensor
            if now is not None and now is not view and now.shape == view.shape and now.dtype == view.dtype:
                view.copy_(now)
                place.put(view)


class _Built:
    """A module whose tensors are views into its region, and the guard before them."""

    def __init__(
        self, index: ImageIndex, region: Region, module: nn.Module, memory: torch.Tensor, group_bytes: Bytes
    ) -> None:
        self.index = index
        self.region = region
        self.module = module
        self.groups = -(-index.image_bytes // group_bytes)

        def view(offset: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
            end = offset + torch.Size(shape).numel() * dtype.itemsize
            return memory[offset:end].view(dtype).view(shape)

        def group_of(tensor: torch.Tensor) -> int:
            start = tensor.data_ptr() - region.address if tensor.numel() else -1
            return (start + _span_bytes(tensor) - 1) // group_bytes if 0 <= start < index.image_bytes else -1

        skeleton.bind(module, index, view)
        self.state = _state_places(module, index)
        self.guard = Watch(module, group_of, _nothing)
        self.guard.arm()
        self._scanned = False

    def rescan(self) -> None:
        """After the first run: it may have left views of weights in plain attributes."""
        if not self._scanned:
            self._scanned = True
            self.guard.scan()


def _state_places(module: nn.Module, index: ImageIndex) -> list[tuple[Place, torch.Tensor]]:
    names = {name for entry in index.tensors if entry.offset >= index.weight_bytes for name in entry.names}
    places = [place for place in find_places(module) if place.name in names] if names else []
    return [(place, tensor) for place in places if (tensor := place.tensor) is not None]


def _state_pieces(extents: tuple[Extent, ...], index: ImageIndex) -> Iterator[Piece]:
    for group in pieces_of(extents, index.image_bytes, index.image_bytes):
        for piece in group:
            skipped = max(0, index.weight_bytes - piece.offset)
            if skipped < piece.size_bytes:
                yield Piece(piece.offset + skipped, piece.host_offset + skipped, piece.size_bytes - skipped)


def _wait(guard: Watch, arrival: Arrival, group: int, stream: int) -> None:
    arrival.wait(group, stream)
    # Copies arrive in order, and one stream runs all: what was waited for once need not be waited for again.
    guard.passed = max(guard.passed, group)


def _on_cpu(result: object, wanted: Sequence[str]) -> dict[str, Output]:
    outputs = named_outputs(result)
    _check_wanted(outputs, wanted)
    chosen = {name: outputs[name] for name in wanted} if wanted else outputs
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in chosen.items()}


def _check_wanted(outputs: Mapping[str, Output], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in outputs:
            raise InvalidRequest(f"the model has no output {name!r}; it has {', '.join(outputs)}")


def _span_bytes(tensor: torch.Tensor) -> Bytes:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _drain(device: Device) -> None:
    with suppress(DeviceError):  # of a copy whose memory is being given up; the load has reported it
        device.fence().synchronize()


def _nothing(group: int) -> None:
    raise AssertionError(f"group {group} is touched outside of a run")
