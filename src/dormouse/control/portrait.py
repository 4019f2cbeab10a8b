"""Takes the picture of a node from the core's records, often and cheaply.

Percentiles cost most. They are worked out again for functions that were asked since, and for so many at most in one
picture, in turn: a picture takes no longer however many functions are busy, and the rest are a moment behind.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from dormouse.control.catalog import Deployed
from dormouse.control.costs import Costs
from dormouse.control.inventory import index_entry, tier_of
from dormouse.control.waiting import why_waiting
from dormouse.core.ledger import Ledger
from dormouse.core.state import Executor, Function, ImageState, Residency, State
from dormouse.core.types import Bytes, ExecutorId, FunctionId, Ns, Pin
from dormouse.functions import function_id, name_of
from dormouse.watch.history import BUCKET_NS, History, merged
from dormouse.watch.picture import Device, Host, Load, Picture, Place, Point, Waiting, Watched, totals_of
from dormouse.wire import GraphsHeld

FRESH_NS: Ns = 100_000_000
"""A picture is given to others who ask so soon after."""
COUNTED_AT_ONCE = 64
"""Functions of which percentiles are worked out for one picture."""
MOST_WAITING = 50
_SECOND_NS = 1_000_000_000


class Present(Protocol):
    """What is known of executors besides what the core knows: see ``processes.ExecutorProcesses``."""

    def present(self) -> list[tuple[ExecutorId, str, int]]: ...

    def graphs_of(self, function: FunctionId) -> Mapping[str, GraphsHeld]: ...


class Memory(Protocol):
    @property
    def peak_bytes(self) -> Bytes: ...


@dataclass(slots=True)
class _Counted:
    """What is worked out of a ledger when it has had so many answers."""

    answers: int = 0
    p50_ms: float = 0
    p95_ms: float = 0
    p98_ms: float = 0
    paths: Mapping[str, int] = field(default_factory=dict)


class _Marks(NamedTuple):
    """What a row says that changes: equal marks, equal rows."""

    requests: int
    in_time: int
    cancelled: int
    evictions: int
    loads: int
    queued: int
    service: str
    image: str
    places: tuple[tuple[ExecutorId, str], ...]
    counted: _Counted
    rate: float
    waste_bytes: Bytes
    cost: tuple[int | None, int]
    eager_because: str


class _Seen(NamedTuple):
    """What a row was made from."""

    deployed: Deployed
    marks: _Marks | None


class Portrait:
    """Of one node. It remembers histories, and the last picture."""

    def __init__(self, state: State, executors: Present, memory: Memory) -> None:
        self._state = state
        self._executors = executors
        self._memory = memory
        self._history = History()
        self._counted: dict[FunctionId, _Counted] = {}
        self._known_rows: dict[str, tuple[_Seen, Watched]] = {}
        self._known_histories: tuple[int, Mapping[str, tuple[Point | None, ...]]] = (-1, {})
        self._turn = 0
        self._last: Picture | None = None
        self._last_ns: Ns = 0

    def taking_points(self, deployed: Mapping[str, Deployed]) -> Iterator[None]:
        """To be begun every BUCKET_NS, and gone on with until it ends."""
        functions = self._state.functions
        found = [(name, functions.get(_id(each))) for name, each in deployed.items()]
        return self._history.taking((name, function.ledger) for name, function in found if function is not None)

    def picture(self, deployed: Mapping[str, Deployed], now: Ns, costs: Costs | None = None) -> Picture:
        """``costs``: None, where there is no ledger."""
        if self._last is None or now - self._last_ns > FRESH_NS:
            self._last, self._last_ns = self._taken(deployed, now, costs), now
        return self._last

    def _taken(self, deployed: Mapping[str, Deployed], now: Ns, costs: Costs | None) -> Picture:
        state, epoch_ns = self._state, time.time_ns() - now
        self._count(deployed)
        waste = _waste(state)
        functions = self._rows(deployed, waste, costs)
        names = {_id(each): name for name, each in deployed.items()}
        return Picture(
            at_ms=_ms(now + epoch_ns),
            bucket_ms=_ms(BUCKET_NS),
            bucket=self._history.bucket,
            functions=functions,
            histories=self._histories(functions),
            totals=totals_of(functions),
            devices=tuple(self._device(names, *present) for present in self._executors.present()),
            loads=_loads(state, names, epoch_ns),
            queue=_queue(state, names, epoch_ns),
            host=self._host(),
            currency="" if costs is None else costs.currency,
        )

    # ------------------------------------------------------------------ functions

    def _count(self, deployed: Mapping[str, Deployed]) -> None:
        """Bring up to date what has changed, beginning after the one that was last in its turn."""
        names = [_id(each) for each in deployed.values()]
        self._counted = {name: self._counted.get(name) or _Counted() for name in names}
        left = COUNTED_AT_ONCE
        for step in range(len(names)):
            at = (self._turn + step) % len(names)
            function = self._state.functions.get(names[at])
            if function is None or _answers(function.ledger) == self._counted[names[at]].answers:
                continue
            if not left:
                self._turn = at
                return
            self._counted[names[at]] = _counted(function.ledger)
            left -= 1

    def _histories(self, functions: Iterable[str]) -> Mapping[str, tuple[Point | None, ...]]:
        """The same ones until there are new points, or other functions."""
        bucket, known = self._known_histories
        if bucket != self._history.bucket or known.keys() != functions:
            self._known_histories = (self._history.bucket, {name: self._history.of(name) for name in functions})
        return self._known_histories[1]

    def _rows(
        self, deployed: Mapping[str, Deployed], waste: Mapping[FunctionId, Bytes], costs: Costs | None
    ) -> dict[str, Watched]:
        """A row is made anew only where something in it has changed."""
        known, self._known_rows = self._known_rows, {}
        for name, each in deployed.items():
            function = self._state.functions.get(_id(each))
            marks = None if function is None else self._marks(function, waste.get(function.id, 0), costs)
            seen = _Seen(each, marks)
            last = known.get(name)
            row = last[1] if last is not None and last[0] == seen else self._row(seen, function)
            self._known_rows[name] = (seen, row)
        return {name: row for name, (_, row) in self._known_rows.items()}

    def _marks(self, function: Function, waste_bytes: Bytes, costs: Costs | None) -> "_Marks":
        ledger = function.ledger
        return _Marks(
            requests=ledger.requests,
            in_time=ledger.in_time,
            cancelled=ledger.cancelled,
            evictions=ledger.evictions,
            loads=ledger.loads.total(),
            queued=len(function.queue),
            service=function.service,
            image=function.image,
            places=tuple([(name, residency.state) for name, residency in function.residencies.items()]),
            counted=self._counted[function.id],
            rate=self._history.rate_per_s(name_of(function.id)),
            waste_bytes=waste_bytes,
            cost=(None, 0) if costs is None else costs.of(function.id),
            eager_because=next((each.eager_because for each in self._executors.graphs_of(function.id).values()), ""),
        )

    def _row(self, seen: "_Seen", function: Function | None) -> Watched:
        deployed, marks = seen.deployed, seen.marks
        manifest = deployed.manifest
        row = Watched(
            name=deployed.name,
            version=str(deployed.revision),
            tenant=manifest.tenant,
            public=manifest.public,
            state=index_entry(deployed, function).state,
            tier=tier_of(function),
            pin=str(manifest.pin),
            image_bytes=deployed.image_bytes,
            state_bytes=deployed.state_bytes,
            deadline_ms=manifest.slo.deadline_ms,
            percentile=manifest.slo.percentile,
        )
        return row if function is None or marks is None else msgspec.structs.replace(row, **_served(function, marks))

    # ------------------------------------------------------------------ the node

    def _device(self, names: Mapping[FunctionId, str], name: ExecutorId, description: str, restarts: int) -> Device:
        executor = self._state.executors.get(name)
        if executor is None:
            return Device(executor=name, device=name, description=description, here=False, restarts=restarts)
        functions, running = self._state.functions, executor.executing
        in_order = sorted(executor.recency.items(), key=lambda item: item[1].load_started_ns)
        return Device(
            executor=name,
            device=executor.device,
            description=description,
            here=True,
            capacity_bytes=executor.capacity_bytes,
            chunk_bytes=executor.chunk_bytes,
            free_bytes=executor.free_bytes,
            waste_bytes=sum(r.size_bytes - functions[f].spec.image_bytes for f, r in in_order),
            link_bytes_per_s=self._state.settings.topology.host_rate(executor.device),
            lent_to=executor.lent_to,
            executing=None if running is None else called(names, running.function),
            together=0 if running is None else len(running.requests),
            restarts=restarts,
            places=tuple(_place(names, functions[f], r) for f, r in in_order),
        )

    def _host(self) -> Host:
        state = self._state
        return Host(
            capacity_bytes=state.settings.host_capacity_bytes,
            used_bytes=state.host_used_bytes,
            peak_bytes=self._memory.peak_bytes,
            images=sum(function.image is ImageState.HOST for function in state.functions.values()),
            images_in="dram" if state.settings.host_is_last else "disk",
        )


def _served(function: Function, marks: _Marks) -> dict[str, Any]:
    """The fields of a row that are of the core's records."""
    ledger, counted = function.ledger, marks.counted
    return {
        "on": tuple(function.residencies),
        "queued": marks.queued,
        "requests": marks.requests,
        "in_time": marks.in_time,
        "cancelled": marks.cancelled,
        "compliant": ledger.compliant(function.spec.slo),
        "requests_per_s": round(marks.rate, 2),
        "p50_ms": counted.p50_ms,
        "p95_ms": counted.p95_ms,
        "p98_ms": counted.p98_ms,
        "paths": counted.paths,
        "loads": {str(path): count for path, count in ledger.loads.items()},
        "refusals": {str(reason): count for reason, count in ledger.refusals.items()},
        "evictions": marks.evictions,
        "waste_bytes": marks.waste_bytes,
        "eager_because": marks.eager_because,
        "cost_nanos": marks.cost[0],
        "cost_in_time": marks.cost[1],
    }


