"""Is every answer that a caller has received in the ledger, once, however the server dies? See README.md."""

import argparse
import asyncio
import json
import os
import platform
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # also when it is started as a file

from bench.crash.callers import Received, Seen, call_until_it_dies
from bench.crash.server import Server

from dormouse.billing.bills import Item, Question, items
from dormouse.billing.database import Database

CALLERS = 8
LATEST_KILL_S = 1.0


@dataclass
class Outcome:
    kills: int
    functions: int
    callers: int
    received: int = 0
    """Answers that callers have in full."""
    entries: int = 0
    """Answers that the ledger has."""
    lost: list[str] = field(default_factory=list)
    """Received, and not in the ledger."""
    twice: list[str] = field(default_factory=list)
    """More than one entry, or received more than once."""
    wrong: list[str] = field(default_factory=list)
    """Entries that say something else than the answer did."""
    unexplained: list[str] = field(default_factory=list)
    """Lives with more entries nobody has an answer to than requests in flight at their kill."""
    in_flight: int = 0
    """Requests without an answer at the kills, all together."""
    entries_without_answer: int = 0
    overlapping_intervals: int = 0
    ready_s: list[float] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not (self.lost or self.twice or self.wrong or self.unexplained or self.overlapping_intervals)


def crash(kills: int, functions: int, seed: int, options: list[str]) -> Outcome:
    """Kill a server so often, then compare what its callers have with what the ledger says."""
    chance = random.Random(seed)
    outcome = Outcome(kills, functions, CALLERS)
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory) / "state", options)
        server.state_dir.mkdir()
        server.start()
        server.deploy(functions)
        server.stop()
        seen: list[Seen] = []
        for kill in range(kills):
            outcome.ready_s.append(round(server.start(), 3))
            after_s = chance.uniform(0.0, LATEST_KILL_S)
            seen.append(asyncio.run(call_until_it_dies(server.port, functions, CALLERS, after_s, server.kill)))
            if (kill + 1) % 20 == 0:
                print(f"{kill + 1} kills, {sum(len(each.received) for each in seen)} answers", flush=True)
        compare(server.state_dir, seen, outcome)
    return outcome


def compare(state_dir: Path, seen: list[Seen], outcome: Outcome) -> None:
    database = Database(state_dir)
    database.take_in()
    entries: dict[str, list[Item]] = {}
    for item in items(database, Question()):
        if not item.reason:
            entries.setdefault(item.request, []).append(item)
    outcome.entries = sum(map(len, entries.values()))
    outcome.twice += [name for name, same in entries.items() if len(same) > 1]
    received: set[str] = set()
    for each in seen:
        outcome.received += len(each.received)
        outcome.in_flight += each.in_flight
        for answer in each.received:
            outcome.twice += [answer.request] * (answer.request in received)
            received.add(answer.request)
            check(answer, entries.get(answer.request, []), outcome)
    explain(seen, set(entries) - received, outcome)
    outcome.overlapping_intervals = overlaps(database.connection)
    database.close()


def check(answer: Received, same: list[Item], outcome: Outcome) -> None:
    if not same:
        outcome.lost.append(answer.request)
    elif (same[0].function, same[0].device_ns // 1000) != (answer.function, answer.device_us):
        outcome.wrong.append(answer.request)


def explain(seen: list[Seen], without_answer: set[str], outcome: Outcome) -> None:
    """Whoever was waiting at a kill may have an entry and no answer; nobody else. The first life only deployed."""
    outcome.entries_without_answer = len(without_answer)
    for life, each in enumerate(seen, 2):
        count = sum(name.startswith(f"{life}-") for name in without_answer)
        if count > each.in_flight:
            outcome.unexplained.append(f"life {life}: {count} entries, {each.in_flight} in flight")


def overlaps(connection: sqlite3.Connection) -> int:
    """Pairs of intervals in which one function is charged twice for the same memory, and intervals left open."""
    statement = """SELECT COUNT(*) FROM (SELECT began_ns, LAG(COALESCE(ended_ns, 2 << 61)) OVER
        (PARTITION BY kind, function, place ORDER BY began_ns) AS before_ns FROM intervals)
        WHERE before_ns > began_ns"""
    count: int = connection.execute(statement).fetchone()[0]
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--functions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sync", default="process", choices=("process", "power"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    outcome = crash(options.kills, options.functions, options.seed, ["--ledger-sync", options.sync])
    ready = outcome.ready_s
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "machine": platform.machine(),
        "python": platform.python_version(),
        "seconds": round(time.monotonic() - began),
        "ledger_sync": options.sync,
        "seed": options.seed,
    }
    spread = {"min": min(ready), "median": round(statistics.median(ready), 3), "max": max(ready)}
    result = {"about": about, "sound": outcome.sound, "restart_to_ready_s": spread, **asdict(outcome)}
    print(json.dumps({key: value for key, value in result.items() if key != "ready_s"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if not outcome.sound:
        raise SystemExit("the ledger and the callers do not agree")


if __name__ == "__main__":
    main()
