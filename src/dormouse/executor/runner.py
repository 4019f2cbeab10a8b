"""One function on one device: built once, loaded and evicted many times, run while it is still arriving.

Theory of operation. The function's tensors are views into its region and never move; only the memory behind them
comes and goes. The image is cut into groups of equal size, copied in order of first use, with a fence behind each:

    image     | group 0 | group 1 | group 2 | ...        cut also where host pages are not neighbours
    region    | chunk 0      | chunk 1      | ...        mapped from the start, ahead of the copies, in growing steps
    fences              f0        f1        f2

While an image arrives, a Watch stands between the module's code and its tensors: the first touch of a tensor whose
group has not been waited for waits for its fence. A run that starts when all has arrived goes without the watch.

Where the device has graphs, a shape of inputs that has been run is captured when there is time, with the watch up: at
the same first touches, the graph waits for the groups' events. These are the function's own and are recorded anew at
every load. A graph may be launched as soon as all groups are queued, since it then waits for this load and not for
the one before.

Threads: ``load``, ``evict`` and ``discard`` belong to the copy lane, ``run`` and ``capture`` to the compute lane.
Whoever calls sees to it that these and an ``evict`` or ``discard`` never overlap; a run and a ``load`` do, on purpose.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from dormouse.core.types import FOREVER_NS, Bytes, Ns
from dormouse.device.base import Device, Region
from dormouse.errors import DeviceError, DormouseError, InvalidRequest
from dormouse.executor.approach import Approach, Link
from dormouse.executor.arrival import Arrival, ImageNotArrived
from dormouse.executor.built import Built
from dormouse.executor.compute import Compute, moved
from dormouse.executor.copying import Piece, pieces_of
from dormouse.executor.graphs import Graph, Graphs, Interrupted, NotCaptured
from dormouse.executor.routes import FromHost, Route, held_by
from dormouse.executor.shapes import Sample, shape_of
from dormouse.executor.skeletons import Skeleton, Skeletons
from dormouse.model.access import Watch
from dormouse.model.loaded import Inputs, one_line
from dormouse.model.outputs import Output, named_outputs
from dormouse.store.index import read_index
from dormouse.wire import Extent

HEAD_START_GROUPS = 64
"""Copies that are queued before the module may run. Queueing one takes microseconds, but two threads that want the
interpreter by turns lose tens of microseconds at every turn; so what is soon queued is queued undisturbed."""

POISON = 0xFF
"""As floating-point numbers, NaN."""


class Runner:
    """``host_address`` is where the arena is mapped; ``skeletons`` are those that it may share with other functions, of
    which then one runs at a time. Nothing is read or reserved before the first load."""

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
        skeletons: Skeletons | None = None,
    ) -> None:
        self._device = device
        self._compute = compute
        self._directory = directory
        self._host_address = host_address
        self._group_bytes = group_bytes
        self._allow_code = allow_code
        self._poison = poison
        self._skeletons = skeletons or Skeletons(group_bytes)
        self._built: Built | None = None
        self._current: Arrival | None = None
        self._extents: tuple[Extent, ...] = ()
        self._groups: list[list[Piece]] = []
        """Of the image as it lies in ``_extents``."""
        self._meanwhile_ns: Ns = 0
        """What was done beside the last load took so long."""

    def load(
        self,
        extents: tuple[Extent, ...],
        arrival: Arrival,
        meanwhile: Callable[[], None] | None = None,
        approach: Approach | None = None,
        route: Route | None = None,
    ) -> Ns:
        """Bring the image in; the time spent on building: 0 after the first load, and little where a module of its
        architecture is there. ``meanwhile`` is called when all copies are queued, to do what can be done beside them;
        ``approach`` follows them. ``extents`` are its place in host memory, where it comes from unless ``route`` says
        otherwise.

        Raises DeviceError or RefusedSource; then call ``discard``.
        """
        started = time.monotonic_ns()
        fresh = self._built is None
        built = self._built or self._build()
        build_ns = time.monotonic_ns() - started if fresh else 0
        if extents != self._extents:
            self._extents = extents
            self._groups = list(pieces_of(extents, built.image_bytes, self._group_bytes)) if extents else []
        self._current = arrival
        route = route or FromHost(self._host_address, extents)
        copies = self._copies(built, route)
        approach = approach or Approach(FOREVER_NS, Link(), lambda: None)
        approach.begin(_ends(built.image_bytes, self._group_bytes))
        self._copy_in(built, arrival, approach, copies, route)
        if meanwhile is not None and not route.is_brief:
            approach.hurry(self._meanwhile_ns)
            began = time.monotonic_ns()
            meanwhile()
            self._meanwhile_ns = time.monotonic_ns() - began
        approach.follow(arrival)
        arrival.settle()
        approach.end()
        if meanwhile is not None and route.is_brief:
            meanwhile()
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
        graph = self.graph_of(inputs)
        if graph is not None and (replayed := self._replayed(built, graph, arrival, inputs, wanted)) is not None:
            return replayed
        with self._compute.lane():
            worn = self._skeletons.worn_by(built)
            worn.stand_guard(arrival)
            worn.guard.touched = lambda group: _wait(worn.guard, arrival, group, self._compute.stream)
            worn.guard.begin()
            result = worn.module(**{name: moved(value, self._compute.device) for name, value in inputs.items()})
            answer = self._emitted(result, wanted, emit) if isinstance(result, Iterator) else _on_cpu(result, wanted)
            self._keep_state(built, worn, arrival)
        if self._compute.graphs is not None:
            if isinstance(result, Iterator):
                built.shapes.refuse("it streams its answer")
            built.shapes.ran(inputs, answer)
        return answer

    # -------------------------------------------------------------- graphs

    @property
    def capture_wanted(self) -> bool:
        """Whether a shape that was run has no graph yet and may have one, and the image is here to make it with."""
        return self._built is not None and self._current is not None and self._built.shapes.wanted is not None

    @property
    def capture_overdue(self) -> bool:
        """Whether it should have one by now, whoever waits."""
        return self._built is not None and self._built.shapes.overdue

    @property
    def graphs(self) -> tuple[int, str]:
        """How many shapes are replayed now, and why no others will be; nothing if they may."""
        graphs, built = self._compute.graphs, self._built
        return (0, "") if graphs is None or built is None else (graphs.count(built), built.shapes.refusal)

    def graph_of(self, inputs: Inputs) -> Graph | None:
        """The graph that a run with such inputs would replay."""
        graphs = self._compute.graphs
        return None if graphs is None or self._built is None else graphs.find(self._built, shape_of(inputs))

    def capture(self, interrupted: Callable[[], bool]) -> None:
        """Make the next graph that is wanted, if the image is on the device, and try it. ``interrupted`` is asked now
        and then; once it says yes, all is as before. What goes wrong is a reason to run eagerly from now on."""
        built, arrival, graphs = self._built, self._current, self._compute.graphs
        sample = built.shapes.wanted if built is not None else None
        if built is None or arrival is None or graphs is None or sample is None:
            return
        try:
            arrival.wait_whole()
            with self._compute.lane():
                graph = self._recorded(built, graphs, sample, interrupted)
            graph.stage(sample.inputs)
            replayed = graph.replay(tuple(sample.answer))
            if graph.last_group >= 0:
                arrival.confirm(graph.last_group)
            _check_same(replayed, sample.answer, self._skeletons.worn_by(built).tolerance)
            built.shapes.done(sample)
        except Interrupted:
            return
        except ImageNotArrived:
            graphs.drop(built)  # one may have been recorded, but nobody knows whether it is right
            built.shapes.done(sample)
        except (NotCaptured, DeviceError) as fault:
            graphs.drop(built)
            built.shapes.refuse(fault.message if isinstance(fault, DormouseError) else str(fault))
        except Exception as fault:
            graphs.drop(built)
            built.shapes.refuse(one_line(fault))
            self._compute.check()

    def _recorded(self, built: Built, graphs: Graphs, sample: Sample, interrupted: Callable[[], bool]) -> Graph:
        worn = self._skeletons.worn_by(built)
        guard = worn.guard
        last = -1

        def touched(group: int) -> None:
            nonlocal last
            if interrupted():
                raise Interrupted
            graphs.recorder.hold_back(built.events[group])
            last = guard.passed = group

        def forward(tensors: dict[str, torch.Tensor]) -> object:
            guard.begin()
            return worn.module(**tensors)

        worn.arm()
        guard.passed = -1
        guard.touched = touched
        try:
            graph = graphs.record(built, sample.shape, forward, sample.inputs)
        finally:
            guard.touched = _nothing
        graph.last_group = last
        return graph

    def _replayed(
        self, built: Built, graph: Graph, arrival: Arrival, inputs: Inputs, wanted: Sequence[str]
    ) -> dict[str, Output] | None:
        """The answer; None if the driver does not take the graph, which is then no more."""
        _check_wanted(graph.names, wanted)
        graph.stage(inputs)
        arriving = not arrival.complete
        if arriving:
            arrival.wait_whole()
        try:
            answer = graph.replay(wanted)
        except DeviceError as fault:
            assert self._compute.graphs is not None
            self._compute.graphs.drop(built)
            built.shapes.refuse(f"its graph could not be launched: {fault.message}")
            return None
        if arriving and graph.last_group >= 0:
            arrival.confirm(graph.last_group)
        return dict(answer)

    # -------------------------------------------------------------- going

    def evict(self) -> str:
        """Write runtime state home and give the chunks back; what was lost on the way, which is nothing but after a
        broken copy. The device's ``sweep`` completes it. Raises DeviceError if the chunks cannot be given back, after
        which the device is of no use."""
        lost = ""
        if self._built is not None and self._current is not None and self._built.state_bytes:
            try:
                self._copy_state_out(self._built)
            except DeviceError as fault:
                lost = f"its runtime state could not be copied home: {fault.message}"
        self._leave(self._device.vacate)
        return lost

    def discard(self) -> None:
        """Give the chunks back as they are, after the lane's last copy; all of a load that failed goes."""
        self._leave(self._device.unmap)

    def _leave(self, unmap: Callable[[Region], None]) -> None:
        arrival, self._current = self._current, None
        if self._built is not None:
            if arrival is None or not arrival.complete:
                _drain(self._device)
            unmap(self._built.region)

    def forget(self) -> None:
        """Drop its graphs, the reserved range, and the module if nobody shares it."""
        self.discard()
        if self._built is not None:
            built, self._built = self._built, None
            self._skeletons.leave(built)
            if self._compute.graphs is not None:
                self._compute.graphs.drop(built)
                self._compute.graphs.recorder.drop_events(built.events)
            self._device.release(built.region)

    def _build(self) -> Built:
        index = read_index(self._directory)
        region = self._device.reserve(index.image_bytes)
        try:
            self._device.map(region, min(index.image_bytes, self._device.chunk_bytes))
            built = Built(index, region, self._compute.memory(region), self._group_bytes)
            self._skeletons.join(built, index, self._directory, self._allow_code)
            if self._compute.graphs is not None:
                built.events = self._compute.graphs.recorder.events(built.groups)
            self._built = built
        except BaseException:
            self._device.unmap(region)
            self._device.release(region)
            raise
        return self._built

    def _copies(self, built: Built, route: Route) -> list[list[Piece]]:
        """The pieces of each copy; a copy may be of several groups."""
        if route.groups_per_copy == 1 and route.extents == self._extents:
            return self._groups
        return list(pieces_of(route.extents, built.image_bytes, self._group_bytes, route.groups_per_copy))

    @property
    def held(self) -> tuple[Extent, ...]:
        """Where the image lies in the device's pool."""
        return () if self._built is None else held_by(self._built.region, self._device.chunk_bytes)

    def _copy_in(
        self, built: Built, arrival: Arrival, approach: Approach, copies: list[list[Piece]], route: Route
    ) -> None:
        region, total, chunk = built.region, built.image_bytes, self._device.chunk_bytes
        if self._poison:
            self._device.map(region, total)
            self._device.fill(region, POISON)
        elif self._device.maps_ahead and not route.is_brief:
            self._device.map(region, total)
        mapped, step = len(region.chunks) * chunk, chunk
        for number, copy in enumerate(copies):
            end = copy[-1].offset + copy[-1].size_bytes
            if end > mapped:
                # Growing steps: the first copies start after one chunk, and few calls are made for a large image.
                mapped = min(max(end, mapped + step), region.reserved_bytes)
                step = region.reserved_bytes if route.is_brief else 2 * step
                self._device.map(region, mapped)
            for piece in copy:
                route.queue(self._device, region, number, piece)
            groups = built.events[arrival.announced : -(-end // self._group_bytes)]
            arrival.announce(self._device.fence(*filter(None, groups)), len(groups))
            if arrival.announced - len(groups) < HEAD_START_GROUPS <= arrival.announced:
                arrival.begin()
            approach.hurry()
        arrival.close()
        arrival.begin()

    def _copy_state_out(self, built: Built) -> None:
        for piece in _state_pieces(self._extents, built):
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

    def _keep_state(self, built: Built, worn: Skeleton, arrival: Arrival) -> None:
        """Runtime state that a forward has assigned anew goes into the image's memory, where eviction finds it."""
        if not worn.state:
            return
        if not arrival.complete:
            arrival.wait(built.groups - 1, self._compute.stream)
        for place, view in worn.state:
            now = place.tensor
            if now is not None and now is not view and now.shape == view.shape and now.dtype == view.dtype:
                view.copy_(now)
                place.put(view)


def _state_pieces(extents: tuple[Extent, ...], built: Built) -> Iterator[Piece]:
    for group in pieces_of(extents, built.image_bytes, built.image_bytes):
        for piece in group:
            skipped = max(0, built.weight_bytes - piece.offset)
            if skipped < piece.size_bytes:
                yield Piece(piece.offset + skipped, piece.host_offset + skipped, piece.size_bytes - skipped)


def _wait(guard: Watch, arrival: Arrival, group: int, stream: int) -> None:
    arrival.wait(group, stream)
    # Copies arrive in order, and one stream runs all: what was waited for once need not be waited for again.
    guard.passed = arrival.waited = max(guard.passed, group)


def _ends(image_bytes: Bytes, group_bytes: Bytes) -> list[Bytes]:
    """Where each group ends in the image."""
    return [*range(group_bytes, image_bytes, group_bytes), image_bytes]


def _on_cpu(result: object, wanted: Sequence[str]) -> dict[str, Output]:
    outputs = named_outputs(result)
    _check_wanted(outputs, wanted)
    chosen = {name: outputs[name] for name in wanted} if wanted else outputs
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in chosen.items()}


def _check_same(replayed: Mapping[str, torch.Tensor], answer: Mapping[str, torch.Tensor], tolerance: float) -> None:
    """Raises NotCaptured if a replay answers otherwise than the module did, as it does if code that is run only once
    matters. Modules may choose other kernels while they are recorded, so numbers need not be equal bit by bit."""
    for name, expected in answer.items():
        now = replayed[name]
        if now.shape != expected.shape or now.dtype != expected.dtype or not _alike(now, expected, tolerance):
            raise NotCaptured(f"a replay gives another {name!r} than the module itself")


def _alike(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if not other.dtype.is_floating_point or not other.numel():
        return torch.equal(one, other)
    if not torch.equal(one.isfinite(), other.isfinite()):
        return False
    now, expected = (value.double().nan_to_num(0, 0, 0) for value in (one, other))
    error, size = float((now - expected).norm()), float(expected.norm())
    return error <= tolerance * size


def _check_wanted(outputs: Collection[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in outputs:
            raise InvalidRequest(f"the model has no output {name!r}; it has {', '.join(outputs)}")


def _drain(device: Device) -> None:
    with suppress(DeviceError):  # of a copy whose memory is being given up; the load has reported it
        device.fence().synchronize()


def _nothing(group: int) -> None:
    raise AssertionError(f"group {group} is touched outside of a run")
