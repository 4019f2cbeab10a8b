"""What does keeping the books cost? The same load with and without, turn by turn. See README.md."""

import argparse
import http.client
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
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

ROOMY = ["--device-bytes", "512MiB", "--chunk-bytes", "64KiB", "--host-bytes", "4GiB", "--reset"]
CONNECTIONS = 16
OFF, ON = ["--ledger", "off"], ["--ledger", "on"]


@dataclass(frozen=True)
class Variant:
    options: list[str]
    scraped_s: float | None = None
    """How often somebody asks for its metrics while it has load."""


VARIANTS = {
    "plain": Variant(OFF),
    "scraped, 15 s": Variant(OFF, 15),
    "scraped, 5 s": Variant(OFF, 5),
    "scraped, 1 s": Variant(OFF, 1),
    "ledger": Variant(ON),
    "ledger, power": Variant([*ON, "--ledger-sync", "power"]),
    "ledger, scraped, 5 s": Variant(ON, 5),
}
"""The first is what the others are compared with. Whatever else keeps books becomes one more row."""
BEFORE = "before"
"""A row of another version, with the options of the first."""


@dataclass
class Row:
    variant: str
    requests_per_s: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    """Of the server process, for each request."""
    scrape_ms: list[float] = field(default_factory=list)
    """From asking for metrics to having them all, under load."""
    scrape_bytes: list[int] = field(default_factory=list)
    """As sent: compressed."""


@dataclass(frozen=True)
class Running:
    url: str
    pid: int


@contextmanager
def serving(options: Sequence[str], base: Path, functions: int, source: Path | None) -> Iterator[Running]:
    """A server over a copy of the state, which has answered every function once."""
    state_dir = Path(tempfile.mkdtemp(dir=base.parent)) / "state"
    subprocess.run(["cp", "-r", str(base), str(state_dir)], check=True)
    server = Server(state_dir, [*ROOMY, *options], source)
    server.start()
    url = f"http://127.0.0.1:{server.port}"
    try:
        with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(8) as callers:
            for answer in callers.map(
                lambda n: client.post(f"/v2/models/f{n}/infer", content=body_of(n)), range(functions)
            ):
                answer.raise_for_status()
            pid = client.get("/dormouse/node").json()["server"]["pid"]
        yield Running(url, pid)
    finally:
        server.stop()


def cpu_s(pid: int) -> float:
    """What a process has used of processors so far."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def load(server: Running, row: Row, scraped_s: float | None, functions: int, seconds: int) -> None:
    """wrk keeps its connections busy; every request is for any function."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        body = body_of(1).decode()
        script.write(f"wrk.method='POST'\nwrk.body='{body}'\nwrk.headers['Content-Type']='application/json'\n")
        script.write("request = function() return wrk.format(nil, '/v2/models/f' .. ")
        script.write(f"math.random(0, {functions - 1}) .. '/infer') end\n")
        script.flush()
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--latency", "-s", script.name, server.url]
        before = cpu_s(server.pid)
        with scraping(server, row, scraped_s):
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used_s = cpu_s(server.pid) - before
    if "Non-2xx" in said:
        raise SystemExit(f"{row.variant} refused requests:\n{said}")
    requests = int(re.findall(r"(\d+) requests in", said)[0])
    row.requests_per_s.append(float(re.findall(r"Requests/sec:\s+([\d.]+)", said)[0]))
    row.cpu_us.append(round(used_s / requests * 1e6, 1))
    row.p50_ms.append(in_ms(re.search(r"50%\s+([\d.]+)(us|ms|s)", said)))
    row.p99_ms.append(in_ms(re.search(r"99%\s+([\d.]+)(us|ms|s)", said)))


