"""What the papers say and what we get: one table, by the simulator around the real core.

    python bench/papers/run.py [--json FILE] [--quick] [--traces DIRECTORY] [--jobs CORES] [--only FIGURE]

With Dormouse on the path. --quick takes about a minute on two cores.
"""

import argparse
import os
import platform
import sys
import time
from datetime import UTC, datetime
from multiprocessing import Pool
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))  # also when it is started as a file

from bench.papers import systems
from bench.papers.figures import SEED, Case, Row, chosen

from dormouse.errors import ConfigurationFault

TRACES = Path(__file__).parents[3] / "shared" / "traces"
WIDE = 200


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="write the rows here")
    options.add_argument("--quick", action="store_true", help="only what takes a minute")
    options.add_argument("--traces", type=Path, default=TRACES, help="where torpor/samples.npy is")
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    options.add_argument("--only", default="", help="rows of figures whose names begin so, as 'Fig. 11'")
    given = options.parse_args()
    for file in systems.trace_files(given.traces):
        if not file.is_file():
            print(f"trace {file} is not there; say where with --traces DIRECTORY", file=sys.stderr)
            return 2
    aside = None if given.json is None else given.json.with_suffix(".part")
    began_s = time.perf_counter()
    try:
        rows = _measured(list(chosen(given.traces, quick=given.quick, only=given.only)), given.jobs, aside)
    except ConfigurationFault as fault:
        print(fault.message, file=sys.stderr)
        return 2
    wall_s = time.perf_counter() - began_s
    Console(width=WIDE).print(_table(rows))
    print(f"{len(rows)} rows in {wall_s:.0f} s on {given.jobs} cores")
    if given.json is not None:
        _write(given.json, rows, wall_s, given.jobs)
        given.json.with_suffix(".part").unlink(missing_ok=True)
    return 0


def _measured(cases: list[Case], jobs: int, aside: Path | None) -> list[Row]:
    """The longest first, so that no core waits for another at the end; rows in the order of the table. What
    is there is also put ``aside`` after each run, in case somebody has to stop before the end."""
    order = sorted(range(len(cases)), key=lambda number: -cases[number].weight)
    found: dict[int, list[Row]] = {}
    with Pool(jobs) as pool:
        runs = pool.imap_unordered(_measure, [(number, cases[number]) for number in order])
        for number, rows in track(runs, "simulating", total=len(cases)):
            found[number] = rows
            if aside is not None:
                aside.write_bytes(msgspec.json.encode([row for rows in found.values() for row in rows]))
    return [row for number in range(len(cases)) for row in found[number]]


def _measure(numbered: tuple[int, Case]) -> tuple[int, list[Row]]:
    number, case = numbered
    return number, case.measure()


def _table(rows: list[Row]) -> Table:
    table = Table("figure", "policy", "functions", "compliant", "paper says", "we get")
    for row in rows:
        compliant = "" if row.compliant is None else str(row.compliant)
        table.add_row(row.figure, row.policy, str(row.functions), compliant, row.paper, row.ours)
    return table


def _write(file: Path, rows: list[Row], wall_s: float, jobs: int) -> None:
    found = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "seed": SEED,
        "jobs": jobs,
        "wall_s": round(wall_s, 1),
        "rows": rows,
    }
    file.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
