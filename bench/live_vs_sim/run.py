"""The same requests served by a real node and by a simulated one with that node's numbers. See README.md.

python -m bench.live_vs_sim.run [--seconds 60] [--rate 20] [--json FILE]
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from collections import defaultdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from statistics import median

import torch
from bench.live_vs_sim.live import LIMIT_NS, config, serve
from bench.live_vs_sim.profile import Profile

from dormouse import workload
from dormouse.core.messages import Command, Event, ExecutorLost, Refuse, Reply, RequestArrived
from dormouse.core.types import Limits, Ns
from dormouse.journal import Entry, read_journal
from dormouse.sim.world import World

SHARES_WITHIN, MEDIANS_WITHIN = 0.05, 0.25


class Answers:
    """Latencies by path, as the core sees them, of the requests after the first ``skipped``."""

    def __init__(self, skipped: int) -> None:
        self._skipped = skipped
        self._seen = 0
        self._arrived: dict[int, Ns] = {}
        self.by_path: dict[str, list[Ns]] = defaultdict(list)
        self.refused = 0

    def __call__(self, now: Ns, event: Event, commands: list[Command]) -> None:
        if isinstance(event, RequestArrived):
            self._seen += 1
            if self._seen > self._skipped:
                self._arrived[event.request] = now
        for command in commands:
            if isinstance(command, Reply) and command.request in self._arrived:
                self.by_path[str(command.path)].append(now - self._arrived.pop(command.request))
            elif isinstance(command, Refuse) and command.request in self._arrived:
                self.refused += 1

    def rows(self) -> dict[str, dict[str, float]]:
        total = sum(map(len, self.by_path.values()))
        return {
            path: {"requests": len(took), "share": len(took) / total, "p50_ms": median(took) / 1e6}
            for path, took in sorted(self.by_path.items())
        }


def split(entries: list[Entry], calibrating: int, measured: int) -> tuple[list[Entry], list[Entry]]:
    """The calibrations, before and after; and everything up to the second one."""
    asked = [place for place, entry in enumerate(entries) if isinstance(entry.event, RequestArrived)]
    first, after = asked[calibrating], asked[calibrating + measured]
    return entries[:first] + entries[after:], entries[:after]


def simulated(entries: list[Entry], settings_of: Path, profile: Profile, calibrating: int) -> Answers:
    """The same requests at the same times, those of the calibration too: it leaves the same functions resident."""
    settings = read_journal(settings_of).settings
    answers = Answers(calibrating)
    models = profile.models()
    number_of = {name: number for number, (name, _) in enumerate(models)}
    world = World(
        profile.machine(settings.host_capacity_bytes),
        settings,
        models,
        limits=Limits(timeout_ns=LIMIT_NS),
        watch=answers,
    )
    arrivals = [(e.now, number_of[e.event.function]) for e in entries if isinstance(e.event, RequestArrived)]
    first_ns = arrivals[0][0]
    world.run((at_ns - first_ns, number) for at_ns, number in arrivals)
    return answers


def compare(live: Answers, sim: Answers) -> tuple[list[dict[str, object]], bool]:
    rows, sound = [], True
    measured, expected = live.rows(), sim.rows()
    nothing = {"requests": 0, "share": 0.0, "p50_ms": 0.0}
    for path in sorted({*measured, *expected}):
        one, other = measured.get(path, nothing), expected.get(path, nothing)
        off = abs(other["p50_ms"] / one["p50_ms"] - 1) if one["p50_ms"] else 0.0
        apart = abs(one["share"] - other["share"])
        within = apart <= SHARES_WITHIN and (off <= MEDIANS_WITHIN or min(one["requests"], other["requests"]) == 0)
        rows.append(
            {"path": path, "live": one, "simulated": other, "share_apart": apart, "p50_off": off, "within": within}
        )
        sound &= within
    return rows, sound


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--rate", type=float, default=20)
    options.add_argument("--functions", type=int, default=12)
    options.add_argument("--exponent", type=float, default=0.8)
    options.add_argument("--link", type=int, default=300_000_000, help="bytes a second")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", type=Path)
    options.add_argument("--keep", type=Path, help="keep the live node's journal here")
    chosen = options.parse_args()
    rates = workload.skewed(chosen.functions, chosen.rate, chosen.exponent, chosen.seed)
    arrivals = list(workload.poisson(rates, round(chosen.seconds * 1e9), chosen.seed))
    with tempfile.TemporaryDirectory() as directory:
        settings = config(chosen.keep or Path(directory), chosen.functions, chosen.link)
        load_before = os.getloadavg()[0]
        calibrating = asyncio.run(serve(settings, chosen.functions, arrivals))
        assert settings.journal is not None
        entries = list(read_journal(settings.journal).entries)
        assert not any(isinstance(entry.event, ExecutorLost) for entry in islice(entries, len(entries) - 3))
        calibrations, entries = split(entries, calibrating, len(arrivals))
        profile = Profile()
        profile.take(calibrations)
        live = Answers(calibrating)
        for entry in entries:
            live(entry.now, entry.event, entry.commands)
        sim = simulated(entries, settings.journal, profile, calibrating)
    bytes_per_s, overhead_ns = profile.link()
    told = {
        "when": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_average": [load_before, os.getloadavg()[0]],
        "requests": len(arrivals),
        "refused": [live.refused, sim.refused],
        "profile": {
            "hop_us": profile.hop_ns / 1e3,
            "link_mb_per_s": bytes_per_s / 1e6,
            "load_overhead_ms": overhead_ns / 1e6,
            "resident_ms": {str(name): model.resident_ns / 1e6 for name, model in profile.models()},
            "tail_ms": {str(name): model.tail_ns / 1e6 for name, model in profile.models()},
        },
    }
    rows, sound = compare(live, sim)
    print(json.dumps(told, indent=1))
    for row in rows:
        one, other = row["live"], row["simulated"]
        assert isinstance(one, dict) and isinstance(other, dict)
        print(
            f"{row['path']}: live {one['share']:.1%} P50 {one['p50_ms']:.2f} ms, simulated {other['share']:.1%} "
            f"P50 {other['p50_ms']:.2f} ms; apart {row['share_apart']:.3f}, {row['p50_off']:.0%}; "
            f"{'within' if row['within'] else 'NOT within'}"
        )
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(told | {"rows": rows, "within": sound}, indent=1) + "\n")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
