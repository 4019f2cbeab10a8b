"""Which policy serves most functions inside their SLO, on loads that nobody here made? See README.md.

python bench/policies/run.py [--traces DIRECTORY] [--json FILE] [--quick]
"""

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from rich.progress import track

from dormouse import traces, workload
from dormouse.core.policies import SETS
from dormouse.core.types import FunctionId, Settings
from dormouse.sim import scenario
from dormouse.sim.hardware import Model
from dormouse.sim.outcome import Outcome, outcome_of
from dormouse.sim.presets import MACHINES, MODELS
from dormouse.sim.world import World

SECOND_NS = 1_000_000_000
MEASURED_S = 90.0
"""Of virtual time, after every function was asked once."""
FUNCTIONS = 480
MACHINE = "v100x4"
LOADS = (0.6, 0.8, 0.95, 1.1)
SEED = 11
STEP_NS = 1_000_000

SHEDDING = "ours, shedding"
OURS, TORPOR = dict(SETS["dormouse"]), dict(SETS["torpor"])
POLICIES: dict[str, dict[str, Any]] = {
    "ours": OURS,
    "torpor": TORPOR,
    "edf": {**TORPOR, "queueing": "edf"},
    "fifo+lru": {**TORPOR, "queueing": "fifo", "eviction": "lru"},
    "early binding": {"placement": "bound", "queueing": "fifo", "eviction": "lru", "replication": "none"},
    SHEDDING: {**OURS, "shed_late": True},
    "ours, edf": {**OURS, "queueing": "edf"},
    "ours, lru": {**OURS, "eviction": "lru"},
    "ours, no copies": {**OURS, "replication": "none"},
    "ours, no load ahead": {**OURS, "load_ahead": False},
}
"""The published ones, ours, and ours with one idea taken away, which is asked of the first workload only."""
WORKLOADS = ("torpor samples", "servegen m-large", "servegen m-small", "azure skew", "bursts")


def stream(name: str, directory: Path) -> Iterator[tuple[int, int]]:
    """Requests as the workload has them, at its own rate."""
    day = 24 * 3600 * SECOND_NS
    match name:
        case "torpor samples":
            rows = traces.calls_per_minute(directory / "torpor" / "samples.npy")
            return workload.per_minute(workload.drawn_with_replacement(rows, FUNCTIONS, SEED), SEED)
        case "servegen m-large" | "servegen m-small":
            size = name.rsplit("-", 1)[1]
            clients = traces.client_windows(directory / "servegen" / f"servegen_m-{size}_client_rates.csv.gz")
            dealt = [clients[number % len(clients)] for number in range(FUNCTIONS)]
            return workload.windows(dealt, 600 * SECOND_NS, day, SEED)
        case "azure skew":
            file = directory / "femux-azure-functions-2019" / "app_invocation_totals.csv.gz"
            totals = random.Random(SEED).sample(traces.invocation_totals(file), FUNCTIONS)
            return workload.poisson([total / 86_400 for total in totals], day, SEED)
        case _:
            return workload.bursts([0.1] * FUNCTIONS, day, SEED, factor=3, share=0.1, mean_burst_ns=2 * SECOND_NS)


def arrivals(name: str, directory: Path, requests_per_s: float) -> list[tuple[int, int]]:
    """So many requests a second: the workload's own, with its time stretched; its first requests."""
    count = round(requests_per_s * MEASURED_S)
    taken = list(islice(stream(name, directory), count))
    own_per_ns = len(taken) / (taken[-1][0] - taken[0][0])
    stretch = own_per_ns / (requests_per_s / SECOND_NS)
    return [(round((at - taken[0][0]) * stretch), number) for at, number in taken]


def models() -> list[Model]:
    return list(MODELS["v100"].values())


