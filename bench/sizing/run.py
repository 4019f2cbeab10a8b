"""How many functions does a machine serve, all of them inside their SLO? See README.md.

python bench/sizing/run.py [--traces DIRECTORY] [--json FILE] [--only MACHINE]
"""

import argparse
import json
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dormouse.sim.capacity import largest_compliant
from dormouse.sim.scenario import FunctionsTable, MachineTable, PoliciesTable, Scenario, WorkloadTable

H200_POOL_BYTES = 113_000_000_000
"""80 % of the card, which is what a server takes."""
MACHINES = {
    "v100x4": (MachineTable("v100x4"), 480),
    "h200": (MachineTable("h200", device_bytes=H200_POOL_BYTES), 1000),
    "h200x2": (MachineTable("h200x2", device_bytes=H200_POOL_BYTES, host_bytes=10**13), 2000),
    "h200x8": (MachineTable("h200x8", device_bytes=H200_POOL_BYTES, host_bytes=10**13), 8000),
}
"""By name, and how many functions to begin with."""
POLICIES = {
    "ours": PoliciesTable(),
    "torpor": PoliciesTable("torpor"),
    "edf": PoliciesTable("torpor", queueing="edf"),
    "fifo+lru": PoliciesTable("torpor", queueing="fifo", eviction="lru"),
    "early binding": PoliciesTable("fifo", placement="bound", replication="none"),
}


def measured(machine: str, policy: str, directory: Path, seconds: float, step: float) -> dict[str, Any]:
    table, count = MACHINES[machine]
    scenario = Scenario(
        functions=FunctionsTable(count),
        machine=table,
        policies=POLICIES[policy],
        workload=WorkloadTable("per-minute", seconds, trace="torpor/samples.npy", warm=True),
    )
    began_s = time.perf_counter()
    tried: dict[int, int] = {}

    def note(count: int, compliant: int) -> None:
        tried[count] = compliant
        print(f"{machine:8} {policy:14} {count:6}: {compliant} compliant", file=sys.stderr, flush=True)

    within = max(1, round(step * count))
    found = largest_compliant(scenario, directory, note, within=within)
    return {
        "machine": machine,
        "policy": policy,
        "functions": found,
        "within": within,
        "tried": tried,
        "took_s": round(time.perf_counter() - began_s),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--traces", type=Path, default=Path(__file__).parents[3] / "shared" / "traces")
    options.add_argument("--json", type=Path)
    options.add_argument("--only", default="", help="one machine")
    options.add_argument("--policies", default=",".join(POLICIES), help="some of them, by commas")
    options.add_argument("--seconds", type=float, default=180, help="of virtual time, a trial")
    options.add_argument(
        "--step", type=float, default=0.01, help="of the number to begin with: so precisely is it found"
    )
    chosen = options.parse_args()
    rows = []
    about = {"date": datetime.now(UTC).isoformat(), "python": platform.python_version(), "seconds": chosen.seconds}
    for machine in MACHINES:
        for policy in chosen.policies.split(","):
            if chosen.only in ("", machine):
                rows.append(measured(machine, policy, chosen.traces, chosen.seconds, chosen.step))
                print(
                    f"{machine:8} {policy:14} {rows[-1]['functions']:6} functions  ({rows[-1]['took_s']} s)", flush=True
                )
                if chosen.json:
                    chosen.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
