"""Which image leaves host memory: ``lru`` against ``interval``, over workloads that suit the one or the other.

    python bench/tiers/run.py [--json FILE] [--seeds 1 2 3]

Simulated: the real core, a device, images three times as large as host memory, a disk of 2 GB/s.
"""

import argparse
import json
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from dormouse.core.tiering import HOST_TIER
from dormouse.sim import scenario as scenarios
from dormouse.sim.outcome import Outcome, outcome_of
from dormouse.sim.scenario import PoliciesTable, Scenario

SCENARIO = Path(__file__).parents[2] / "scenarios" / "disk-tier.toml"
WORKLOADS: dict[str, dict[str, object]] = {
    "all on timers": {"share": 0.99, "requests_per_s": 0.01},
    "half on timers, the others skewed": {},
    "half on timers, 20 % late or early": {"jitter": 0.2},
    "a tenth on timers": {"share": 0.1},
    "skewed, Poisson": {"kind": "skewed"},
    "bursts of changing functions": {"kind": "bursts", "share": 0.1, "requests_per_s": 2.0},
    "gamma, cv 3": {"kind": "gamma", "cv": 3.0},
}


def run(scenario: Scenario, workload: dict[str, object], policy: str, seed: int) -> Outcome:
    changed = replace(
        scenario,
        seed=seed,
        workload=replace(scenario.workload, **workload),
        policies=PoliciesTable(host_tier=policy),
    )
    world = scenarios.world_of(changed)
    deployed = sum(function.ledger.read_bytes for function in world.core.state.functions.values())
    began_ns, began_s = world.now, time.perf_counter()
    world.run(scenarios.arrivals_of(changed, SCENARIO.parent))
    outcome = outcome_of(world.core.state, world.now - began_ns, time.perf_counter() - began_s)
    return replace(outcome, read_bytes=outcome.read_bytes - deployed)


def row(outcomes: list[Outcome]) -> dict[str, float]:
    """Medians over the seeds."""
    return {
        "requests": median(outcome.requests for outcome in outcomes),
        "disk_share": median(o.paths["disk"].share if "disk" in o.paths else 0.0 for o in outcomes),
        "p98_ms": median(outcome.p98_ms for outcome in outcomes),
        "in_time": median(outcome.in_time / outcome.requests for outcome in outcomes),
        "compliant": median(outcome.compliant for outcome in outcomes),
        "read_gb": median(outcome.read_bytes / 1e9 for outcome in outcomes),
        "read_ahead": median(outcome.promotions for outcome in outcomes),
        "in_vain": median(outcome.promotions_unused for outcome in outcomes),
        "wall_s": median(outcome.wall_s for outcome in outcomes),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--json", type=Path)
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    chosen = options.parse_args()
    scenario = scenarios.read(SCENARIO)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    print("workload | policy | path disk | P98 ms | in time | GB read | read ahead | in vain | wall s")
    for name, workload in WORKLOADS.items():
        for policy in HOST_TIER:
            found = row([run(scenario, workload, policy, seed) for seed in chosen.seeds])
            rows.setdefault(name, {})[policy] = found
            print(
                f"{name} | {policy} | {found['disk_share']:.1%} | {found['p98_ms']:.0f} | {found['in_time']:.1%} | "
                f"{found['read_gb']:.0f} | {found['read_ahead']:.0f} | {found['in_vain']:.0f} | {found['wall_s']:.1f}",
                flush=True,
            )
    if chosen.json is not None:
        told = {"when": f"{datetime.now(UTC):%Y-%m-%d}", "python": platform.python_version(), "seeds": chosen.seeds}
        chosen.json.write_text(json.dumps(told | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