def called(names: Mapping[FunctionId, str], function: FunctionId) -> str:
    """A function's name; with its revision if another one has the name."""
    return names.get(function, str(function))


def _id(deployed: Deployed) -> FunctionId:
    return function_id(deployed.name, deployed.revision)


def _ms(ns: Ns) -> float:
    return round(ns / 1e6, 1)


def _answers(ledger: Ledger) -> int:
    return sum(histogram.count for histogram in ledger.latency.values())


def _counted(ledger: Ledger) -> _Counted:
    together = merged(ledger)
    p50, p95, p98 = (round(together.percentile(ppm) / 1e6, 2) for ppm in (500_000, 950_000, 980_000))
    return _Counted(together.count, p50, p95, p98, {str(path): h.count for path, h in ledger.latency.items()})


def _waste(state: State) -> dict[FunctionId, Bytes]:
    """In last chunks unused, over all devices."""
    waste: dict[FunctionId, Bytes] = {}
    for executor in state.executors.values():
        for name, residency in executor.recency.items():
            unused = residency.size_bytes - state.functions[name].spec.image_bytes
            waste[name] = waste.get(name, 0) + unused
    return waste


def _place(names: Mapping[FunctionId, str], function: Function, residency: Residency) -> Place:
    pinned = function.spec.pin is Pin.DEVICE
    return Place(called(names, function.id), residency.size_bytes, str(residency.state), pinned)


