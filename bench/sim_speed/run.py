"""How many requests a second the simulator serves with 1,000 functions, and whether its memory stays flat.

python bench/sim_speed/run.py [--requests 1000000] [--json FILE]
"""

import argparse
import gc
import json
import os
import platform
import resource
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from dormouse import workload
from dormouse.core.types import FunctionId, Ns, Settings
from dormouse.sim.outcome import outcome_of
from dormouse.sim.presets import H200_MODELS, MACHINES
from dormouse.sim.scenario import topology_of
from dormouse.sim.world import World

FUNCTIONS = 1_000
SAMPLES = 20


def resident_bytes() -> int:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Meter:
    """Passes arrivals on, and looks at clocks and memory now and then."""

    def __init__(self, requests: int) -> None:
        self._every = max(1, requests // SAMPLES)
        self._requests = requests
        self.samples: list[dict[str, float]] = []
        self._began = (time.perf_counter(), time.process_time())

    def __call__(self, arrivals: workload.Arrivals) -> Iterator[tuple[Ns, int]]:
        for number, arrival in enumerate(arrivals):
            if number % self._every == 0:
                self._sample(number)
            if number == self._requests:
                return
            yield arrival

    def _sample(self, number: int) -> None:
        wall_s, cpu_s = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        self.samples.append({"requests": number, "wall_s": wall_s, "cpu_s": cpu_s, "rss_mb": resident_bytes() / 1e6})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--requests", type=int, default=1_000_000)
    options.add_argument("--rate", type=float, default=100.0, help="requests a second, simulated")
    options.add_argument("--exponent", type=float, default=1.2, help="of Zipf's law")
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    machine = MACHINES["h200"]
    models = [H200_MODELS[name] for name in ("resnet-152", "densenet-169", "bert-qa")]
    functions = [(FunctionId(f"f{number}/1"), models[number % len(models)]) for number in range(FUNCTIONS)]
    settings = Settings(machine.host_bytes, queue_length=1_000_000, topology=topology_of(machine))
    world = World(machine, settings, functions)
    rates = workload.skewed(FUNCTIONS, chosen.rate, chosen.exponent, 1)
    duration_ns = round(2 * chosen.requests / chosen.rate * 1e9)
    gc.collect()
    meter = Meter(chosen.requests)
    world.run(meter(workload.poisson(rates, duration_ns, 1)))
    first, middle, last = meter.samples[0], meter.samples[len(meter.samples) // 2], meter.samples[-1]
    outcome = outcome_of(world.core.state, world.now)
    told = {
        "when": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "functions": FUNCTIONS,
        "rate": chosen.rate,
        "exponent": chosen.exponent,
        "in_time": outcome.in_time / outcome.requests,
        "requests": outcome.requests,
        "events": world.events,
        "paths": {path: row.share for path, row in outcome.paths.items()},
        "requests_per_wall_s": last["requests"] / last["wall_s"],
        "requests_per_cpu_s": last["requests"] / last["cpu_s"],
        "rss_mb": {"begin": first["rss_mb"], "middle": middle["rss_mb"], "end": last["rss_mb"]},
    }
    print(json.dumps(told, indent=1))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(told | {"samples": meter.samples}, indent=1) + "\n")


if __name__ == "__main__":
    main()
