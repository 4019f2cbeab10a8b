"""A scenario file: which machine, which functions, which policies, who asks, what goes wrong. TOML.

Everything that is wrong with one is said in one line with the file, the key and, where it can be found, the line.
"""

import random
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from itertools import permutations
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from dormouse import traces, workload
from dormouse.core.binding import BINDING
from dormouse.core.eviction import EVICTION
from dormouse.core.placement import PLACEMENT
from dormouse.core.policies import SETS, with_policies
from dormouse.core.queueing import QUEUEING
from dormouse.core.replication import REPLICATION
from dormouse.core.tiering import HOST_TIER
from dormouse.core.types import Bytes, DeviceId, FunctionId, Ns, Pair, Settings, Slo, Topology
from dormouse.core.types import Link as DeviceLink
from dormouse.errors import ConfigurationFault
from dormouse.sim.faults import Faults
from dormouse.sim.hardware import MIB, MS_NS, Device, Machine, Model
from dormouse.sim.presets import MACHINES, MODELS
from dormouse.sim.world import Watcher, World

SECOND_NS: Ns = 1_000_000_000


class MachineTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``like`` names a preset; what is given besides replaces its numbers."""

    like: str = "h200"
    devices: int | None = None
    device_bytes: Bytes | None = None
    link_bytes_per_s: int | None = None
    host_bytes: Bytes | None = None
    disk_bytes_per_s: int | None = None
    hop_us: float | None = None


class ModelTable(Struct, frozen=True, forbid_unknown_fields=True):
    """A model of the user's own, or with measured numbers of a machine."""

    name: str
    image_bytes: Bytes
    resident_ms: float
    tail_ms: float = 0.0
    build_ms: float = 0.0
    deadline_ms: float = 1000.0
    percentile: float = 98.0


class FunctionsTable(Struct, frozen=True, forbid_unknown_fields=True):
    count: int
    models: tuple[str, ...] = ()
    """Dealt in turn; empty: all of the machine's presets, or all of the scenario's own."""


class PoliciesTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``like`` names a set; what is given besides replaces a policy of it."""

    like: str = "dormouse"
    binding: str | None = None
    queueing: str | None = None
    placement: str | None = None
    eviction: str | None = None
    replication: str | None = None
    host_tier: str | None = None
    load_ahead: bool | None = None
    shed_late: bool | None = None
    slo_window_s: float | None = None

    def over(self, settings: Settings) -> Settings:
        """The settings with these policies in them."""
        own = {key: getattr(self, key) for key in self.__struct_fields__ if key not in ("like", "slo_window_s")}
        if self.slo_window_s is not None:
            own["slo_window_ns"] = round(self.slo_window_s * SECOND_NS)
        given = {key: value for key, value in own.items() if value is not None}
        return msgspec.structs.replace(with_policies(self.like, settings), **given)


class WorkloadTable(Struct, frozen=True, forbid_unknown_fields=True):
    kind: Literal["poisson", "gamma", "per-minute", "servegen", "skewed", "bursts", "timers"] = "poisson"
    duration_s: float = 60.0
    requests_per_s: float = 10.0
    """Over all functions; of traces None of this is asked."""
    cv: float = 2.0
    exponent: float = 1.0
    factor: float = 10.0
    share: float = 0.1
    burst_s: float = 2.0
    shortest_s: float = 30.0
    longest_s: float = 600.0
    jitter: float = 0.02
    trace: str = ""
    scale: float = 1.0
    warm: bool = False
    """Every function is asked once before the run, which leaves no trace but where its image is."""


class Scenario(Struct, frozen=True, forbid_unknown_fields=True):
    functions: FunctionsTable
    seed: int = 42
    machine: MachineTable = MachineTable()
    model: tuple[ModelTable, ...] = ()
    policies: PoliciesTable = PoliciesTable()
    workload: WorkloadTable = WorkloadTable()
    faults: Faults = Faults()


def read(file: Path) -> Scenario:
    """A scenario, checked. Raises ConfigurationFault."""
    try:
        text = file.read_text()
        scenario = msgspec.convert(tomllib.loads(text), Scenario)
    except FileNotFoundError:
        raise ConfigurationFault(f"scenario {file} is not there") from None
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigurationFault(f"scenario {file} cannot be read: {fault}") from None
    except tomllib.TOMLDecodeError as fault:
        raise ConfigurationFault(f"scenario {file} is no TOML: {fault}") from None
    except msgspec.ValidationError as fault:
        raise ConfigurationFault(_located(file, text, str(fault))) from None
    for key, value, problem in _problems(scenario):
        raise ConfigurationFault(_at(file, text, key, f"{re.sub(_PLACE, '', key)} = {value!r}: {problem}"))
    trace = file.parent / scenario.workload.trace
    if scenario.workload.kind in WITH_TRACE and not trace.is_file():
        said = f"workload.trace = {scenario.workload.trace!r}: there is no such file"
        raise ConfigurationFault(_at(file, text, "workload.trace", said))
    return scenario


WITH_TRACE = ("per-minute", "servegen")
_PLACE = r"\[(\d+)\]"
"""Of a table in an array of tables."""


def _located(file: Path, text: str, complaint: str) -> str:
    """msgspec says the place as ``$.workload.rate``, or names an unknown field before it."""
    place = re.search(r" - at `\$\.?([^`]*)`", complaint)
    unknown = re.search(r"unknown field `([^`]+)`", complaint)
    prefix = place[1] if place else ""
    key = ".".join(filter(None, (prefix, unknown[1] if unknown else "")))
    said = complaint.partition(" - at ")[0]
    return _at(file, text, key, f"{key}: {said[0].lower()}{said[1:]}" if key else said)


def _at(file: Path, text: str, key: str, said: str) -> str:
    """With the line on which the key stands, if there is one."""
    wanted = [re.sub(r"\[.*", "", part) for part in key.split(".")]
    place = re.search(_PLACE, key)
    headers_to_pass = int(place[1]) + 1 if place else 0
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line):
            table = header[1].split(".")
            headers_to_pass -= table == wanted[:1]
        elif headers_to_pass <= 0 and (pair := re.match(r"\s*([\w-]+)\s*=", line)) and [*table, pair[1]] == wanted:
            return f"scenario {file} line {number}: {said}"
    return f"scenario {file}: {said}"


_POLICIES: dict[str, Collection[str]] = {
    "like": SETS,
    "binding": BINDING,
    "queueing": QUEUEING,
    "placement": PLACEMENT,
    "eviction": EVICTION,
    "replication": REPLICATION,
    "host_tier": HOST_TIER,
}


def _problems(scenario: Scenario) -> Iterator[tuple[str, object, str]]:
    """Key, value, and what is wrong with it."""
    if scenario.machine.like not in MACHINES:
        yield "machine.like", scenario.machine.like, f"there is no such machine; known are {', '.join(MACHINES)}"
        return
    yield from [*_bad_numbers(scenario)] or [*_unknown_names(scenario)] or _impossible(scenario)


def _unknown_names(scenario: Scenario) -> Iterator[tuple[str, object, str]]:
    known, load = _models(scenario), scenario.workload
    for name in scenario.functions.models:
        if name not in known:
            yield "functions.models", name, f"there is no such model; known are {', '.join(known)}"
    for kind, chosen in _POLICIES.items():
        name = getattr(scenario.policies, kind)
        if name is not None and name not in chosen:
            yield f"policies.{kind}", name, f"there is no such policy; known are {', '.join(chosen)}"
    if load.kind in WITH_TRACE and not load.trace:
        yield "workload.trace", load.trace, f"workload {load.kind!r} needs a trace"


_MOST_BYTES = 10**15
_RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "machine": {
        "devices": (1, 64),
        "device_bytes": (MIB, _MOST_BYTES),
        "link_bytes_per_s": (1000, _MOST_BYTES),
        "host_bytes": (MIB, _MOST_BYTES),
        "disk_bytes_per_s": (1000, _MOST_BYTES),
        "hop_us": (0, 1e6),
    },
    "functions": {"count": (1, 1_000_000)},
    "policies": {"slo_window_s": (0, 1e7)},
    "workload": {
        "duration_s": (0.001, 1e8),
        "requests_per_s": (1e-6, 1e6),
        "cv": (0.01, 100),
        "exponent": (0, 20),
        "factor": (0.001, 1e6),
        "share": (0.001, 0.999),
        "burst_s": (0.001, 1e6),
        "shortest_s": (0.001, 1e7),
        "longest_s": (0.001, 1e7),
        "jitter": (0, 0.49),
        "scale": (1e-6, 1e6),
    },
    "faults": dict.fromkeys(Faults.__struct_fields__, (0, 10_000)),
}
_MODEL_RANGES = {
    "image_bytes": (1, 10**14),
    "resident_ms": (1e-6, 1e7),
    "tail_ms": (0, 1e7),
    "build_ms": (0, 1e7),
    "deadline_ms": (1e-6, 1e7),
    "percentile": (1e-4, 100),
}


def _bad_numbers(scenario: Scenario) -> Iterator[tuple[str, object, str]]:
    for table, ranges in _RANGES.items():
        yield from _outside(table, getattr(scenario, table), ranges)
    for place, model in enumerate(scenario.model):
        yield from _outside(f"model[{place}]", model, _MODEL_RANGES)
    load = scenario.workload
    if load.longest_s < load.shortest_s:
        yield "workload.longest_s", load.longest_s, f"it must not be less than shortest_s ({load.shortest_s})"


def _outside(
    prefix: str, table: Struct, ranges: Mapping[str, tuple[float, float]]
) -> Iterator[tuple[str, object, str]]:
    for key, (least, most) in ranges.items():
        value = getattr(table, key)
        if value is None or least <= value <= most:
            continue
        positive = least > 0 and value <= 0
        yield (
            f"{prefix}.{key}",
            value,
            "it must be more than 0" if positive else f"it must be from {least:g} to {most:g}",
        )


def _impossible(scenario: Scenario) -> Iterator[tuple[str, object, str]]:
    """Models that are given twice, or that no device or not all of host memory could hold."""
    names = [model.name for model in scenario.model]
    for place, name in enumerate(names):
        if name in names[:place]:
            yield f"model[{place}].name", name, "there is a model of that name before it"
    machine, known = machine_of(scenario.machine), _models(scenario)
    room_bytes = max(d.capacity_bytes // d.chunk_bytes * d.chunk_bytes for d in machine.devices)
    for name in scenario.functions.models or known:
        size_bytes = known[name].image_bytes
        for key, most in (("device_bytes", room_bytes), ("host_bytes", machine.host_bytes)):
            if size_bytes > most:
                yield f"machine.{key}", most, f"model {name!r} has {size_bytes} bytes and could never be loaded"


def _models(scenario: Scenario) -> dict[str, Model]:
    own = {
        table.name: Model(
            table.name,
            table.image_bytes,
            round(table.resident_ms * MS_NS),
            round(table.tail_ms * MS_NS),
            Slo(round(table.deadline_ms * MS_NS), round(table.percentile * 10_000)),
            build_ns=round(table.build_ms * MS_NS),
        )
        for table in scenario.model
    }
    presets = MODELS["v100" if scenario.machine.like.startswith("v100") else "h200"]
    return own or dict(presets)


def machine_of(table: MachineTable) -> Machine:
    """The machine, with the preset's numbers replaced by the table's own."""
    machine = MACHINES[table.like]
    devices = machine.devices if table.devices is None else _so_many(machine.devices, table.devices)
    changes = {
        "capacity_bytes": table.device_bytes,
        "link_bytes_per_s": table.link_bytes_per_s,
    }
    given = {key: value for key, value in changes.items() if value is not None}
    devices = tuple(msgspec.structs.replace(device, **given) for device in devices)
    node = {
        "host_bytes": table.host_bytes,
        "disk_bytes_per_s": table.disk_bytes_per_s,
        "hop_ns": None if table.hop_us is None else round(table.hop_us * 1000),
    }
    given = {key: value for key, value in node.items() if value is not None}
    return msgspec.structs.replace(machine, devices=devices, **given)


def topology_of(machine: Machine) -> Topology:
    """What a calibration of the machine would say."""
    links = tuple(DeviceLink(DeviceId(device.name), device.link_bytes_per_s) for device in machine.devices)
    pairs = []
    for source, destination in permutations(machine.devices, 2):
        rate = machine.peers.get(f"{source.name}>{destination.name}", 0)
        detour = min(rate, source.link_bytes_per_s) if machine.detours else 0
        pairs.append(Pair(DeviceId(source.name), DeviceId(destination.name), rate, detour))
    switches = [tuple(DeviceId(d.name) for d in machine.devices if d.uplink == name) for name in machine.uplinks]
    slowest = min(device.link_bytes_per_s for device in machine.devices)
    return Topology(slowest, links=links, pairs=tuple(pairs), switches=tuple(switches))


def _so_many(devices: tuple[Device, ...], count: int) -> tuple[Device, ...]:
    kind = devices[0].name.partition(":")[0]
    return tuple(
        devices[n] if n < len(devices) else msgspec.structs.replace(devices[0], name=f"{kind}:{n}", uplink="")
        for n in range(count)
    )


def functions_of(scenario: Scenario, count: int) -> list[tuple[FunctionId, Model]]:
    """Models dealt to functions in turn."""
    known = _models(scenario)
    names = scenario.functions.models or tuple(known)
    return [(FunctionId(f"f{number}/1"), known[names[number % len(names)]]) for number in range(count)]


def world_of(scenario: Scenario, *, functions: int | None = None, watch: Watcher | None = None) -> World:
    """The world at its beginning: everything deployed, nothing asked, or all of it once."""
    machine = machine_of(scenario.machine)
    plain = Settings(
        host_capacity_bytes=machine.host_bytes,
        queue_length=1_000_000,
        topology=topology_of(machine),
    )
    settings = scenario.policies.over(plain)
    count = scenario.functions.count if functions is None else functions
    world = World(machine, settings, functions_of(scenario, count), watch=watch)
    if scenario.workload.warm:
        world.warm()
    return world


def arrivals_of(scenario: Scenario, directory: Path, *, functions: int | None = None) -> workload.Arrivals:
    """The requests of a scenario. ``directory`` is where relative traces are looked for."""
    load, seed = scenario.workload, scenario.seed
    count = scenario.functions.count if functions is None else functions
    duration_ns = round(load.duration_s * SECOND_NS)
    per_function = load.requests_per_s * load.scale * count / scenario.functions.count / count
    even = [per_function] * count
    match load.kind:
        case "poisson":
            return workload.poisson(even, duration_ns, seed)
        case "gamma":
            return workload.gamma(even, load.cv, duration_ns, seed)
        case "skewed":
            rates = workload.skewed(count, per_function * count, load.exponent, seed)
            return workload.poisson(rates, duration_ns, seed)
        case "bursts":
            burst_ns = round(load.burst_s * SECOND_NS)
            return workload.bursts(
                even, duration_ns, seed, factor=load.factor, share=load.share, mean_burst_ns=burst_ns
            )
        case "timers":
            timers = workload.Timers(load.shortest_s, load.longest_s, load.jitter)
            rate = per_function * count
            return workload.timers_among_others(
                count, rate, load.exponent, duration_ns, seed, share=load.share, timers=timers
            )
        case "per-minute":
            rows = traces.calls_per_minute(directory / load.trace)
            minutes = max(1, min(len(rows[0]), round(load.duration_s / 60)))
            drawn = workload.drawn_with_replacement(rows, count, seed)
            return workload.per_minute([row[:minutes] for row in drawn], seed)
        case "servegen":
            clients = traces.client_windows(directory / load.trace)
            dealt = [random.Random(seed + n).choice(clients) if n >= len(clients) else clients[n] for n in range(count)]
            return workload.windows(dealt, 600 * SECOND_NS, duration_ns, seed, load.scale)
