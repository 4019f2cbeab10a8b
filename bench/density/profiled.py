"""What one device takes for each model of the mix, resident and from host memory: the numbers of a simulated machine.

    python -m bench.density.profiled --device cuda:0 --mix paper --device-bytes 2.5GB --host-bytes 16GiB --json FILE

A real server with a journal is asked one request at a time, each function twice in a row, in a pool that does not hold
all of them; ``bench/live_vs_sim/profile`` reads the journal.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

from bench.density.driving import Driver
from bench.density.functions import fleet
from bench.density.run import Bench, setting
from bench.density.serving import functions_of, started
from bench.live_vs_sim.profile import Profile

from dormouse.functions import name_of
from dormouse.journal import read_journal

OF_EACH = 2
"""Functions of an architecture."""


def profiled(options: argparse.Namespace, directory: Path) -> Profile:
    architectures = [(name, architecture.deadline_ms) for name, architecture in fleet.MIXES[options.mix].items()]
    functions = functions_of(architectures, OF_EACH * len(architectures))
    journal = directory / "journal"
    more = ["--device", options.device, "--images", "dram", "--device-bytes", options.device_bytes]
    more += ["--host-bytes", options.host_bytes, "--journal", str(journal)]
    cuda = options.device.startswith("cuda")
    server = started(directory / "state", more, cuda, directory / "server.log")
    try:
        bench = Bench(options, directory, server, Driver(server, directory), functions)
        bench.prepare()
        order = [number for _ in range(options.rounds) for number in range(len(functions)) for _ in range(2)]
        bench.note("asked", bench.driver.closed_loop(functions, order, 1, most=len(order)).outcome().requests)
    finally:
        server.stop()
    profile = Profile()
    profile.take(read_journal(journal).entries)
    return profile


def rows_of(profile: Profile) -> list[dict[str, object]]:
    """A row an architecture, medians over its functions and requests; microseconds."""
    kinds: dict[str, list[tuple[int, int, int]]] = {}
    for function, model in profile.models():
        architecture = name_of(function).rpartition("-")[0]
        kinds.setdefault(architecture, []).append((model.image_bytes, model.resident_ns, model.tail_ns))
    return [
        {
            "model": name,
            "image_bytes": found[0][0],
            "resident_us": round(median(resident for _, resident, _ in found) / 1000),
            "tail_us": round(median(tail for _, _, tail in found) / 1000),
        }
        for name, found in kinds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:0")
    parser.add_argument("--mix", choices=sorted(fleet.MIXES), default="small")
    parser.add_argument("--device-bytes", default="16MiB")
    parser.add_argument("--host-bytes", default="1GiB")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--state", type=Path, help="where state lies meanwhile; default: as tempfile has it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="profiled-", dir=options.state) as directory:
        profile = profiled(options, Path(directory))
    bytes_per_s, overhead_ns = profile.link()
    told = {
        "setting": setting(options),
        "link_mb_per_s": round(bytes_per_s / 1e6),
        "load_overhead_us": round(overhead_ns / 1000),
        "hop_us": round(profile.hop_ns / 1000),
        "models": rows_of(profile),
    }
    print(json.dumps(told, indent=1))
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
