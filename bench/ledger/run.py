"""What does one entry cost, by the way it is made durable? See README.md."""

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # also when it is started as a file

from bench.ledger.turns import book_turns

from dormouse.billing.bills import Question, make_bill
from dormouse.billing.database import Database, request_key
from dormouse.billing.records import FunctionKnown, Record, RequestEnded
from dormouse.billing.segments import Sync
from dormouse.billing.tariffs import ensure_default
from dormouse.billing.writer import LedgerWriter
from dormouse.config import GIB
from dormouse.core.types import FunctionId

FUNCTIONS = [FunctionId(f"model-{number}/1") for number in range(1000)]
BEGAN_NS = 1_800_000_000_000_000_000
TOGETHER = (1, 4, 16)
"""Entries of one turn."""


@dataclass(frozen=True)
class Row:
    way: str
    together: int
    entry_us: float
    """Until its answer may go out, of one thread's processor time."""
    wait_us: float
    """The same by the clock, of the whole turn."""
    later_us: float
    """What taking it into SQLite costs afterwards."""


def entry(number: int) -> RequestEnded:
    function, tenant = FUNCTIONS[number * 7919 % 1000], f"tenant-{number % 20}"
    at_ns = BEGAN_NS + number * 1_000_000
    return RequestEnded(number, function, tenant, at_ns, 5_000_000, 900_000, 1_234_567, "resident", True, 256, 2048)


def measured(write: Callable[[list[Record]], None], count: int, together: int) -> tuple[float, float]:
    """Processor and clock, in microseconds: of an entry, and of a turn."""
    turns: list[list[Record]] = [[entry(n) for n in range(at, at + together)] for at in range(0, count, together)]
    waits, used = [], time.thread_time()
    for turn in turns:
        began = time.perf_counter()
        write(turn)
        waits.append(time.perf_counter() - began)
    return (time.thread_time() - used) / count * 1e6, statistics.median(waits) * 1e6


def sqlite_way(synchronous: str, together: int, count: int) -> Row:
    """A transaction for each turn, in the loop's own thread."""
    with tempfile.TemporaryDirectory() as directory:
        connection = sqlite3.connect(Path(directory) / "l.sqlite", isolation_level=None)
        connection.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = {synchronous};")
        connection.execute("CREATE TABLE requests (id INTEGER PRIMARY KEY, f, t, e, l, q, d, p, i, a, b, r)")
        connection.execute("CREATE INDEX by_end ON requests (e)")

        def write(turn: list[Record]) -> None:
            rows = [
                (request_key(1, r.number), 1, 2, r.at_ns, r.latency_ns, r.queued_ns, r.device_ns, 3, r.in_time, 4, 5, 0)
                for r in turn
                if isinstance(r, RequestEnded)
            ]
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
            connection.execute("COMMIT")

        used, wait = measured(write, count, together)
        connection.close()
        return Row(f"sqlite, synchronous {synchronous.lower()}", together, round(used, 2), round(wait, 2), 0.0)


def segment_way(sync: Sync, together: int, count: int) -> Row:
    """A page for each turn, and SQLite later; for power, on the disk too."""
    with tempfile.TemporaryDirectory() as directory:
        database = Database(Path(directory))
        life, _, segment = database.begin_life(BEGAN_NS)
        writer = LedgerWriter(database.directory, life, sync, after=segment)

        def write(turn: list[Record]) -> None:
            assert writer.enter(turn) is None
            if sync == "power":
                writer.sync()

        used, wait = measured(write, count, together)
        began = time.process_time()
        database.take_in()
        later = (time.process_time() - began) / count * 1e6
        database.close()
        return Row(f"segment, {sync}", together, round(used, 2), round(wait, 2), round(later, 2))


def bill_of(count: int) -> dict[str, float]:
    """How long a bill over so many requests takes, and what the ledger weighs then."""
    with tempfile.TemporaryDirectory() as directory:
        database = Database(Path(directory))
        life, _, segment = database.begin_life(BEGAN_NS)
        ensure_default(database, 80 * GIB)
        writer = LedgerWriter(database.directory, life, "process", after=segment)
        known: list[Record] = [FunctionKnown(f, "owner", BEGAN_NS, 10, 10, 10, 980_000, False) for f in FUNCTIONS]
        writer.enter(known)
        for at in range(0, count, 1000):
            writer.enter([entry(number) for number in range(at, at + 1000)])
        database.take_in()
        began = time.perf_counter()
        bill = make_bill(database, Question())
        took_s = time.perf_counter() - began
        assert bill.total.requests == count
        weight = database.file.stat().st_size
        database.close()
    return {"requests": count, "bill_s": round(took_s, 2), "bytes_per_request": round(weight / count, 1)}


async def cashier_us(count: int) -> float:
    """What a turn with one answer costs the loop in all: finding out what it means, and writing it."""
    with tempfile.TemporaryDirectory() as directory:
        return round(await book_turns(Path(directory), count), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument("--bill", type=int, default=1_000_000, help="requests in the bill that is timed")
    options = parser.parse_args()
    rows = []
    for together in TOGETHER:
        rows += [sqlite_way(synchronous, together, options.entries) for synchronous in ("OFF", "NORMAL")]
        rows += [
            segment_way("process", together, options.entries),
            segment_way("power", together, options.entries // 20),
        ]
    print(f"{'way':28} {'together':>8} {'entry us':>9} {'wait us':>9} {'later us':>9}")
    for row in rows:
        print(f"{row.way:28} {row.together:8} {row.entry_us:9.2f} {row.wait_us:9.2f} {row.later_us:9.2f}")
    cashier = asyncio.run(cashier_us(options.entries))
    print(f"a turn with one answer costs the event loop {cashier} us in all")
    bill = bill_of(options.bill)
    print(f"a bill over {bill['requests']} requests takes {bill['bill_s']} s; {bill['bytes_per_request']} bytes each")
    if options.json:
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cores": os.cpu_count(),
            "load": [round(load, 2) for load in os.getloadavg()],
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
        result = {"about": about, "rows": [asdict(row) for row in rows], "turn_us": cashier, "bill": bill}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
