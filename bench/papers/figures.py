"""The figures and tables: which runs each needs, what the paper says, and how what we get is said."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import msgspec
from bench.papers import systems
from bench.papers.measuring import (
    P90_PPM,
    P98_PPM,
    Devices,
    Measured,
    device_times_ms,
    serve,
    together,
)
from bench.papers.systems import System
from msgspec import Struct

from dormouse import traces, workload
from dormouse.core.types import Ns
from dormouse.errors import ConfigurationFault
from dormouse.sim.hardware import MS_NS, Model
from dormouse.sim.presets import PAPER_MODELS

SEED = 42
MINUTES = 31
SHORT_MINUTES = 5
MIX = tuple(PAPER_MODELS)
SECOND_NS: Ns = 1_000_000_000


class Row(Struct, frozen=True):
    """One line of the table."""

    figure: str
    policy: str
    functions: int
    compliant: int | None
    """Functions inside their SLO; None where the figure is not about that."""
    paper: str
    ours: str


@dataclass(frozen=True)
class Case:
    """One run of seconds to a minute. ``weight``: how long it takes beside others."""

    figure: str
    measure: Callable[[], list[Row]]
    weight: float = 1.0
    quick: bool = False


def rates_of(directory: Path, functions: int, minutes: int = MINUTES) -> list[list[int]]:
    """Calls a minute, functions drawn with replacement from the published samples."""
    rows = traces.calls_per_minute(systems.trace_files(directory)[0])
    return [list(row[:minutes]) for row in workload.drawn_with_replacement(rows, functions, SEED)]


def pattern_of(file: Path) -> list[float]:
    """Torpor's rates, a function each."""
    try:
        return [float(word) for word in file.read_text().replace(",", " ").split()]
    except (OSError, ValueError) as fault:
        raise ConfigurationFault(f"trace {file} cannot be read: {fault}") from None


# ---------------------------------------------------------------------- tables 3 and 4

TABLE_4 = {
    "densenet-169": (25, 27, 26),
    "densenet-201": (28, 30, 30),
    "inception-v3": (14, 17, 16),
    "efficientnet": (12, 13, 13),
    "resnet-50": (9, 13, 11),
    "resnet-101": (14, 22, 16),
    "resnet-152": (17, 25, 20),
    "bert-qa": (43, 144, 45),
}
"""GPU remoting, swap over PCIe, swap over NVLink; milliseconds."""
TABLE_3 = {
    ("densenet-169", "resnet-152"): 0,
    ("densenet-169", "bert-qa"): 0,
    ("resnet-152", "densenet-169"): 7,
    ("resnet-152", "bert-qa"): 48,
    ("bert-qa", "densenet-169"): 11,
    ("bert-qa", "resnet-152"): 61,
}
"""Row model beside column model: how much longer its swap takes, in percent."""
SWAPS = 20


def table_4(name: str) -> list[Row]:
    model = PAPER_MODELS[name]
    world = systems.world_of(systems.TORPOR, [model, model])
    # Cold; resident; the other function takes the device; so it is copied from there to a neighbour.
    took = device_times_ms(world, iter([(0, 0), (SECOND_NS, 0), (2 * SECOND_NS, 1), (2 * SECOND_NS + 1, 0)]))
    ours = (took[2], took[1], took[4])
    said = "resident {:.0f}, PCIe {:.0f}, NVLink {:.0f} ms"
    return [Row("Table 4", name, 1, None, said.format(*TABLE_4[name]), said.format(*ours))]


def table_3(row: str, column: str) -> list[Row]:
    alone, beside = _swap_ms(row, None), _swap_ms(row, column)
    percent = round((beside / alone - 1) * 100)
    paper = f"+{TABLE_3[row, column]} %"
    ours = f"+{percent} % ({alone:.0f} to {beside:.0f} ms)"
    return [Row("Table 3", f"{row} beside {column}", 2, None, paper, ours)]


