"""What does keeping the books cost? The same load with and without, turn by turn. See README.md."""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))  # also when it is started as a file

from bench.crash.callers import body_of
from bench.crash.server import Server
from bench.metrics.fleet import furnish

ROOMY = ["--device-bytes", "512MiB", "--chunk-bytes", "64KiB", "--host-bytes", "4GiB"]
CONNECTIONS = 16
VARIANTS: dict[str, list[str]] = {
    "plain": ["--ledger", "off"],
    "ledger": ["--ledger", "on"],
    "ledger, power": ["--ledger", "on", "--ledger-sync", "power"],
}
"""The first is what the others are compared with. Whatever else keeps books becomes one more row."""


@dataclass
class Row:
    variant: str
    requests_per_s: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    """Of the server process, for each request."""


@dataclass(frozen=True)
class Running:
    row: Row
    url: str
    pid: int


@contextmanager
def serving(variant: str, options: list[str], base: Path, functions: int) -> Iterator[Running]:
    """A server over a copy of the state, which has answered every function once."""
    state_dir = base.parent / variant.replace(", ", "-") / "state"
    state_dir.parent.mkdir()
    subprocess.run(["cp", "-r", str(base), str(state_dir)], check=True)
    server = Server(state_dir, [*ROOMY, *options])
    server.start()
    url = f"http://127.0.0.1:{server.port}"
    try:
        with httpx.Client(base_url=url, timeout=120) as http, ThreadPoolExecutor(8) as callers:
            for answer in callers.map(
                lambda n: http.post(f"/v2/models/f{n}/infer", content=body_of(n)), range(functions)
            ):
                answer.raise_for_status()
            pid = http.get("/dormouse/node").json()["server"]["pid"]
        yield Running(Row(variant), url, pid)
    finally:
        server.stop()


def cpu_s(pid: int) -> float:
    """What a process has used of processors so far."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def load(server: Running, functions: int, seconds: int) -> None:
    """wrk keeps its connections busy; every request is for any function."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        body = body_of(1).decode()
        script.write(f"wrk.method='POST'\nwrk.body='{body}'\nwrk.headers['Content-Type']='application/json'\n")
        script.write("request = function() return wrk.format(nil, '/v2/models/f' .. ")
        script.write(f"math.random(0, {functions - 1}) .. '/infer') end\n")
        script.flush()
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--latency", "-s", script.name, server.url]
        before = cpu_s(server.pid)
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used_s = cpu_s(server.pid) - before
    if "Non-2xx" in said:
        raise SystemExit(f"{server.row.variant} refused requests:\n{said}")
    requests = int(re.findall(r"(\d+) requests in", said)[0])
    server.row.requests_per_s.append(float(re.findall(r"Requests/sec:\s+([\d.]+)", said)[0]))
    server.row.cpu_us.append(round(used_s / requests * 1e6, 1))
    server.row.p50_ms.append(in_ms(re.search(r"50%\s+([\d.]+)(us|ms|s)", said)))
    server.row.p99_ms.append(in_ms(re.search(r"99%\s+([\d.]+)(us|ms|s)", said)))


def in_ms(found: "re.Match[str] | None") -> float:
    assert found is not None, "wrk says its latencies otherwise than expected"
    return float(found[1]) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[found[2]]


def measure(functions: int, turns: int, seconds: int) -> list[Row]:
    """All servers run all the time; one after the other has load, in turns."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as servers:
        base = Path(directory) / "base"
        furnish(base, functions)
        running = [
            servers.enter_context(serving(variant, options, base, functions)) for variant, options in VARIANTS.items()
        ]
        for turn in range(turns):
            for server in running if turn % 2 == 0 else reversed(running):
                load(server, functions, seconds)
        return [server.row for server in running]


def ratio(row: Row, plain: Row, what: str) -> float:
    """The median over turns of what this one had by what the plain one had in the same turn."""
    pairs = zip(getattr(row, what), getattr(plain, what), strict=True)
    middle: float = statistics.median(one / other for one, other in pairs)
    return round(middle, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--functions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=4, help="of load for each variant in each turn")
    options = parser.parse_args()
    rows = measure(options.functions, options.turns, options.seconds)
    table = []
    print(
        f"{'variant':16} {'requests/s':>10} {'of plain':>9} {'CPU us':>8} {'of plain':>9} {'p50 ms':>8} {'p99 ms':>8}"
    )
    for row in rows:
        medians = {
            name: statistics.median(getattr(row, name)) for name in ("requests_per_s", "cpu_us", "p50_ms", "p99_ms")
        }
        ratios = {f"{name}_ratio": ratio(row, rows[0], name) for name in ("requests_per_s", "cpu_us")}
        print(
            f"{row.variant:16} {medians['requests_per_s']:10.0f} {ratios['requests_per_s_ratio']:9.3f} "
            f"{medians['cpu_us']:8.1f} {ratios['cpu_us_ratio']:9.3f} {medians['p50_ms']:8.2f} {medians['p99_ms']:8.2f}"
        )
        table.append({"variant": row.variant, "median": medians, **ratios, "turns": asdict(row)})
    if options.json:
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cores": os.cpu_count(),
            "load": [round(load, 2) for load in os.getloadavg()],
            "machine": platform.machine(),
            "python": platform.python_version(),
            "functions": options.functions,
            "connections": CONNECTIONS,
        }
        options.json.write_text(json.dumps({"about": about, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
