"""One tenant asks ten times what the device can do; is another still served? See README.md.

python bench/overload/run.py [--seconds 60] [--times 10] [--json FILE]
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import torch

HERE = Path(__file__).parent
DEADLINE_MS = 250.0
GOOD_SHARE = 0.2
"""Of capacity: what the tenant asks that behaves."""
GOOD_BEFORE_S, GOOD_AFTER_S = 15.0, 15.0
CALM_S = 5.0
"""After the end of the overload everything must be as before within so long."""
KEYS = {name: f"dm_{name:-<40}" for name in ("operator", "good", "abusive")}
WAITED_S = 60
TIMEOUT_S = 10
"""After which a client does not wait for an answer."""


def digest(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def tenants_file(limited: bool) -> str:
    limits = "concurrency = 2\n" if limited else ""
    return (
        f'[server]\nadmin_keys = ["{digest(KEYS["operator"])}"]\n'
        f'[tenants.good]\nkeys = ["{digest(KEYS["good"])}"]\n'
        f'[tenants.abusive]\n{limits}keys = ["{digest(KEYS["abusive"])}"]\n'
    )


class Server:
    """``dormouse serve`` in a process of its own, with a function for each tenant."""

    def __init__(self, state: Path, *, limited: bool) -> None:
        file = state / "tenants.toml"
        file.write_text(tenants_file(limited))
        command = [sys.executable, "-m", "dormouse.cli", "serve", "--state-dir", str(state / "state"), "--port", "0"]
        command += ["--device", "cpu", "--device-bytes", "256MiB", "--host-bytes", "512MiB", "--threads", "1"]
        command += ["--tenants", str(file), "--allow-code", str(HERE / "models")]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = next(line for line in self.process.stdout if " is ready on " in line)
        self.url = said.partition(" is ready on ")[2].split()[0]
        self.operator = httpx.Client(
            base_url=self.url, headers={"x-api-key": KEYS["operator"]}, timeout=WAITED_S, trust_env=False
        )

    def deploy(self, name: str) -> None:
        manifest: dict[str, Any] = {"name": name, "source": "work:work", "code": str(HERE / "models"), "tenant": name}
        manifest["slo"] = {"deadline_ms": DEADLINE_MS, "percentile": 98}
        self.operator.post("/dormouse/functions", json=manifest).raise_for_status()

    def pids(self) -> dict[str, int]:
        node = self.operator.get("/dormouse/node").json()
        return {"server": node["server"]["pid"], "executor": node["executors"][0]["pid"]}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(WAITED_S)


def load(server: Server, tenant: str, rate: float, seconds: float, out: Path) -> subprocess.Popen[str]:
    """``dormouse load``, as a user would start it."""
    command = [
        sys.executable,
        "-m",
        "dormouse.cli",
        "load",
        "--url",
        server.url,
        "--function",
        tenant,
        "--json",
        str(out),
    ]
    command += ["--rate", f"{rate:.1f}", "--duration", f"{seconds:g}", "--timeout", f"{TIMEOUT_S:g}"]
    environment = {**os.environ, "DORMOUSE_KEY": KEYS[tenant]}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def result(process: subprocess.Popen[str], out: Path) -> dict[str, Any]:
    said, _ = process.communicate()
    if not out.exists():
        raise SystemExit(f"the load generator failed:\n{said}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def capacity(server: Server) -> float:
    """Requests a second with always four under way. Zeros: through so many layers other numbers would become so small
    that a CPU takes three times as long."""
    headers = {"x-api-key": KEYS["operator"]}
    tensor = {"name": "x", "datatype": "FP32", "shape": [8, 512], "data": [0.0] * 4096}
    metadata = server.operator.get("/v2/models/good").json()
    tensor["name"] = metadata["inputs"][0]["name"]
    for _ in range(5):  # the module is built, and its memory warm
        server.operator.post("/v2/models/good/infer", json={"inputs": [tensor]}).raise_for_status()
    done = [0]
    until = time.monotonic() + 6

    def ask() -> None:
        with httpx.Client(base_url=server.url, headers=headers, timeout=WAITED_S, trust_env=False) as client:
            while time.monotonic() < until:
                client.post("/v2/models/good/infer", json={"inputs": [tensor]}).raise_for_status()
                done[0] += 1

    threads = [threading.Thread(target=ask) for _ in range(4)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done[0] / (time.monotonic() - began)


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Memory:
    """Samples of the server's and the executor's resident memory, every half second."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.seen: dict[str, list[float]] = {name: [] for name in pids}
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(0.5):
            for name, pid in self._pids.items():
                with suppress(FileNotFoundError):
                    self.seen[name].append(resident_mb(pid))

    def stop(self) -> dict[str, dict[str, float]]:
        self._over.set()
        self._thread.join()
        return {name: {"first": each[0], "most": max(each), "last": each[-1]} for name, each in self.seen.items()}


def measured(options: argparse.Namespace, *, limited: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        server = Server(place, limited=limited)
        try:
            for tenant in ("good", "abusive"):
                server.deploy(tenant)
            most = capacity(server)
            rate = GOOD_SHARE * most
            alone = result(load(server, "good", rate, GOOD_BEFORE_S, place / "alone"), place / "alone")
            memory = Memory(server.pids())
            abusive = load(server, "abusive", options.times * most, options.seconds, place / "abusive")
            beside = result(load(server, "good", rate, options.seconds, place / "beside"), place / "beside")
            abuse = result(abusive, place / "abusive")
            time.sleep(CALM_S)
            after = result(load(server, "good", rate, GOOD_AFTER_S, place / "after"), place / "after")
            again = result(load(server, "abusive", rate, GOOD_AFTER_S, place / "again"), place / "again")
            kept = memory.stop()
            queued = server.operator.get("/dormouse/node").json()["queued"]
        finally:
            server.stop()
    return {
        "limited": limited,
        "capacity_per_s": round(most, 1),
        "good_alone": row(alone),
        "good_beside": row(beside),
        "abusive": row(abuse),
        "good_after": row(after),
        "abusive_after": row(again),
        "queued_at_the_end": queued,
        "memory_mb": kept,
    }


def row(outcome: dict[str, Any]) -> dict[str, Any]:
    (function,) = outcome["functions"]
    return {
        "requests": function["requests"],
        "offered_per_s": round(outcome["offered_per_s"], 1),
        "in_time": function["in_time"],
        "share_in_time": round(function["in_time"] / max(1, function["requests"]), 4),
        "p50_ms": None if function["latency"] is None else round(function["latency"]["p50_ms"], 1),
        "p98_ms": None if function["latency"] is None else round(function["latency"]["p98_ms"], 1),
        "errors": outcome["errors"],
        "generator_late": outcome["generator"]["late"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--times", type=float, default=10, help="how often its capacity the device is asked")
    parser.add_argument("--limited-only", action="store_true", help="leave out the run without limits")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measured(options, limited=limited) for limited in ((True,) if options.limited_only else (True, False))]
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "seconds": options.seconds,
        "times": options.times,
        "deadline_ms": DEADLINE_MS,
    }
    print(json.dumps({"about": about, "rows": rows}, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    limited = rows[0]
    kept = limited["good_beside"]["share_in_time"] / limited["good_alone"]["share_in_time"]
    return 0 if kept >= 0.98 else 1


if __name__ == "__main__":
    sys.exit(main())
