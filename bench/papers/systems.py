"""The systems that the papers compare, as policies of the core and machines of the simulator. Knows no figure.

Each is a set of policies, what a function occupies and costs there, and which ways images have.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from dormouse.core.types import Bytes, FunctionId, Limits, Ns, Settings, Slo
from dormouse.sim.hardware import GB, MIB, MS_NS, Device, Machine, Model
from dormouse.sim.presets import MACHINES, PAPER_MODELS
from dormouse.sim.scenario import topology_of
from dormouse.sim.world import World

NATIVE_MS = {
    "resnet-50": 11,
    "resnet-101": 20,
    "resnet-152": 25,
    "densenet-169": 30,
    "densenet-201": 36,
    "inception-v3": 19,
    "efficientnet": 17,
    "bert-qa": 42,
}
"""Table 4, "Native"."""
RUNTIME_BYTES: Bytes = 1_600 * 10**6 - PAPER_MODELS["resnet-152"].image_bytes
"""Table 1 has 1.6 GB for ResNet-152; what is not weights is taken to be the same for the others of its kind."""
BERT_NATIVE_BYTES: Bytes = 2_400 * 10**6
NATIVE_DEVICE_BYTES: Bytes = 30 * GB
COLD_START_S = 8
"""Table 1, ResNet-152, conventional; the same for all."""
BLOCK_TIMES = 4
"""Torpor-Block: allocating block by block costs more than so many inferences (Fig. 13); taken as just so many."""
ENDLESS = Limits(10**9, 10**18)
PATIENT = Limits(10**9, 60 * 10**9)
IMPATIENT = Limits(10**9, 2 * 10**9)
"""Where a function that found no place never gets one, so that its requests do not wait for ever."""


@dataclass(frozen=True)
class System:
    """``peers``: whether images go from device to device. ``footprint``: a runtime of its own for every function.
    ``block``: memory is allocated block by block. ``cold``: images come as cold starts."""

    name: str
    binding: str = "late"
    queueing: str = "torpor"
    placement: str = "torpor"
    eviction: str = "torpor"
    peers: bool = True
    footprint: bool = False
    block: bool = False
    cold: bool = False
    alpha_ppm: int = 1_000_000


TORPOR = System("Torpor")
FIFO = replace(TORPOR, name="Torpor-FIFO", queueing="fifo")
LRU = replace(TORPOR, name="Torpor-LRU", eviction="lru")
BLOCK = replace(TORPOR, name="Torpor-Block", block=True)
RANDOM = replace(TORPOR, name="Torpor-Random", placement="random", peers=False)
NATIVE = System("Native", queueing="fifo", placement="bound", eviction="never", peers=False, footprint=True)
NON_SWAP = replace(NATIVE, name="NonSwap", footprint=False)
SIMPLE_SWAP = System("SimpleSwap", queueing="fifo", placement="random", eviction="lru", peers=False)
KEEP_ALIVE = System(
    "INFless-KA",
    binding="lanes",
    queueing="fifo",
    placement="least-displacing",
    eviction="keep-alive",
    peers=False,
    footprint=True,
    cold=True,
)
RRC_SIMULATOR = System("RRC", queueing="torpor-fixed", placement="random", eviction="lru")


def model_of(system: System, name: str, deadline_ns: Ns | None = None) -> Model:
    """What a function of a model costs under a system; with another deadline, if one is given."""
    model = PAPER_MODELS[name]
    if deadline_ns is not None:
        model = msgspec.structs.replace(model, slo=Slo(deadline_ns, model.slo.share_ppm))
    if system.footprint:
        own_bytes = BERT_NATIVE_BYTES if name == "bert-qa" else model.image_bytes + RUNTIME_BYTES
        resident_ns = NATIVE_MS[name] * MS_NS
        return msgspec.structs.replace(model, image_bytes=own_bytes, resident_ns=resident_ns, tail_ns=0, streamed_ns=0)
    if system.block:
        wait_ns = BLOCK_TIMES * model.resident_ns
        return msgspec.structs.replace(
            model, tail_ns=model.tail_ns + wait_ns, streamed_ns=(model.streamed_ns or model.resident_ns) + wait_ns
        )
    return model


def machine_of(system: System, devices: int = 4) -> Machine:
    """Four V100 behind two switches, or one."""
    machine = MACHINES["v100x4" if devices == 4 else "v100"]
    changes: dict[str, int] = {}
    if system.footprint:
        changes["capacity_bytes"] = NATIVE_DEVICE_BYTES
    if system.cold:
        changes["link_bytes_per_s"] = PAPER_MODELS["resnet-152"].image_bytes + RUNTIME_BYTES
        changes["link_bytes_per_s"] //= COLD_START_S
    cards = tuple(msgspec.structs.replace(device, **changes) for device in machine.devices)
    peers = machine.peers if system.peers else {}
    return msgspec.structs.replace(machine, devices=cards, peers=peers, host_bytes=10_000 * GB)


def world_of(system: System, models: list[Model], machine: Machine | None = None) -> World:
    """All deployed, nothing asked."""
    machine = machine or machine_of(system)
    settings = Settings(
        machine.host_bytes,
        binding=system.binding,
        queueing=system.queueing,
        placement=system.placement,
        eviction=system.eviction,
        replication="none",
        alpha_ppm=system.alpha_ppm,
        slo_window_ns=0,
        queue_length=10**9,
        topology=topology_of(machine),
    )
    functions = [(FunctionId(f"f{number}/1"), model) for number, model in enumerate(models)]
    return World(machine, settings, functions, limits=_limits_of(system))


def _limits_of(system: System) -> Limits:
    if system.cold:
        return PATIENT
    return IMPATIENT if system.eviction == "never" else ENDLESS


# The authors' own simulator of a node (its constants; model A).
SIMULATOR_MODEL = Model("model-a", 300 * 10**6, 19 * MS_NS, 0, Slo(50 * MS_NS, 980_000))
_HOST_MS, _CONTENDED_MS = 25, 41


def simulator_machine(system: System) -> Machine:
    """A load from the host takes 25 ms, two at once behind one switch 41 ms each, one from a neighbour hides."""
    link = SIMULATOR_MODEL.image_bytes * 1000 // _HOST_MS
    cards = tuple(
        Device(f"v100:{n}", 30 * GB, link, uplink=f"switch:{n // 2}", chunk_bytes=MIB, evict_ns=0) for n in range(4)
    )
    names = [card.name for card in cards]
    peers = {f"{a}>{b}": 100 * GB for a in names for b in names if a != b} if system.peers else {}
    switches = {card.uplink: link * 2 * _HOST_MS // _CONTENDED_MS for card in cards}
    return Machine(cards, switches, peers, host_bytes=10_000 * GB, hop_ns=0)


def trace_files(directory: Path) -> tuple[Path, Path]:
    """Torpor's samples by minute, and its rates by function."""
    return directory / "torpor" / "samples.npy", directory / "torpor" / "invoc_pattern.txt"
