"""What a journal says of the machine that it was recorded on: the numbers that a simulated one is made of."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from dormouse.core.messages import (
    Event,
    Evict,
    Execute,
    ExecutionFinished,
    ExecutorJoined,
    FunctionDeployed,
    Load,
    LoadFinished,
    RequestArrived,
)
from dormouse.core.types import Bytes, CommandId, FunctionId, FunctionSpec, Ns
from dormouse.journal import Entry
from dormouse.sim.hardware import Device, Machine, Model


@dataclass
class Profile:
    """Filled entry by entry with what happens while functions are asked one at a time."""

    specs: dict[FunctionId, FunctionSpec] = field(default_factory=dict)
    joined: ExecutorJoined | None = None
    resident: dict[FunctionId, list[Ns]] = field(default_factory=lambda: defaultdict(list))
    """Of one execution, on the device."""
    around: list[Ns] = field(default_factory=list)
    """What such a request takes beside that: two messages and what handles them."""
    tails: dict[FunctionId, list[Ns]] = field(default_factory=lambda: defaultdict(list))
    """From a load's end to the end of the run that has waited for it."""
    builds: dict[FunctionId, Ns] = field(default_factory=dict)
    loads: list[tuple[Bytes, Ns]] = field(default_factory=list)
    """Bytes, and from the command to the news of its end; first loads left out."""
    _arrived: dict[int, Ns] = field(default_factory=dict)
    _sent: dict[CommandId, Ns] = field(default_factory=dict)
    _loaded: dict[FunctionId, Ns] = field(default_factory=dict)

    def take(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._hear(entry.now, entry.event)
            for command in entry.commands:
                if isinstance(command, Load | Execute | Evict):
                    self._sent[command.command] = entry.now

    def _hear(self, now: Ns, event: Event) -> None:
        match event:
            case FunctionDeployed():
                self.specs[event.spec.id] = event.spec
            case ExecutorJoined():
                self.joined = event
            case RequestArrived():
                self._arrived[event.request] = now
                self._loaded.pop(event.function, None)
                self._function = event.function
            case LoadFinished():
                self._load(now, event)
            case ExecutionFinished():
                self._run(now, event)
            case _:
                pass

    def _load(self, now: Ns, event: LoadFinished) -> None:
        self._loaded[event.function] = now
        if event.function in self.builds:
            self.loads.append((self.specs[event.function].image_bytes, now - self._sent[event.command]))
        else:
            self.builds[event.function] = event.build_ns

    def _run(self, now: Ns, event: ExecutionFinished) -> None:
        function = self._function
        if function in self._loaded:
            self.tails[function].append(max(0, now - self._loaded[function]))
        else:
            self.resident[function].append(event.device_ns)
            self.around.append(now - self._arrived[event.request] - event.device_ns)

    # ------------------------------------------------------------------ what follows from it

    @property
    def hop_ns(self) -> Ns:
        return round(median(self.around)) // 2

    def link(self) -> tuple[int, Ns]:
        """Bytes a second, and what a load takes beside its bytes and messages: a line through the medians by size."""
        by_size = defaultdict(list)
        for size_bytes, took_ns in self.loads:
            by_size[size_bytes].append(took_ns)
        points = [(size_bytes, median(took)) for size_bytes, took in by_size.items()]
        mean_x, mean_y = sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
        overhead_ns = max(0, round(mean_y - slope * mean_x - 2 * self.hop_ns))
        return round(1e9 / slope), overhead_ns

    def machine(self, host_bytes: Bytes) -> Machine:
        assert self.joined is not None
        bytes_per_s, overhead_ns = self.link()
        device = Device(
            str(self.joined.device),
            self.joined.capacity_bytes,
            bytes_per_s,
            chunk_bytes=self.joined.chunk_bytes,
            load_overhead_ns=overhead_ns,
            evict_ns=0,  # it is in the loads' overhead: every load of the calibration but the first ones evicts
        )
        return Machine((device,), host_bytes=host_bytes, hop_ns=self.hop_ns)

    def models(self) -> list[tuple[FunctionId, Model]]:
        return [
            (
                name,
                Model(
                    str(name),
                    spec.image_bytes,
                    round(median(self.resident[name])),
                    round(median(self.tails[name])),
                    spec.slo,
                    self.builds[name],
                ),
            )
            for name, spec in self.specs.items()
        ]
