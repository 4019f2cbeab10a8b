"""How many events a second the core handles, and how that grows with the number of functions.

    python bench/core_events/run.py [--json FILE] [--seconds 3]

A closed world around the real core: every function's image is parked; requests arrive for functions drawn with a
skewed popularity; loads, evictions and executions end in the order they were commanded. No I/O, one core.
"""

import argparse
import itertools
import json
import platform
import random
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path

from dormouse.core.messages import (
    Evict,
    EvictionFinished,
    Execute,
    ExecutionFinished,
    ExecutorJoined,
    FunctionDeployed,
    ImageRead,
    Load,
    LoadFinished,
    RequestArrived,
)
from dormouse.core.scheduler import Scheduler
from dormouse.core.types import DeviceId, ExecutorId, FunctionId, FunctionSpec, OperationId, RequestId, Settings

SIZES = (100, 1_000, 10_000, 100_000)
DEVICES = 4
RESIDENT_SHARE = 0.2
IMAGE_BYTES = 256 * 1024 * 1024
CHUNK_BYTES = 32 * 1024 * 1024
IN_FLIGHT = 64
STEP_NS = 50_000


class World:
    """Answers each command at once, when its turn comes."""

    def __init__(self, functions: int) -> None:
        self.core = Scheduler(Settings(host_capacity_bytes=functions * IMAGE_BYTES))
        self.now = 0
        self.events = 0
        self.pending: deque[Load | Evict | Execute] = deque()
        self.ids = [FunctionId(f"f{n}/1") for n in range(functions)]
        per_device = max(2, int(functions * RESIDENT_SHARE / DEVICES))
        for n in range(DEVICES):
            name = f"gpu:{n}"
            capacity = per_device * IMAGE_BYTES
            self.handle(ExecutorJoined(ExecutorId(name), DeviceId(name), capacity, CHUNK_BYTES))
        for n, function in enumerate(self.ids):
            self.handle(FunctionDeployed(OperationId(n), FunctionSpec(function, IMAGE_BYTES)))
            self.handle(ImageRead(function))

    def handle(self, event: object) -> None:
        self.now += STEP_NS
        self.events += 1
        for command in self.core.handle(self.now, event):  # type: ignore[arg-type]
            if isinstance(command, Load | Evict | Execute):
                self.pending.append(command)

    def end_one(self) -> None:
        command = self.pending.popleft()
        executor, number = command.executor, command.command
        match command:
            case Load():
                self.handle(LoadFinished(executor, number, command.function, 1))
            case Evict():
                self.handle(EvictionFinished(executor, number, command.function))
            case Execute():
                self.handle(ExecutionFinished(executor, number, command.request, 1))


def measure(functions: int, seconds: float) -> dict[str, float]:
    """Events a second in the steady state."""
    world = World(functions)
    draw = random.Random(7)
    weights = list(itertools.accumulate(1 / (rank + 10) for rank in range(functions)))
    numbers = itertools.count(1)

    def turn() -> None:
        (function,) = draw.choices(world.ids, cum_weights=weights)
        world.handle(RequestArrived(RequestId(next(numbers)), function))
        while len(world.core.state.requests) > IN_FLIGHT:
            world.end_one()

    for _ in range(2_000):
        turn()
    world.events = 0
    began, worked = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        for _ in range(100):
            turn()
    elapsed, worked = time.perf_counter() - began, time.process_time() - worked
    per_s, per_cpu_s = round(world.events / elapsed), round(world.events / worked)
    return {"functions": functions, "events_per_s": per_s, "events_per_cpu_s": per_cpu_s}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--json", type=Path)
    options.add_argument("--seconds", type=float, default=3.0)
    chosen = options.parse_args()
    rows = [measure(functions, chosen.seconds) for functions in SIZES]
    print(f"{'functions':>10} {'events/s':>10} {'a CPU s':>10}")
    for row in rows:
        print(f"{row['functions']:>10} {row['events_per_s']:>10} {row['events_per_cpu_s']:>10}")
    if chosen.json:
        about = {
            "date": datetime.now(UTC).isoformat(),
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        chosen.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