def _loads(state: State, names: Mapping[FunctionId, str], epoch_ns: Ns) -> tuple[Load, ...]:
    """Onto devices, and then into host memory."""
    copies = [
        _load(state, executor, state.functions[executor.copying], names, epoch_ns)
        for executor in state.executors.values()
        if executor.copying is not None
    ]
    reading = (function for function in state.functions.values() if function.image is ImageState.READING)
    return (*copies, *(_read(state, function, names, epoch_ns) for function in reading))


def _load(state: State, executor: Executor, function: Function, names: Mapping[FunctionId, str], epoch_ns: Ns) -> Load:
    residency, size_bytes = function.residencies[executor.id], function.spec.image_bytes
    return Load(
        function=called(names, function.id),
        to=executor.id,
        path=str(residency.path),
        bytes=size_bytes,
        started_ms=_ms(residency.load_started_ns + epoch_ns),
        expected_ms=_ms(size_bytes * _SECOND_NS // max(1, _rate(state, executor, residency))),
        source=residency.source,
        helpers=residency.helpers,
    )


def _rate(state: State, executor: Executor, residency: Residency) -> int:
    """Bytes a second over all ways that a load takes."""
    topology, source = state.settings.topology, state.executors.get(residency.source or ExecutorId(""))
    if source is not None:
        return topology.pair(source.device, executor.device).peer_bytes_per_s
    helpers = [state.executors[helper].device for helper in residency.helpers if helper in state.executors]
    detours = sum(topology.pair(device, executor.device).detour_bytes_per_s for device in helpers)
    return topology.host_rate(executor.device) + detours


def _read(state: State, function: Function, names: Mapping[FunctionId, str], epoch_ns: Ns) -> Load:
    name = called(names, function.id)
    started_ms = _ms(function.read_started_ns + epoch_ns)
    expected_ms = _ms(state.disk.read_ns(function.spec.image_bytes))
    return Load(name, "host", "disk", function.spec.image_bytes, started_ms, expected_ms)


def _queue(state: State, names: Mapping[FunctionId, str], epoch_ns: Ns) -> tuple[Waiting, ...]:
    heads = [(function.head, function) for function in state.functions.values() if function.queue]
    oldest = sorted((head.arrived_ns, function.id) for head, function in heads if head is not None)
    return tuple(
        Waiting(
            called(names, name),
            len(state.functions[name].queue),
            _ms(arrived_ns + epoch_ns),
            why_waiting(state, state.functions[name]),
        )
        for arrived_ns, name in oldest[:MOST_WAITING]
    )
