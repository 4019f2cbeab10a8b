"""How fast an image reaches a GPU by each route: over one link, over two, and from another GPU. See README.md.

In process, over runners and devices: no server, no sockets. Weights are random, shapes are real. Two GPUs are needed;
on the CPU device (to try this program) there is one link, and the other device is more of the same memory.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import median

import torch
import transformers
from bench.swap.answers import Checks
from bench.swap.image import Image
from bench.swap.shapes import Shape, shapes
from bench.swap.turns import MIB, Bench, clock

from dormouse.core.types import Bytes, round_up
from dormouse.device.base import Device
from dormouse.device.cpu import CpuDevice
from dormouse.device.driver import Driver
from dormouse.device.measuring import map_cost
from dormouse.device.vmm import VmmDevice
from dormouse.executor.arrival import Arrival
from dormouse.executor.compute import Compute, CpuCompute, CudaCompute
from dormouse.executor.copying import pieces_of
from dormouse.executor.routes import FromHost, FromPeer, Route, held_by
from dormouse.executor.runner import Runner
from dormouse.model.outputs import Output
from dormouse.store.index import PAGE_BYTES

PEER = "the other"
PEER_SIZES_MIB = (64, 128, 256, 512, 1024, 4096)
HOLDS_A_DETOUR = """
import sys
from dormouse.device.vmm import VmmDevice
device = VmmDevice(0, 64 * 1024 * 1024)
device.open_detour("cuda:1")
print("open", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class PeerRow:
    """GB/s from the memory of one GPU to that of the other."""

    bytes: Bytes
    copy_gb_s: float
    """Into memory that is mapped already."""
    load_gb_s: float
    """Mapped on the way, as a load does it."""


@dataclass(frozen=True)
class ModelRow:
    """Milliseconds, medians; None where there is no such route."""

    model: str
    bytes: Bytes
    resident_ms: float
    copy_one_link_ms: float
    copy_two_links_ms: float | None
    copy_peer_ms: float
    both_at_once_ms: float
    """Half of the image to each device at the same time, over its own link: what two links can do at best."""
    swap_run_one_link_ms: float
    swap_run_two_links_ms: float | None
    swap_run_peer_ms: float
    correct: bool
    source_untouched: bool


CHUNK_BYTES: dict[str, Bytes] = {"cpu": 2 * MIB, "cuda": 32 * MIB}


def opened(kind: str, index: int, pool_bytes: Bytes) -> Device:
    chunk = CHUNK_BYTES[kind]
    if kind == "cpu":
        return CpuDevice(round_up(pool_bytes, chunk), chunk, index=index)
    return VmmDevice(index, round_up(pool_bytes, chunk), chunk, maps_ahead=maps_ahead(index))


@cache
def maps_ahead(index: int) -> bool:
    """As a calibration finds it."""
    return map_cost(Driver(), index).is_slow_beside_copies


def compute_on(kind: str, index: int) -> Compute:
    return CpuCompute(torch.get_num_threads()) if kind == "cpu" else CudaCompute(index)


def introduce(device: Device, source: Device) -> None:
    device.adopt(PEER, source.part_bytes, source.capacity_bytes // source.part_bytes, source.share())


# ------------------------------------------------------------------ copies alone


def copied_ms(device: Device, size_bytes: Bytes, route: Route, group_bytes: Bytes, *, mapped: bool) -> float:
    """Groups by a route into a region, as a load queues them."""
    copies = list(pieces_of(route.extents, size_bytes, group_bytes, route.groups_per_copy))
    region = device.reserve(size_bytes)
    done, step = 0, device.chunk_bytes
    if mapped:
        device.map(region, size_bytes)
        done = region.reserved_bytes
    with clock() as elapsed:
        if device.maps_ahead and not route.is_brief and not mapped:
            device.map(region, size_bytes)
            done = region.reserved_bytes
        for number, copy in enumerate(copies):
            end = copy[-1].offset + copy[-1].size_bytes
            if end > done:
                done = min(max(end, done + step), region.reserved_bytes)
                step *= 2
                device.map(region, done)
            for piece in copy:
                route.queue(device, region, number, piece)
            fence = device.fence()
        fence.synchronize()
    device.unmap(region)
    device.release(region)
    return elapsed.ms


def peer_rows(kind: str, group_bytes: Bytes, repeats: int) -> list[PeerRow]:
    rows = []
    sizes = [size * MIB for size in PEER_SIZES_MIB if kind == "cuda" or size <= 256]
    with ExitStack() as closing:
        device, source = opened(kind, 0, sizes[-1]), opened(kind, 1, sizes[-1])
        closing.callback(source.close)
        closing.callback(device.close)
        introduce(device, source)
        held = source.reserve(sizes[-1])
        source.map(held, sizes[-1])
        route = FromPeer(PEER, held_by(held, source.chunk_bytes))
        for size in sizes:
            rates = []
            for mapped in (True, False):
                took = [copied_ms(device, size, route, group_bytes, mapped=mapped) for _ in range(repeats + 2)]
                rates.append(size / median(took[2:]) / 1e6)
            rows.append(PeerRow(size, *rates))
    return rows


# ------------------------------------------------------------------ models


class RoutedBench(Bench):
    """One image on one device, which reaches it by a route that is chosen each time."""

    route: Route | None = None

    def swap_run(self, runner: Runner) -> tuple[float, dict[str, Output]]:
        """As an executor does it: one lane makes room and copies, this thread runs."""
        if self._on_device is None or self._on_device is runner:
            self._load(self.rival)
        leaving, arrival, route = self._on_device, Arrival(), self.route
        assert leaving is not None

        def swap() -> None:
            leaving.evict()
            runner.load(self.image.extents, arrival, self.device.sweep, route=route)

        with clock() as elapsed:
            self.lane.put(swap)
            arrival.wait_begun()
            answer = self._run(runner, arrival)
        self._settle()
        self._on_device = runner
        return elapsed.ms, answer


def model_row(kind: str, shape: Shape, group_bytes: Bytes, repeats: int) -> ModelRow:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as closing:
        image = Image(shape, Path(directory))
        closing.callback(image.close)
        size_bytes = image.index.image_bytes
        compute, elsewhere = compute_on(kind, 0), compute_on(kind, 1)
        device, source = opened(kind, 0, size_bytes), opened(kind, 1, size_bytes)
        closing.callback(source.close)
        closing.callback(device.close)
        device.register_host(image.address, round_up(size_bytes, PAGE_BYTES))  # for every context of this process
        introduce(device, source)
        holder = Runner(source, elsewhere, image.directory, image.address, group_bytes)
        holder.load(image.extents, Arrival())
        routes: dict[str, Route] = {
            "one link": FromHost(image.address, image.extents),
            "peer": FromPeer(PEER, holder.held),
        }
        if kind == "cuda":
            device.open_detour(source.id)
            routes["two links"] = FromHost(image.address, image.extents, (source.id,))
        bench = RoutedBench(image, device, compute, group_bytes)
        return measured(bench, routes, holder, source, repeats)


def both_at_once_ms(bench: RoutedBench, holder: Runner, source: Device, group_bytes: Bytes) -> float:
    """The second half goes over what the source holds of it: the same bytes."""
    assert holder._built is not None
    image, there = bench.image, holder._built.region
    size_bytes = image.index.image_bytes
    half = size_bytes // group_bytes // 2 * group_bytes
    bench.clear()
    here = bench.device.reserve(half)
    bench.device.map(here, half)
    with clock() as elapsed:
        for offset in range(0, half, group_bytes):
            bench.device.copy_in(here, offset, image.address + offset, group_bytes)
            source.copy_in(there, half + offset, image.address + half + offset, group_bytes)
        for device in (bench.device, source):
            device.fence().synchronize()
    bench.device.unmap(here)
    bench.device.release(here)
    return elapsed.ms * size_bytes / (2 * half)


def measured(bench: RoutedBench, routes: dict[str, Route], holder: Runner, source: Device, repeats: int) -> ModelRow:
    size_bytes, group_bytes = bench.image.index.image_bytes, bench.runner._group_bytes
    checks = Checks(bench)
    for route in routes.values():
        bench.route = route
        for runner in (bench.poisoned, bench.runner):
            checks.see(runner, bench.swap_run(runner)[1])
    resident: list[float] = []
    copies: dict[str, list[float]] = {name: [] for name in routes}
    swaps: dict[str, list[float]] = {name: [] for name in routes}
    both: list[float] = []
    for _ in range(repeats + 1):  # in turns, so that a slow moment of the machine falls on all of them alike
        bench.route = None
        resident.append(bench.sequential_and_resident()[1])
        both.append(both_at_once_ms(bench, holder, source, group_bytes))
        for name, route in routes.items():
            copies[name].append(copied_ms(bench.device, size_bytes, route, group_bytes, mapped=True))
        for name, route in routes.items():
            bench.route = route
            seen = []
            for runner in (bench.rival, bench.runner, bench.rival, bench.runner):
                took_ms, answer = bench.swap_run(runner)
                swaps[name].append(took_ms)
                seen.append((runner, answer))
            for runner, answer in seen:  # looking at them in between would let the machine fall asleep
                checks.see(runner, answer)
    bench.clear()
    untouched = same_as_image(bench.image, source, holder)
    assert bench.device.unaccounted_bytes() == source.unaccounted_bytes() == 0 or bench.compute.device.type == "cpu"
    copy_ms = {name: median(taken[1:]) for name, taken in copies.items()}
    swap_ms = {name: median(taken[4:]) for name, taken in swaps.items()}
    return ModelRow(
        model=bench.image.shape.name,
        bytes=size_bytes,
        resident_ms=median(resident[1:]),
        copy_one_link_ms=copy_ms["one link"],
        copy_two_links_ms=copy_ms.get("two links"),
        copy_peer_ms=copy_ms["peer"],
        both_at_once_ms=median(both[1:]),
        swap_run_one_link_ms=swap_ms["one link"],
        swap_run_two_links_ms=swap_ms.get("two links"),
        swap_run_peer_ms=swap_ms["peer"],
        correct=checks.same and checks.close,
        source_untouched=untouched,
    )


def same_as_image(image: Image, source: Device, holder: Runner) -> bool:
    """Whether the source still holds the image, bit by bit."""
    assert holder._built is not None
    size_bytes = image.index.image_bytes
    back = torch.empty(size_bytes, dtype=torch.uint8)
    source.copy_out(holder._built.region, 0, back.data_ptr(), size_bytes)
    source.fence().synchronize()
    return torch.equal(back, image.bytes[:size_bytes])


# ------------------------------------------------------------------ what a detour costs


def detour_memory_bytes() -> Bytes:
    """Device memory that another process takes on GPU 1 when it opens a detour over its link."""
    driver = Driver()
    driver.set_context(driver.retain_primary_context(1))
    before = driver.free_memory()
    command = [sys.executable, "-c", HOLDS_A_DETOUR]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        taken = before - driver.free_memory()
        child.communicate()
    driver.release_primary_context(1)
    return taken


def setting(kind: str, group_bytes: Bytes) -> dict[str, object]:
    """Where and with what this was measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m bench.routes.run", *sys.argv[1:]]),
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if kind == "cuda" else [],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "group_bytes": group_bytes,
        "chunk_bytes": CHUNK_BYTES[kind],
        "weights": "random, of the shapes named",
    }


def print_peer_rows(rows: list[PeerRow]) -> None:
    print(f"{'MiB':>6} {'copy GB/s':>10} {'load GB/s':>10}")
    for row in rows:
        print(f"{row.bytes // MIB:6} {row.copy_gb_s:10.1f} {row.load_gb_s:10.1f}", flush=True)


def print_model_row(row: ModelRow) -> None:
    print(f"{row.model}, {row.bytes / 1e6:.0f} MB; resident {row.resident_ms:.2f} ms; correct: {row.correct}")
    print(f"  half to each at once {row.bytes / row.both_at_once_ms / 1e6:.1f} GB/s")
    for route, copy_ms, swap_ms in (
        ("host, one link", row.copy_one_link_ms, row.swap_run_one_link_ms),
        ("host, two links", row.copy_two_links_ms, row.swap_run_two_links_ms),
        ("peer", row.copy_peer_ms, row.swap_run_peer_ms),
    ):
        if copy_ms is not None and swap_ms is not None:
            ratio = swap_ms / row.resident_ms
            copied = f"copy {copy_ms:8.2f} ms {row.bytes / copy_ms / 1e6:6.1f} GB/s"
            print(f"  {route:16} {copied}  swap+run {swap_ms:8.2f} ms, {ratio:.3f} resident")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", type=Path, help="write rows and setting here")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--group-mib", type=float, default=8)
    parser.add_argument("--chunk-mib", type=int, help="instead of what the product takes: 2 on the CPU, 32 on a GPU")
    parser.add_argument("--only", default="", help="models whose name contains this")
    asked = parser.parse_args()
    if asked.device == "cuda" and torch.cuda.device_count() < 2:
        print("this machine has no two GPUs; --device cpu tries the program")
        return 1
    if asked.chunk_mib:
        CHUNK_BYTES[asked.device] = asked.chunk_mib * MIB
    sys.setswitchinterval(0.0005)  # as an executor does
    group_bytes = round(asked.group_mib * MIB)
    found: dict[str, object] = setting(asked.device, group_bytes)
    if asked.device == "cuda":
        found["maps_ahead"] = maps_ahead(0)
    if asked.device == "cuda":
        found["detour_memory_bytes"] = detour_memory_bytes()
        print(f"a detour takes {found['detour_memory_bytes']} bytes of the neighbour's memory")
    peers = peer_rows(asked.device, group_bytes, asked.repeats)
    print_peer_rows(peers)
    models = []
    for shape in shapes(asked.device):
        if asked.only in shape.name and not shape.tuned:
            repeats = asked.repeats if "Llama" not in shape.name else min(asked.repeats, 5)
            models.append(model_row(asked.device, shape, group_bytes, repeats))
            print_model_row(models[-1])
    if asked.json:
        rows = {"peer": [asdict(row) for row in peers], "models": [asdict(row) for row in models]}
        asked.json.write_text(json.dumps({**found, **rows}, indent=1) + "\n")
    return 0 if all(row.correct and row.source_untouched for row in models) else 1


if __name__ == "__main__":
    sys.exit(main())
