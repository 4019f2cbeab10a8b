"""A small node under faults, by seed: whatever happens, the invariants hold and every request ends once.

    python -m dormouse.sim.campaign [--seeds 2000] [--first 0] [--jobs CORES] [--keep DIRECTORY]

A failure prints its seed and keeps its journal; the same seed gives the same history again.
"""

import argparse
import contextlib
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pool
from pathlib import Path

from rich.progress import track

from dormouse import workload
from dormouse.core.messages import (
    Acknowledge,
    Command,
    Event,
    Evict,
    LoadRequested,
    Refuse,
    RemovalRequested,
    Reply,
    RequestArrived,
    RequestCancelled,
    UnloadRequested,
)
from dormouse.core.tiering import HOST_TIER
from dormouse.core.types import FunctionId, Limits, Ns, OperationId, Pin, RequestId, Settings, Slo
from dormouse.core.types import Path as RequestPath
from dormouse.journal import JournalWriter
from dormouse.sim import invariants
from dormouse.sim.faults import Faults, inject
from dormouse.sim.hardware import MIB, MS_NS, Device, Machine, Model
from dormouse.sim.world import World

SECOND_NS: Ns = 1_000_000_000
DURATION_NS: Ns = 20 * SECOND_NS
SEEDS = 2000


@dataclass
class Trial:
    """One seed's history and what it owes: an end for every request and for every operation."""

    journal: JournalWriter | None = None
    open_requests: set[RequestId] = field(default_factory=set)
    open_operations: set[OperationId] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)
    world: World | None = None

    def watch(self, now: Ns, event: Event, commands: list[Command]) -> None:
        if self.journal is not None:
            self.journal.append(now, event, commands)
        self.seen[type(event).__name__] += 1
        match event:
            case RequestArrived():
                self.open_requests.add(event.request)
            case RequestCancelled():
                self.open_requests.discard(event.request)
            case LoadRequested() | UnloadRequested() | RemovalRequested():
                self.open_operations.add(event.operation)
            case _:
                pass
        for command in commands:
            match command:
                case Reply() | Refuse() if not isinstance(command, Reply) or command.final:
                    assert command.request in self.open_requests, f"request {command.request} ends twice"
                    self.open_requests.remove(command.request)
                case Acknowledge() if command.operation in self.open_operations:
                    self.open_operations.remove(command.operation)
                case _:
                    pass
        if self.world is not None:
            state = self.world.core.state
            invariants.check(state)
            invariants.check_victims(state, {c.function for c in commands if isinstance(c, Evict)})


def node(draw: random.Random) -> tuple[Machine, Settings, list[tuple[FunctionId, Model]]]:
    """A node with too little of everything."""
    devices = tuple(
        Device(f"gpu:{n}", draw.choice((64, 128)) * MIB, 2_000_000_000, chunk_bytes=draw.choice((2, 8)) * MIB)
        for n in range(draw.choice((1, 2, 3)))
    )
    functions = []
    for number in range(draw.randint(3, 10)):
        model = Model(
            name=f"m{number}",
            image_bytes=draw.randint(1, 60) * MIB,
            resident_ns=draw.randint(1, 40) * MS_NS,
            tail_ns=draw.randint(0, 10) * MS_NS,
            slo=Slo(draw.choice((20, 80, 400)) * MS_NS, 980_000),
            build_ns=draw.choice((0, 0, 300)) * MS_NS,
            pin=draw.choice((Pin.NONE, Pin.NONE, Pin.NONE, Pin.NONE, Pin.HOST, Pin.DEVICE)),
        )
        functions.append((FunctionId(f"f{number}/1"), model))
    host_bytes = draw.choice((96, 200, 1000)) * MIB
    names = [device.name for device in devices]
    peers = {f"{a}>{b}": 8_000_000_000 for a in names for b in names if a != b} if draw.random() < 0.7 else {}
    machine = Machine(devices, peers=peers, detours=draw.random() < 0.5, host_bytes=host_bytes)
    binding = draw.choice(("lanes", "lanes", "late"))
    tier = draw.choice(sorted(HOST_TIER))
    shed = draw.random() < 0.3
    settings = Settings(host_bytes, queue_length=200, binding=binding, host_tier=tier, shed_late=shed)
    return machine, settings, functions


