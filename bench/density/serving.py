"""The server under test, as its users start it, and what can be seen of it from outside."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY = " is ready on "
ROOT = Path(__file__).parents[2]
CODE = Path(__file__).parent / "functions"
DEPLOYS_AT_ONCE = 16
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Function:
    name: str
    architecture: str
    seed: int
    deadline_ms: float


def functions_of(architectures: Sequence[tuple[str, float]], count: int) -> list[Function]:
    """So many functions, round-robin over architectures with their deadlines, each with a seed of its own."""
    made = []
    for number in range(count):
        architecture, deadline_ms = architectures[number % len(architectures)]
        made.append(Function(f"{architecture}-{number:03}", architecture, number + 1, deadline_ms))
    return made


def firsts_of(functions: Sequence[Function]) -> list[Function]:
    """The first of each architecture."""
    return list({function.architecture: function for function in reversed(functions)}.values())[::-1]


def _manifest(function: Function, **more: Any) -> dict[str, Any]:
    slo = {"deadline_ms": function.deadline_ms, "percentile": 98}
    return {"name": function.name, "code": str(CODE), "slo": slo, **more}


@dataclass
class Memory:
    """``device_used_bytes`` as the driver counts it, of the whole card; 0 without one. RSS with and without the arena's
    pages, where the system tells them apart."""

    at_s: float
    device_used_bytes: int
    server_rss_bytes: int
    executor_rss_bytes: int
    server_private_bytes: int
    executor_private_bytes: int
    server_python_blocks: int


@dataclass
class Server:
    url: str
    pid: int
    cuda: bool

    # -------------------------------------------------------------- what it says

    def ask(self, path: str, body: object = None, method: str = "GET") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method="POST" if data else method)
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refusal:
            raise SystemExit(f"{method} {path}: {refusal.code} {refusal.read().decode()}") from None

    def functions(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.ask("/dormouse/functions")["functions"]
        return rows

    def node(self) -> dict[str, Any]:
        node: dict[str, Any] = self.ask("/dormouse/node")
        return node

    @property
    def executor_pid(self) -> int:
        return int(self.node()["executors"][0]["pid"])

    # -------------------------------------------------------------- what it is told

    def deploy_firsts(self, functions: Sequence[Function]) -> list[float]:
        """The first of each architecture, by itself; the seconds that each took."""
        manifests = [
            _manifest(first, source="fleet:base", arguments={"architecture": first.architecture, "seed": first.seed})
            for first in firsts_of(functions)
        ]
        return self._deploy(manifests)

    def deploy_others(self, functions: Sequence[Function], shapes: Path) -> list[float]:
        """All others, each like the first of its architecture."""
        firsts = {first.architecture: first.name for first in firsts_of(functions)}
        manifests = [
            _manifest(
                other,
                source="fleet:weights",
                arguments={"shapes": str(shapes / f"{other.architecture}.json"), "seed": other.seed},
                like=firsts[other.architecture],
            )
            for other in functions
            if other.name not in firsts.values()
        ]
        return self._deploy(manifests)

    def _deploy(self, manifests: Sequence[dict[str, Any]]) -> list[float]:
        def one(manifest: dict[str, Any]) -> float:
            began = time.perf_counter()
            self.ask("/dormouse/functions", manifest)
            return time.perf_counter() - began

        with ThreadPoolExecutor(DEPLOYS_AT_ONCE) as pool:
            return list(pool.map(one, manifests))

    def remove(self, functions: Iterable[Function]) -> None:
        with ThreadPoolExecutor(DEPLOYS_AT_ONCE) as pool:
            list(pool.map(lambda f: self.ask(f"/dormouse/functions/{f.name}", method="DELETE"), functions))

    # -------------------------------------------------------------- what is seen from outside

    def memory(self) -> Memory:
        executor = self.executor_pid
        return Memory(
            at_s=time.time(),
            device_used_bytes=device_used_bytes() if self.cuda else 0,
            server_rss_bytes=_resident(self.pid),
            executor_rss_bytes=_resident(executor),
            server_private_bytes=_private(self.pid),
            executor_private_bytes=_private(executor),
            server_python_blocks=self.node()["server"]["python_blocks"],
        )

    def cpu_s(self) -> dict[str, float]:
        """Processor time of both processes so far."""
        return {"server": _cpu_s(self.pid), "executor": _cpu_s(self.executor_pid)}

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
        with suppress(ChildProcessError):  # of a run before this one
            os.waitpid(self.pid, 0)


def started(state_dir: Path, options: Sequence[str], cuda: bool, log: Path) -> Server:
    """``dormouse serve``, ready, in a session of its own."""
    command = [sys.executable, "-m", "dormouse.cli", "serve", "--state-dir", str(state_dir), "--port", "0"]
    command += ["--allow-code", str(CODE), *options]
    with log.open("ab") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    assert child.stdout is not None
    line = next((line for line in child.stdout if READY in line), None)
    if line is None:
        raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
    return Server(line.partition(READY)[2].split()[0], child.pid, cuda)


def device_used_bytes() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 1024 * 1024


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _private(pid: int) -> int:
    """Anonymous memory; where the system does not say, resident less shared."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * _PAGE_BYTES
