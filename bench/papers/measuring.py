"""One simulated run, and what is to be known of it. Knows no figure and no paper."""

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from dormouse.core.ledger import Histogram
from dormouse.core.messages import Command, Event, ExecutionFinished, Reply, RequestArrived
from dormouse.core.types import ExecutorId, Ns, RequestId
from dormouse.sim.world import World
from dormouse.workload import Arrivals

P98_PPM, P90_PPM = 980_000, 900_000


@dataclass
class Measured:
    """Of one run, after the warm-up."""

    functions: int
    compliant: int
    run: int
    """Functions that have answered anything."""
    requests: int
    in_time: int
    seconds: float
    busy: float
    """Share of the devices' time in which they served a request."""
    latency: dict[str, Histogram]
    """By model; answered requests only."""

    def latency_ms(self, share_ppm: int, model: str = "") -> float:
        """Of one model, or of all."""
        together = Histogram()
        for name, histogram in self.latency.items():
            if model in ("", name):
                together.merge(histogram)
        return together.percentile(share_ppm) / 1e6


@dataclass
class Devices:
    """What each device did, and how long its requests took from their arrival."""

    busy_ns: dict[ExecutorId, Ns] = field(default_factory=lambda: defaultdict(int))
    latency: dict[ExecutorId, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    _arrived: dict[RequestId, Ns] = field(default_factory=dict)

    def watch(self, now: Ns, event: Event, commands: list[Command]) -> None:
        """To be called after every event of a world."""
        del commands
        if isinstance(event, RequestArrived):
            self._arrived[event.request] = now
        elif isinstance(event, ExecutionFinished):
            self.busy_ns[event.executor] += event.device_ns
            self.latency[event.executor].add(now - self._arrived[event.request])

    def imbalance(self) -> float:
        """The coefficient of variation of how long devices were busy."""
        busy = list(self.busy_ns.values())
        return pstdev(busy) / fmean(busy)

    def tails_ms(self) -> list[float]:
        """P98 of each device."""
        return [self.latency[name].percentile(P98_PPM) / 1e6 for name in sorted(self.latency)]


def serve(world: World, arrivals: Arrivals, *, warm: bool = True, history: Arrivals | None = None) -> Measured:
    """Warm up, or go through a history that does not count, then serve and measure."""
    if warm:
        world.warm()
    if history is not None:
        world.run(history)
        world.forget_history()
    began_ns = world.now
    world.run(arrivals)
    functions = list(world.core.state.functions.values())
    latency: dict[str, Histogram] = defaultdict(Histogram)
    for function in functions:
        for histogram in function.ledger.latency.values():
            latency[world.model_of(function.id).name].merge(histogram)
    passed_ns = world.now - began_ns
    return Measured(
        functions=len(functions),
        compliant=sum(f.ledger.compliant(f.spec.slo) for f in functions),
        run=sum(bool(f.ledger.latency) for f in functions),
        requests=sum(f.ledger.requests for f in functions),
        in_time=sum(f.ledger.in_time for f in functions),
        seconds=passed_ns / 1e9,
        busy=sum(f.ledger.device_ns for f in functions) / passed_ns / len(world.machine.devices),
        latency=dict(latency),
    )


def together(parts: list[Measured]) -> Measured:
    """Of several nodes, as one."""
    latency: dict[str, Histogram] = defaultdict(Histogram)
    for part in parts:
        for name, histogram in part.latency.items():
            latency[name].merge(histogram)
    return Measured(
        functions=sum(part.functions for part in parts),
        compliant=sum(part.compliant for part in parts),
        run=sum(part.run for part in parts),
        requests=sum(part.requests for part in parts),
        in_time=sum(part.in_time for part in parts),
        seconds=max(part.seconds for part in parts),
        busy=fmean(part.busy for part in parts),
        latency=dict(latency),
    )


def device_times_ms(world: World, arrivals: Arrivals) -> dict[int, float]:
    """How long each request occupied its device, by number from 1."""
    took: dict[int, float] = {}

    def watch(_: Ns, __: Event, commands: list[Command]) -> None:
        took.update({int(c.request): c.device_ns / 1e6 for c in commands if isinstance(c, Reply)})

    world.watch = watch
    world.run(arrivals)
    return took
