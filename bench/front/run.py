"""What the platform costs: HTTP in to HTTP out around a near-empty model, beside other servers. See README.md."""

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx

HERE = Path(__file__).parent
NUMBERS = [[0.5, 1, 2, 3, 4, 5, 6, 7]]
V2_BODY: dict[str, object] = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 8], "data": NUMBERS[0]}]}
START_LIMIT_S = 120


@dataclass(frozen=True)
class Row:
    server: str
    connections: int
    p50_ms: float
    p99_ms: float
    requests_per_s: float


@dataclass(frozen=True)
class Target:
    server: str
    url: str
    body: dict[str, object]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process(command: list[str]) -> Iterator[None]:
    """A server as a process group of its own, ended with everything that it has started."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(15)
        with contextlib.suppress(ProcessLookupError):  # workers may outlive the one that started them
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def wait_for(target: Target) -> None:
    """Until it answers a request as it should."""
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            answer = httpx.post(target.url, json=target.body, timeout=5)
            if answer.status_code == 200:
                return
            problem = answer.text
        except httpx.HTTPError as fault:
            problem = str(fault)
        if time.monotonic() > deadline:
            raise SystemExit(f"{target.server} did not come up: {problem}")
        time.sleep(0.2)


@contextmanager
def dormouse() -> Iterator[Target]:
    port = free_port()
    with tempfile.TemporaryDirectory() as state:
        models = HERE / "models"
        options = ["--state-dir", state, "--port", str(port), "--device", "cpu", "--device-bytes", "64MiB"]
        options += ["--host-bytes", "256MiB", "--allow-code", str(models), "--threads", "1"]
        with process([sys.executable, "-m", "dormouse.cli", "serve", *options]):
            url = f"http://127.0.0.1:{port}"
            wait_until_live(url)
            manifest = {"name": "tiny", "source": "tiny:eight", "code": str(models)}
            httpx.post(f"{url}/dormouse/functions", json=manifest, timeout=START_LIMIT_S).raise_for_status()
            yield Target("dormouse", f"{url}/v2/models/tiny/infer", V2_BODY)


def wait_until_live(url: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/v2/health/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise SystemExit("dormouse did not come up")


@contextmanager
def peer(name: str, python: str) -> Iterator[Target]:
    port = free_port()
    path = "/predict" if name == "litserve" else "/v2/models/tiny/infer"
    body: dict[str, object] = {"data": NUMBERS} if name == "litserve" else V2_BODY
    with process([python, str(HERE / "peers" / f"{name}_server.py"), str(port)]):
        yield Target(name, f"http://127.0.0.1:{port}{path}", body)


def load(target: Target, connections: int, seconds: int) -> Row:
    """wrk keeps so many connections busy, one request after another on each."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        body = json.dumps(target.body).replace("'", "\\'")
        script.write(f"wrk.method='POST'\nwrk.body='{body}'\nwrk.headers['Content-Type']='application/json'\n")
        script.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", script.name, target.url]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in said:
        raise SystemExit(f"{target.server} refused requests:\n{said}")
    return Row(
        target.server,
        connections,
        in_ms(re.search(r"50%\s+([\d.]+)(us|ms|s)", said)),
        in_ms(re.search(r"99%\s+([\d.]+)(us|ms|s)", said)),
        float(re.findall(r"Requests/sec:\s+([\d.]+)", said)[0]),
    )


def in_ms(found: "re.Match[str] | None") -> float:
    assert found is not None, "wrk says its latencies otherwise than expected"
    return float(found[1]) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[found[2]]


def measure(peers_python: str | None, seconds: int) -> list[Row]:
    servers = [peer("starlette", sys.executable), dormouse()]
    if peers_python is not None:
        servers += [peer("litserve", peers_python), peer("mlserver", peers_python)]
    rows = []
    for server in servers:
        with server as target:
            wait_for(target)
            load(target, 4, 2)
            rows += [load(target, connections, seconds) for connections in (1, 16)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=int, default=8, help="of load for each row")
    parser.add_argument("--peers-python", help="a Python that has litserve and mlserver; without it they are left out")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("this benchmark makes its load with wrk (Debian: apt-get install wrk)")
    rows = measure(options.peers_python, options.seconds)
    print(f"{'server':10} {'connections':>11} {'p50 ms':>8} {'p99 ms':>8} {'requests/s':>10}")
    for row in rows:
        print(f"{row.server:10} {row.connections:>11} {row.p50_ms:8.2f} {row.p99_ms:8.2f} {row.requests_per_s:10.0f}")
    if options.json:
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
        options.json.write_text(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
