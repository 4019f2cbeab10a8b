"""How many functions one device serves inside their SLO. See README.md.

A real server in a process of its own, asked over HTTP by another; every answer is compared with plain PyTorch's.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.density.arrivals import drawn
from bench.density.driving import Driver, References, Running, deltas
from bench.density.functions import fleet
from bench.density.serving import ROOT, Function, Memory, Server, firsts_of, functions_of, started

SAMPLES = ROOT.parent / "shared" / "traces" / "torpor" / "samples.npy"
SAMPLING_S = 5.0
WARM_PAUSE_S = 0.04
"""Between two requests of the first round: in it a graph is captured."""
WARM_ROUNDS = 6
SATURATING = 16
"""Requests under way at saturation."""


@dataclass
class Bench:
    """One server and the functions on it. ``log`` collects what is written to the result file."""

    options: argparse.Namespace
    directory: Path
    server: Server
    driver: Driver
    functions: list[Function]
    log: dict[str, Any] = field(default_factory=dict)

    def note(self, key: str, value: Any) -> None:
        self.log[key] = value
        print(f"{time.strftime('%X')} {key}: {json.dumps(value)}", flush=True)

    # -------------------------------------------------------------- before

    def prepare(self) -> None:
        """Deploy, compute what the answers should be, and ask every function until it is replayed from a graph.

        The first of each architecture comes before the others, and with it all that is loaded once: libraries, kernels,
        workspaces, the memory of activations. What the others add is theirs alone, and must go with them.
        """
        self.look("empty")
        references = References(self.functions, self.options.device.partition(":")[0], self.driver.references)
        for architecture in {function.architecture for function in self.functions}:
            (self.directory / f"{architecture}.json").write_text(json.dumps(fleet.shapes_of(architecture)))
        self.timed("deploy_firsts", lambda: self.server.deploy_firsts(self.functions))
        self.warm("warm_firsts", firsts_of(self.functions))
        self.timed("deploy_others", lambda: self.server.deploy_others(self.functions, self.directory))
        began = time.perf_counter()
        references.wait()
        self.note("waited_for_references_s", round(time.perf_counter() - began, 1))
        firsts = self.look("firsts")
        self.warm("warm_all", self.functions)
        warm = self.look("warm")
        count = max(1, len(self.functions) - len(firsts_of(self.functions)))
        self.note(
            "beside_weights_bytes_a_function",
            {
                "device": (warm.device_used_bytes - firsts.device_used_bytes) // count,
                "host": (warm.executor_private_bytes - firsts.executor_private_bytes) // count,
            },
        )

    def look(self, when: str) -> Memory:
        memory = self.server.memory()
        self.note(f"memory_{when}", asdict(memory))
        return memory

    def timed(self, key: str, work: Callable[[], list[float]]) -> None:
        began = time.perf_counter()
        each = work() or [0.0]
        whole = time.perf_counter() - began
        self.note(key, {"seconds": whole, "each_median": float(np.median(each)), "each_most": max(each)})

    def warm(self, key: str, functions: Sequence[Function]) -> None:
        began = time.perf_counter()
        wanting = list(range(len(functions)))
        rounds = 0
        while wanting and rounds < WARM_ROUNDS:
            chosen = [functions[number] for number in wanting]
            pause_s = WARM_PAUSE_S * (rounds + 1) if self.server.cuda else 0
            running = self.driver.closed_loop(chosen, range(len(chosen)), 1, most=len(chosen), pause_s=pause_s)
            outcome = running.outcome()
            if outcome.failed or outcome.wrong:
                self.note("warming_went_wrong", asdict(outcome))
            rows = {row["name"]: row for row in self.server.functions()}
            wanting = [number for number in wanting if not _is_settled(rows[functions[number].name])]
            rounds += 1
        took = round(time.perf_counter() - began, 1)
        self.note(key, {"seconds": took, "rounds": rounds, "without_a_graph": len(wanting)})

    # -------------------------------------------------------------- the questions

    def step(self, functions: Sequence[Function], seconds: float, seed: int) -> dict[str, Any]:
        """Open loop at the rates of the samples."""
        arrivals = drawn(self.options.samples, len(functions), seconds, scale=self.options.scale, seed=seed)
        return {"seconds": seconds, **self.watched(self.driver.open_loop(functions, arrivals))}

    def watched(self, running: Running) -> dict[str, Any]:
        """What the client saw, and what the server's books and the system say of that time."""
        before, cpu_s, began = self.server.functions(), self.server.cpu_s(), time.perf_counter()
        outcome = running.outcome()
        took_s = time.perf_counter() - began
        cores = {name: (now - cpu_s[name]) / took_s for name, now in self.server.cpu_s().items()}
        return {**asdict(outcome), **deltas(before, self.server.functions()), "cores": cores}

    def resident_only(self, seconds: float) -> None:
        """As many as the pool holds all at once, which is what a server without swapping could serve."""
        node = self.server.node()
        chunk, capacity = node["executors"][0]["chunk_bytes"], node["devices"][0]["capacity_bytes"]
        sizes = {row["name"]: -(-row["image_bytes"] // chunk) * chunk for row in self.server.functions()}
        fitting, taken = [], 0
        for function in self.functions:
            if taken + sizes[function.name] > capacity:
                break
            taken += sizes[function.name]
            fitting.append(function)
        self.driver.closed_loop(fitting, range(len(fitting)), 1, most=2 * len(fitting)).outcome()
        self.note("resident_only", self.step(fitting, seconds, seed=1))

    def saturate(self, seconds: float) -> None:
        """Random order, always so many under way."""
        order = np.random.default_rng(2).integers(0, len(self.functions), 100_000).tolist()
        found = self.watched(self.driver.closed_loop(self.functions, order, SATURATING, seconds=seconds))
        loaded = sum(found["loads"].values()) / found["requests"]
        self.note("saturation", {"under_way": SATURATING, "loads_a_request": loaded, **found})

    def long(self, minutes: float) -> None:
        """The load of all functions, memory looked at every few seconds."""
        arrivals = drawn(self.options.samples, len(self.functions), minutes * 60, scale=self.options.scale, seed=3)
        running = self.driver.open_loop(self.functions, arrivals)
        seen: list[Memory] = []

        def sample() -> None:
            while running.process.poll() is None:
                seen.append(self.server.memory())
                time.sleep(SAMPLING_S)

        sampling = threading.Thread(target=sample)
        sampling.start()
        try:
            self.note("long_run", {"minutes": minutes, **self.watched(running)})
        finally:
            sampling.join()
            trends = {key: _trend(seen, key) for key in Memory.__dataclass_fields__ if key != "at_s"}
            self.note("long_run_memory", trends)

    def refill(self) -> None:
        """Take all functions away but the first of each architecture, and deploy them anew: what their graphs left with
        the driver is either used again, or as much comes on top."""
        firsts, warm = firsts_of(self.functions), self.log["memory_warm"]
        self.server.remove(function for function in self.functions if function not in firsts)
        time.sleep(1)
        self.look("before_refill")
        self.timed("deploy_again", lambda: self.server.deploy_others(self.functions, self.directory))
        self.warm("warm_again", self.functions)
        again = self.look("refilled")
        self.note(
            "refill_took_bytes",
            {key: getattr(again, key) - warm[key] for key in ("device_used_bytes", "executor_private_bytes")},
        )

    def clear(self) -> None:
        """Take all functions away but the first of each architecture, and look whether anything else is left; then
        those too."""
        firsts = firsts_of(self.functions)
        self.server.remove(function for function in self.functions if function not in firsts)
        time.sleep(1)  # a removal is answered when its memory is free; its graphs go right after that
        left, before = self.look("firsts_again"), self.log["memory_firsts"]
        self.note(
            "left_behind_bytes",
            {key: getattr(left, key) - before[key] for key in ("device_used_bytes", "executor_private_bytes")},
        )
        self.note("unaccounted_bytes", sum(row["unaccounted_bytes"] for row in self.server.functions()))
        self.server.remove(firsts)
        time.sleep(1)
        self.look("cleared")
        self.note("node_cleared", self.server.node())


def _is_settled(row: dict[str, Any]) -> bool:
    """Nothing is to be captured for it any more."""
    held = row["graphs"].values()
    return not held or any(graphs["shapes"] or graphs["eager_because"] for graphs in held)


def _trend(seen: Sequence[Memory], key: str) -> dict[str, float]:
    """Least and most, and the slope over the second half, in bytes (or blocks) a minute."""
    values = np.array([getattr(memory, key) for memory in seen], dtype=float)
    minutes = np.array([memory.at_s for memory in seen]) / 60
    half = len(values) // 2
    slope = float(np.polyfit(minutes[half:] - minutes[half], values[half:], 1)[0]) if len(values) - half > 2 else 0.0
    return {"first": values[0], "least": values.min(), "most": values.max(), "last": values[-1], "a_minute": slope}


def opened(options: argparse.Namespace, mix: str, count: int, device_bytes: str, directory: Path) -> Bench:
    directory.mkdir(parents=True)
    cuda = options.device.startswith("cuda")
    more = ["--device", options.device, "--images", "dram", "--device-bytes", device_bytes]
    more += ["--host-bytes", options.host_bytes, "--group-bytes", options.group_bytes]
    server = started(directory / "state", more, cuda, directory / "server.log")
    architectures = [(name, architecture.deadline_ms) for name, architecture in fleet.MIXES[mix].items()]
    functions = functions_of(architectures, count)
    return Bench(options, directory, server, Driver(server, directory), functions)


def density(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    if options.attach:
        bench = attached(options)
    else:
        bench = opened(options, options.mix, options.functions, options.device_bytes, directory)
    return _with(bench, lambda: _density(bench), options.leave)


def attached(options: argparse.Namespace) -> Bench:
    """To the server that a run before has left."""
    left = json.loads(options.attach.read_text())
    server, directory = Server(**left["server"]), Path(left["directory"])
    functions = [Function(**function) for function in left["functions"]]
    return Bench(options, directory, server, Driver(server, directory), functions, left["log"])


def _density(bench: Bench) -> None:
    options = bench.options
    if not options.attach:
        bench.prepare()
    for number in options.steps:
        bench.note(f"step_{number}", bench.step(bench.functions[:number], options.seconds, seed=number))
    if options.resident_seconds:
        bench.resident_only(options.resident_seconds)
    if options.minutes:
        bench.long(options.minutes)
    if not options.leave:
        bench.clear()


def saturation(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    mix = "resnet152" if options.mix == "paper" else options.mix
    bench = opened(options, mix, options.saturate, options.saturate_device_bytes, directory)

    def work() -> None:
        bench.prepare()
        bench.saturate(options.saturate_seconds)
        bench.refill()
        bench.clear()

    return _with(bench, work, None)


def _with(bench: Bench, work: Callable[[], None], leave: Path | None) -> dict[str, Any]:
    """The log, also of what came before something went wrong; the server is ended, or left as that file says."""
    try:
        work()
    except (SystemExit, Exception) as fault:
        bench.note("broken", f"{type(fault).__name__}: {fault}")
        for file in sorted((bench.directory / "state" / "logs").glob("*")):
            print(file.read_text()[-3000:], flush=True)
        print((bench.directory / "server.log").read_text()[-3000:], flush=True)
    finally:
        if leave is None or "broken" in bench.log:
            bench.server.stop()
        else:
            left = {"server": asdict(bench.server), "directory": str(bench.directory), "log": bench.log}
            leave.write_text(json.dumps({**left, "functions": [asdict(function) for function in bench.functions]}))
    return bench.log


def setting(options: argparse.Namespace) -> dict[str, object]:
    cuda = options.device.startswith("cuda")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(0) if cuda else None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "options": {key: value for key, value in vars(options).items() if isinstance(value, str | int | float | list)},
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:0")
    parser.add_argument("--mix", choices=sorted(fleet.MIXES), default="small")
    parser.add_argument("--functions", type=int, default=24)
    parser.add_argument("--steps", type=lambda text: [int(part) for part in text.split(",") if part], default=[12, 24])
    parser.add_argument("--seconds", type=float, default=10, help="of each step")
    parser.add_argument("--resident-seconds", type=float, default=5)
    parser.add_argument("--minutes", type=float, default=0, help="of the long run")
    parser.add_argument("--scale", type=float, default=1, help="times the rates of the samples")
    parser.add_argument("--samples", type=Path, default=SAMPLES)
    parser.add_argument("--device-bytes", default="48MiB")
    parser.add_argument("--host-bytes", default="1GiB")
    parser.add_argument("--group-bytes", default="8MiB")
    parser.add_argument("--saturate", type=int, default=0, help="so many functions of one architecture")
    parser.add_argument("--saturate-device-bytes", default="32MiB")
    parser.add_argument("--saturate-seconds", type=float, default=10)
    parser.add_argument("--state", type=Path, help="where state and results lie meanwhile; default: as tempfile has it")
    parser.add_argument("--leave", type=Path, help="let the server run on, and write here where it is")
    parser.add_argument("--attach", type=Path, help="go on with the server that was left")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    options = parsed()
    result: dict[str, Any] = {"setting": setting(options)}
    directory = Path(tempfile.mkdtemp(prefix="density-", dir=options.state))
    try:
        if options.saturate:
            result["saturation"] = saturation(options, directory / "saturation")
        if options.functions:
            result["density"] = density(options, directory / "density")
    finally:
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))
        if options.leave is None:
            shutil.rmtree(directory, ignore_errors=True)
    return 1 if any("broken" in part for part in result.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