@contextmanager
def scraping(server: Running, row: Row, scraped_s: float | None) -> Iterator[None]:
    """Ask for metrics as Prometheus does, from half an interval on."""
    if scraped_s is None:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_scrape, args=(server, row, scraped_s, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _scrape(server: Running, row: Row, scraped_s: float, over: threading.Event) -> None:
    address = server.url.removeprefix("http://")
    wait_s = scraped_s / 2
    while not over.wait(wait_s):
        connection = http.client.HTTPConnection(address, timeout=60)
        began = time.perf_counter()
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
        body = connection.getresponse().read()
        took_s = time.perf_counter() - began
        connection.close()
        row.scrape_ms.append(round(took_s * 1e3, 1))
        row.scrape_bytes.append(len(body))
        wait_s = max(0.0, scraped_s - took_s)


def in_ms(found: "re.Match[str] | None") -> float:
    assert found is not None, "wrk says its latencies otherwise than expected"
    return float(found[1]) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[found[2]]


Version = tuple[Variant, Path | None]


def measure(variants: dict[str, Version], functions: int, copies: int, turns: int, seconds: int) -> list[Row]:
    """All servers run all the time; one after the other has load, in turns. Variants with the same options are the same
    servers: two processes of one program differ by more than what is looked for."""
    rows = {name: Row(name) for name in variants}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        base = Path(directory) / "base"
        furnish(base, functions)
        kinds = {(tuple(variant.options), source) for variant, source in variants.values()}
        servers = {
            kind: [stack.enter_context(serving(kind[0], base, functions, kind[1])) for _ in range(copies)]
            for kind in sorted(kinds, key=str)
        }
        for turn in range(turns):
            for name in variants if turn // copies % 2 == 0 else reversed(variants):
                variant, source = variants[name]
                server = servers[tuple(variant.options), source][turn % copies]
                load(server, rows[name], variant.scraped_s, functions, seconds)
    return list(rows.values())


def ratio(row: Row, plain: Row, what: str) -> float:
    """The median over turns of what this one had by what the plain one had in the same turn."""
    pairs = zip(getattr(row, what), getattr(plain, what), strict=True)
    middle: float = statistics.median(one / other for one, other in pairs)
    return round(middle, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--functions", type=int, default=1000)
    parser.add_argument("--servers", type=int, default=1, help="of each set of options, by turns")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--before", type=Path, help="the src directory of another version, for a row of its own")
    parser.add_argument("--seconds", type=int, default=5, help="of load for each variant in each turn")
    options = parser.parse_args()
    variants: dict[str, Version] = {name: (VARIANTS[name], None) for name in options.variants}
    if options.before is not None:
        variants[BEFORE] = VARIANTS[options.variants[0]], options.before
    rows = measure(variants, options.functions, options.servers, options.turns, options.seconds)
    table = []
    print(
        f"{'variant':21} {'requests/s':>10} {'of plain':>9} {'CPU us':>8} {'of plain':>9} {'p50 ms':>8} {'p99 ms':>8}"
    )
    for row in rows:
        medians = {
            name: statistics.median(getattr(row, name)) for name in ("requests_per_s", "cpu_us", "p50_ms", "p99_ms")
        }
        ratios = {f"{name}_ratio": ratio(row, rows[0], name) for name in ("requests_per_s", "cpu_us")}
        print(
            f"{row.variant:21} {medians['requests_per_s']:10.0f} {ratios['requests_per_s_ratio']:9.3f} "
            f"{medians['cpu_us']:8.1f} {ratios['cpu_us_ratio']:9.3f} {medians['p50_ms']:8.2f} {medians['p99_ms']:8.2f}"
        )
        if row.scrape_ms:
            size = statistics.median(row.scrape_bytes)
            print(f"{'':21} a scrape: {statistics.median(row.scrape_ms):.0f} ms, {size / 1e3:.0f} kB")
        table.append({"variant": row.variant, "median": medians, **ratios, "turns": asdict(row)})
    if options.json:
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cores": os.cpu_count(),
            "load": [round(load, 2) for load in os.getloadavg()],
            "machine": platform.machine(),
            "python": platform.python_version(),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "functions": options.functions,
            "servers": options.servers,
            "connections": CONNECTIONS,
        }
        options.json.write_text(json.dumps({"about": about, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