def run(seed: int, journal: Path | None = None) -> Counter[str]:
    """The whole history of one seed; what was seen in it. Raises AssertionError."""
    draw = random.Random(seed)
    machine, settings, functions = node(draw)
    with contextlib.ExitStack() as kept:
        writer = None if journal is None else kept.enter_context(contextlib.closing(JournalWriter(journal, settings)))
        trial = Trial(writer)
        limits = Limits(queue_length=32, timeout_ns=draw.choice((1, 5, 60)) * SECOND_NS)
        world = trial.world = World(machine, settings, functions, limits=limits, watch=trial.watch)
        inject(world, Faults(*(draw.choice((0.0, 6.0, 30.0)) for _ in Faults.__struct_fields__)), DURATION_NS, seed)
        _interfere(world, draw)
        rate = draw.choice((2, 10, 40)) / len(functions)
        world.run(workload.gamma([rate] * len(functions), draw.choice((1.0, 4.0)), DURATION_NS, seed))
        world.until(world.now + 400 * SECOND_NS)  # beyond every window and timeout
        assert not trial.open_requests, f"requests without an end: {sorted(trial.open_requests)[:5]}"
        assert not trial.open_operations, f"operations without an end: {sorted(trial.open_operations)[:5]}"
        assert not world.core.state.requests
        trial.seen.update(_paths(world))
    return trial.seen


def _interfere(world: World, draw: random.Random) -> None:
    """People load, unload and remove functions, and clients go away."""
    operations = iter(range(10_000, 20_000))

    def operate() -> None:
        name = draw.choice(world.functions)
        kinds: list[Callable[[OperationId, FunctionId], Event]] = [LoadRequested, UnloadRequested, RemovalRequested]
        make = draw.choices(kinds, (4, 3, 1))[0]
        world.tell(make(OperationId(next(operations)), name))

    def leave() -> None:
        if world.core.state.requests:
            world.tell(RequestCancelled(draw.choice(sorted(world.core.state.requests))))

    for act, times in ((operate, draw.randint(0, 12)), (leave, draw.randint(0, 20))):
        for _ in range(times):
            world.at(world.now + draw.randrange(DURATION_NS), act)


def _paths(world: World) -> Counter[str]:
    found: Counter[str] = Counter()
    for function in world.core.state.functions.values():
        for path in RequestPath:
            if path in function.ledger.latency:
                found[f"path {path}"] += function.ledger.latency[path].count
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--seeds", type=int, default=SEEDS)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    options.add_argument("--keep", type=Path, default=Path("campaign"), help="where journals of failures are kept")
    chosen = options.parse_args()
    seen: Counter[str] = Counter()
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    with Pool(chosen.jobs) as pool:
        for seed, outcome in track(pool.imap(_tried, seeds, chunksize=10), "campaign", total=len(seeds)):
            if outcome is None:
                return _failed(seed, chosen.keep)
            seen.update(outcome)
    for what, times in sorted(seen.items()):
        print(f"{times:>10}  {what}")
    print(f"{chosen.seeds} seeds, no invariant broken, every request ended once")
    return 0


def _tried(seed: int) -> tuple[int, Counter[str] | None]:
    """None: it failed."""
    try:
        return seed, run(seed)
    except Exception:
        return seed, None


def _failed(seed: int, directory: Path) -> int:
    """Run it again for its journal."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = directory / f"seed-{seed}.journal"
    try:
        run(seed, kept)
    except Exception:
        traceback.print_exc()
    print(f"seed {seed} failed; its history is in {kept}, and `dormouse replay` reads it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
