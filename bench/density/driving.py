"""Drives a client process against a server and sums up what came of it."""

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from bench.density.arrivals import Arrivals
from bench.density.client import PATHS, Plan
from bench.density.requests import request
from bench.density.serving import ROOT, Function, Server
from numpy.typing import NDArray

TOLERANCE = 0.02
"""How far an answer may be from the reference, of its size: other kernels, and TF32 on a GPU. Functions with other
weights are more than 0.5 apart."""
SHARE = 0.98


@dataclass
class Outcome:
    """Latencies in milliseconds, from the time when a request was due."""

    functions: int
    asked: int
    """Functions that had at least one request."""
    compliant: int
    requests: int
    failed: int
    wrong: int
    worst_error: float
    requests_per_s: float
    p50_ms: float
    p98_ms: float
    late_sends_ms: float
    """How far behind the client was at its 99th percentile."""
    client_cores: float
    paths: dict[str, dict[str, float]]
    by_architecture: dict[str, dict[str, float]]
    missed: list[str]
    """Functions that were not compliant: their requests, and how many were late."""


class Results:
    def __init__(self, file: Path) -> None:
        with np.load(file) as arrays:
            self.columns: dict[str, NDArray[Any]] = {key: arrays[key] for key in arrays.files}
        self.latency_ms = (self.columns["done_s"] - self.columns["due_s"]) * 1000
        self.failed = self.columns["status"] != 200
        self.wrong = ~self.failed & ~(self.columns["error"] <= TOLERANCE)

    def outcome(self, functions: Sequence[Function]) -> Outcome:
        which = self.columns["function"]
        deadlines = np.array([function.deadline_ms for function in functions])
        bad = (self.latency_ms > deadlines[which]) | self.failed | self.wrong
        asked, late = np.bincount(which, minlength=len(functions)), np.bincount(which, bad, len(functions))
        in_slo = late <= (1 - SHARE) * asked + 1e-9
        took_s = max(float(self.columns["done_s"].max()), float(self.columns["due_s"].max()))
        errors = self.columns["error"][~self.failed]
        return Outcome(
            functions=len(functions),
            asked=int((asked > 0).sum()),
            compliant=int(in_slo.sum()),
            requests=len(which),
            failed=int(self.failed.sum()),
            wrong=int(self.wrong.sum()),
            worst_error=float(errors.max()) if len(errors) else float("nan"),
            requests_per_s=len(which) / took_s,
            p50_ms=_percentile(self.latency_ms, 50),
            p98_ms=_percentile(self.latency_ms, 98),
            late_sends_ms=_percentile((self.columns["sent_s"] - self.columns["due_s"]) * 1000, 99),
            client_cores=float(self.columns["cores"]),
            paths={
                name: self._summed(self.columns["path"] == number)
                for number, name in enumerate(PATHS)
                if (self.columns["path"] == number).any()
            },
            by_architecture={
                name: self._summed(np.array([functions[f].architecture == name for f in which.tolist()]))
                for name in dict.fromkeys(function.architecture for function in functions)
            },
            missed=[
                f"{functions[f].name}: {int(late[f])} of {int(asked[f])} late" for f in np.flatnonzero(~in_slo).tolist()
            ],
        )

    def _summed(self, chosen: NDArray[np.bool_]) -> dict[str, float]:
        latency = self.latency_ms[chosen]
        return {
            "requests": int(chosen.sum()),
            "share": float(chosen.mean()),
            "p50_ms": _percentile(latency, 50),
            "p98_ms": _percentile(latency, 98),
            "max_ms": float(latency.max()) if len(latency) else 0.0,
        }


def _percentile(values: NDArray[Any], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0


class Driver:
    """Runs clients of one server; plans and results lie in ``directory``."""

    def __init__(self, server: Server, directory: Path) -> None:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        self._address = (host, int(port))
        self._directory = directory
        self.references = directory / "references.npz"

    def open_loop(self, functions: Sequence[Function], arrivals: Arrivals) -> "Running":
        return self._start(functions, at_s=arrivals.at_s.tolist(), function=arrivals.function.tolist())

    def closed_loop(
        self, functions: Sequence[Function], order: Sequence[int], concurrency: int, **more: Any
    ) -> "Running":
        return self._start(functions, function=list(order), concurrency=concurrency, **more)

    def _start(self, functions: Sequence[Function], **how: Any) -> "Running":
        place = Path(tempfile.mkdtemp(dir=self._directory))
        plan = Plan(
            *self._address,
            names=[function.name for function in functions],
            requests=[self._request(function.architecture) for function in functions],
            references=str(self.references) if self.references.exists() else "",
            results=str(place / "results.npz"),
            **how,
        )
        (place / "plan.json").write_bytes(msgspec.json.encode(asdict(plan)))
        process = subprocess.Popen([sys.executable, "-m", "bench.density.client", str(place / "plan.json")], cwd=ROOT)
        return Running(process, Path(plan.results), functions)

    def _request(self, architecture: str) -> str:
        file = self._directory / f"{architecture}.request"
        if not file.exists():
            file.write_bytes(request(architecture))
        return str(file)


@dataclass
class Running:
    process: "subprocess.Popen[bytes]"
    results: Path
    functions: Sequence[Function]

    def ended(self) -> Results:
        if self.process.wait():
            raise SystemExit(f"the client ended with status {self.process.returncode}")
        return Results(self.results)

    def outcome(self) -> Outcome:
        return self.ended().outcome(self.functions)


class References:
    """Computed by a process of its own, which may begin before there is a server."""

    def __init__(self, functions: Sequence[Function], device: str, out: Path) -> None:
        command = [sys.executable, "-m", "bench.density.references", device, str(out)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdin is not None
        self._process.stdin.writelines(f"{f.name}={f.architecture}:{f.seed}\n" for f in functions)
        self._process.stdin.close()

    def wait(self) -> None:
        if self._process.wait():
            raise SystemExit("the references could not be computed")


def deltas(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the server's own books say of the time between."""
    earlier = {row["name"]: row for row in before}
    loads: Counter[str] = Counter()
    for row in after:
        loads.update({p: n - earlier[row["name"]]["loads"].get(p, 0) for p, n in row["loads"].items()})
    return {
        "loads": {path: count for path, count in loads.items() if count},
        "evictions": sum(row["evictions"] - earlier[row["name"]]["evictions"] for row in after),
        "loaded_bytes": sum(row["loaded_bytes"] - earlier[row["name"]]["loaded_bytes"] for row in after),
        "unaccounted_bytes": sum(row["unaccounted_bytes"] for row in after),
        "graphs": sum(held["shapes"] for row in after for held in row["graphs"].values()),
        "eager_because": sorted({held["eager_because"] for row in after for held in row["graphs"].values()} - {""}),
    }