def _swap_ms(row: str, column: str | None) -> float:
    """Two devices behind a switch have room for one image each and functions of their own; the neighbour swaps without
    pause."""
    models = [PAPER_MODELS[row], PAPER_MODELS[column or row]]
    machine = systems.machine_of(systems.SIMPLE_SWAP)
    cards = tuple(
        msgspec.structs.replace(card, capacity_bytes=model.image_bytes * 3 // 2)
        for card, model in zip(machine.devices, models, strict=False)
    )
    system = replace(systems.SIMPLE_SWAP, placement="bound")
    world = systems.world_of(system, models * 2, msgspec.structs.replace(machine, devices=cards))
    # Functions 0 and 2 are the row's, 1 and 3 the column's.
    apart_ns = 1_000 * MS_NS
    asked = [(n * apart_ns, n % 2 * 2) for n in range(SWAPS)]
    if column is not None:
        busy_ms = _swap_ms(column, None)
        beside = [(0, 1 + n % 2 * 2) for n in range(round(SWAPS * apart_ns / MS_NS / busy_ms) + SWAPS)]
        asked = sorted([*asked, *beside], key=lambda request: request[0])
    numbers = [number for number, (_, function) in enumerate(asked, 1) if function % 2 == 0]
    took = device_times_ms(world, iter(asked))
    return fmean(took[number] for number in numbers[1:])


# ---------------------------------------------------------------------- figure 8


def figure_8(system: System, functions: int, per_minute: int, paper: str) -> list[Row]:
    models = [systems.model_of(system, "resnet-152")] * functions
    machine = systems.machine_of(system, devices=1)
    if system.footprint:
        cards = tuple(msgspec.structs.replace(c, capacity_bytes=32 * 10**9) for c in machine.devices)
        machine = msgspec.structs.replace(machine, devices=cards)
    world = systems.world_of(system, models, machine)
    measured = serve(world, workload.per_minute([[per_minute] * SHORT_MINUTES] * functions, SEED))
    return [_row("Fig. 8", f"{system.name}, {per_minute}/min", measured, paper, _throughput(measured))]


def _row(figure: str, policy: str, measured: Measured, paper: str, ours: str) -> Row:
    return Row(figure, policy, measured.functions, measured.compliant, paper, ours)


def _throughput(measured: Measured) -> str:
    return f"{measured.requests / measured.seconds:.1f} requests/s, P98 {measured.latency_ms(P98_PPM):.0f} ms"


# ---------------------------------------------------------------------- figure 9


def figure_9(system: System, directory: Path, seed: int, paper: str) -> list[Row]:
    pattern = pattern_of(systems.trace_files(directory)[1])
    rates = [round(rate * 10) for rate in random.Random(seed).choices(pattern, k=40)]
    world = systems.world_of(system, [systems.model_of(system, "resnet-152")] * 40)
    world.warm()
    devices = Devices()
    world.watch = devices.watch
    measured = serve(world, workload.per_minute([[rate] * SHORT_MINUTES for rate in rates], seed), warm=False)
    tails = ", ".join(f"{tail:.0f}" for tail in devices.tails_ms())
    ours = f"CoV {devices.imbalance():.2f}, P98 by GPU {tails} ms, busy {measured.busy:.0%}"
    return [_row("Fig. 9", f"{system.name}, draw {seed}", measured, paper, ours)]


# ---------------------------------------------------------------------- figure 10


def figure_10(system: System, directory: Path, functions: int, paper: str) -> list[Row]:
    rates = rates_of(directory, functions, SHORT_MINUTES)
    world = systems.world_of(system, [systems.model_of(system, "resnet-152")] * functions)
    arrivals = workload.per_minute(rates, SEED)
    if system.cold:
        measured = serve(world, arrivals, warm=False, history=workload.per_minute(rates, SEED + 1))
    else:
        measured = serve(world, arrivals)
    ours = f"{measured.run} run, {measured.compliant} compliant, P98 {measured.latency_ms(P98_PPM):.0f} ms"
    return [_row("Fig. 10", system.name, measured, paper, ours)]


# ---------------------------------------------------------------------- figures 11 and 12


def figure_11(system: System, directory: Path, functions: int, paper: str, minutes: int = MINUTES) -> list[Row]:
    models = [systems.model_of(system, MIX[number % len(MIX)]) for number in range(functions)]
    world = systems.world_of(system, models)
    measured = serve(world, workload.per_minute(rates_of(directory, functions, minutes), SEED))
    ours = f"{measured.compliant / functions:.1%}, {measured.in_time / measured.requests:.2%} of requests in time"
    rows = [_row("Fig. 11", system.name, measured, paper, ours)]
    if functions == FIGURE_12_FUNCTIONS and system.name in FIGURE_12:
        p90, p98 = (measured.latency_ms(share, "bert-qa") for share in (P90_PPM, P98_PPM))
        bert = f"BERT P90 {p90:.0f}, P98 {p98:.0f} ms"
        rows.append(_row("Fig. 12", system.name, measured, FIGURE_12[system.name], bert))
    return rows


FIGURE_12_FUNCTIONS = 480
FIGURE_12 = {"Torpor": "BERT inside 200 ms", "Torpor-LRU": "BERT beyond 200 ms"}


def figure_12_memory() -> list[Row]:
    share = PAPER_MODELS["bert-qa"].image_bytes / sum(model.image_bytes for model in PAPER_MODELS.values())
    return [Row("Fig. 12", "memory", 8, None, "BERT is 60 % of the memory", f"{share:.0%} of the weights")]


# ---------------------------------------------------------------------- figure 14

NODES = 6


def figure_14(system: System, directory: Path, functions: int, scale: float, paper: str) -> list[Row]:
    rates = rates_of(directory, functions, SHORT_MINUTES)
    parts = []
    for node in range(NODES):
        # Eight at a time, so that every node has the whole mix.
        numbers = [number for number in range(functions) if number // len(MIX) % NODES == node]
        models = [_lenient(system, MIX[number % len(MIX)]) for number in numbers]
        scaled = [[round(rate * scale) for rate in rates[number]] for number in numbers]
        parts.append(serve(systems.world_of(system, models), workload.per_minute(scaled, SEED + node)))
    measured = together(parts)
    worst = max(measured.latency_ms(P98_PPM, name) / (250 if name == "bert-qa" else 150) for name in MIX)
    ours = f"{measured.run} run, {measured.compliant} compliant, worst model's P98 {worst:.1f} x its deadline"
    return [_row("Fig. 14", f"{system.name}, rates x {scale:g}", measured, paper, ours)]


def _lenient(system: System, name: str) -> Model:
    return systems.model_of(system, name, (250 if name == "bert-qa" else 150) * MS_NS)


# ---------------------------------------------------------------------- the authors' simulator


def simulator(system: System, directory: Path, functions: int, said: tuple[float, float]) -> list[Row]:
    world = systems.world_of(system, [systems.SIMULATOR_MODEL] * functions, systems.simulator_machine(system))
    measured = serve(world, workload.per_minute(rates_of(directory, functions), SEED), warm=False)
    share = measured.compliant / functions
    low, high = said
    off = max(low - share, share - high, 0.0)
    paper = f"{low:g}" if low == high else f"{low:g} to {high:g} over four seeds"
    return [_row("simulator", system.name, measured, paper, f"{share:.3f}, {off:.3f} off; busy {measured.busy:.2f}")]


def rrc(percent: int) -> System:
    return replace(systems.RRC_SIMULATOR, name=f"RRC, alpha {percent} %", alpha_ppm=percent * 10_000)


SIMULATOR_FIFO = replace(systems.RRC_SIMULATOR, name="FIFO", queueing="fifo")
SIMULATOR = {
    560: ((SIMULATOR_FIFO, (0.998, 1.0)), (rrc(1), (0.995, 0.998)), (rrc(100), (1.0, 1.0))),
    640: ((SIMULATOR_FIFO, (0.575, 0.711)), (rrc(1), (0.795, 0.811)), (rrc(100), (0.897, 0.958))),
    720: ((SIMULATOR_FIFO, (0.0, 0.0)), (rrc(1), (0.156, 0.156)), (rrc(100), (0.0, 0.0))),
}
"""By functions: the share that was compliant in the authors' simulator, with the seeds that were tried."""


# ---------------------------------------------------------------------- all of them


def cases(directory: Path) -> Iterator[Case]:
    """Every run of the table, in its order."""
    for pair in TABLE_3:
        yield Case("Table 3", partial(table_3, *pair), 0.1, quick=True)
    for name in TABLE_4:
        yield Case("Table 4", partial(table_4, name), 0.1, quick=True)
    yield from _eight()
    yield from _nine(directory)
    yield from _ten(directory)
    yield from _eleven(directory)
    yield Case("Fig. 12", figure_12_memory, 0.1, quick=True)
    yield from _fourteen(directory)
    for functions, policies in SIMULATOR.items():
        for system, said in policies:
            yield Case("simulator", partial(simulator, system, directory, functions, said), functions / 15)


def _eight() -> Iterator[Case]:
    for per_minute in (80, 60, 40, 20, 10):
        yield Case("Fig. 8", partial(figure_8, systems.NATIVE, 19, per_minute, "-"), 1, quick=per_minute == 10)
    for functions, per_minute in ((33, 80), (40, 60), (60, 40), (120, 20), (210, 10)):
        paper = "> 10 x Native's throughput, tail < 50 ms" if per_minute == 10 else "-"
        yield Case("Fig. 8", partial(figure_8, systems.TORPOR, functions, per_minute, paper), 3, quick=per_minute == 10)


def _nine(directory: Path) -> Iterator[Case]:
    for seed in (1, 2, 3):
        yield Case("Fig. 9", partial(figure_9, systems.NATIVE, directory, seed, "tail of seconds on hot GPUs"), 5)
        yield Case("Fig. 9", partial(figure_9, systems.TORPOR, directory, seed, "about 35 ms on every GPU"), 5)


def _ten(directory: Path) -> Iterator[Case]:
    papers = {
        systems.TORPOR: "160 run, 160 compliant",
        systems.NATIVE: "72 run",
        systems.KEEP_ALIVE: "112 run, 7 compliant",
    }
    for functions in (40, 80, 120, 160):
        for system, paper in papers.items():
            said = paper if functions == 160 else "all compliant" if system is systems.TORPOR else "-"
            yield Case("Fig. 10", partial(figure_10, system, directory, functions, said), 4, quick=functions == 160)


def _eleven(directory: Path) -> Iterator[Case]:
    torpor = {320: "all compliant", 400: "all compliant", 480: "all compliant", 560: "> 80 %"}
    for functions, paper in torpor.items():
        yield Case("Fig. 11", partial(figure_11, systems.TORPOR, directory, functions, paper), functions / 10)
        if functions >= 480:  # below, all but Random look alike
            for system in (systems.FIFO, systems.LRU, systems.BLOCK):
                yield Case("Fig. 11", partial(figure_11, system, directory, functions, "below Torpor"), functions / 10)
        if functions <= 400:
            yield Case("Fig. 11", partial(figure_11, systems.RANDOM, directory, functions, "the worst"), functions / 10)


FIGURE_14_SCALE = 2.88
"""Then a node with its sixth of 1,000 functions is asked as often as one with 480 in Fig. 11."""


def _fourteen(directory: Path) -> Iterator[Case]:
    for scale in (1.0, FIGURE_14_SCALE):
        papers = {
            systems.TORPOR: "1,000 compliant",
            systems.NATIVE: "at most 500",
            systems.NON_SWAP: "tail > 7 x",
            systems.SIMPLE_SWAP: "tail > 4 x",
        }
        for system, paper in papers.items():
            yield Case("Fig. 14", partial(figure_14, system, directory, 1000, scale, paper), 20 * scale)


def chosen(directory: Path, *, quick: bool, only: str) -> Iterator[Case]:
    """All of them, or those of a minute, or those of one figure."""
    for case in cases(directory):
        if (case.quick or not quick) and case.figure.startswith(only):
            yield case