def world_of(policies: dict[str, Any]) -> World:
    """Every function has been asked once, slowly; nothing of that is counted."""
    machine, kinds = MACHINES[MACHINE], models()
    functions = [(FunctionId(f"f{number}/1"), kinds[number % len(kinds)]) for number in range(FUNCTIONS)]
    settings = Settings(
        host_capacity_bytes=10**13, queue_length=10**6, topology=scenario.topology_of(machine), **policies
    )
    world = World(machine, settings, functions)
    world.warm()
    return world


def capacity(name: str, directory: Path) -> float:
    """Requests a second that the published policies answer with always sixteen under way, for the same functions."""
    world = world_of(TORPOR)
    numbers = [number for _, number in islice(stream(name, directory), 20_000)]
    random.Random(SEED).shuffle(numbers)
    began_ns, given = world.now, 0
    while given < 6_000:
        while len(world.core.state.requests) < 16:
            world.request(world.functions[numbers[given % len(numbers)]])
            given += 1
        world.until(world.now + STEP_NS)
    return given / ((world.now - began_ns) / SECOND_NS)


def measure(job: tuple[str, float, float, str, str]) -> dict[str, Any]:
    name, load, most, policy, directory = job
    world = world_of(POLICIES[policy])
    began_s, began_ns = time.perf_counter(), world.now
    world.run(iter(arrivals(name, Path(directory), load * most)))
    outcome = outcome_of(world.core.state, world.now - began_ns, time.perf_counter() - began_s)
    return row_of(name, load, most, policy, outcome)


def row_of(name: str, load: float, most: float, policy: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "workload": name,
        "load": load,
        "requests_per_s": round(load * most, 1),
        "policy": policy,
        "functions": outcome.functions,
        "compliant": outcome.compliant,
        "in_time": round(outcome.in_time / outcome.requests, 4),
        "refused": outcome.refused,
        "worst_share": round(outcome.worst_share, 3),
        "evictions": outcome.evictions,
        "moved_gb": round(outcome.moved_bytes / 1e9),
    }


def table(rows: list[dict[str, Any]], policies: list[str]) -> str:
    """Compliant functions, and the share of requests in time, by policy."""
    lines = [f"{'workload':18} {'load':>5} {'req/s':>6}" + "".join(f"{policy:>22}" for policy in policies)]
    for name in dict.fromkeys(row["workload"] for row in rows):
        for load in dict.fromkeys(row["load"] for row in rows):
            found = {row["policy"]: row for row in rows if (row["workload"], row["load"]) == (name, load)}
            cells = [f"{found[p]['compliant']:>14} {found[p]['in_time']:>7.4f}" if p in found else "" for p in policies]
            rate = next(iter(found.values()))["requests_per_s"]
            lines.append(f"{name:18} {load:>5} {rate:>6}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--traces", type=Path, default=Path(__file__).parents[3] / "shared" / "traces")
    options.add_argument("--json", type=Path)
    options.add_argument("--quick", action="store_true", help="two loads, five policies")
    options.add_argument("--only", default="", help="workloads whose names contain this")
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    chosen = options.parse_args()
    names = [name for name in WORKLOADS if chosen.only in name]
    loads = (0.8, 0.95) if chosen.quick else LOADS
    policies = list(POLICIES)[:6] if chosen.quick else list(POLICIES)
    most = {name: capacity(name, chosen.traces) for name in names}
    jobs = [
        (name, load, most[name], policy, str(chosen.traces))
        for name in names
        for load in loads
        for policy in policies
        if name == names[0] or policy == SHEDDING or not policy.startswith("ours,")
    ]
    with Pool(chosen.jobs) as pool:
        rows = list(track(pool.imap(measure, jobs), "simulating", total=len(jobs)))
    print(table(rows, policies))
    if chosen.json:
        about = {
            "date": datetime.now(UTC).isoformat(),
            "python": platform.python_version(),
            "machine": MACHINE,
            "functions": FUNCTIONS,
            "measured_s": MEASURED_S,
            "seed": SEED,
            "capacity_requests_per_s": {name: round(value, 1) for name, value in most.items()},
        }
        chosen.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
