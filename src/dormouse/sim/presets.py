"""Machines and models with measured numbers, by name. Each says where its numbers come from.

V100 (Torpor, ATC'25): Table 4. Resident is "GPU remoting"; bytes are the float32 weights of torchvision's and Hugging
Face's models. Of ResNets and BERT the copy over PCIe is what a swap waits for: 9.7 GB/s is the least rate at which none
of them takes longer than the table says, the rest is the tail, and the NVLink column is how fast a pass goes that need
not wait. The other four hide their copies: the PCIe column is such a pass (NVLink's is at most 1 ms less), the tail is
next to nothing. The switch that two neighbours share carries 1.3 times what one link does: what Table 3's slowdowns of
48 and 61 % come to when a copy is beside others all the time (1.35 and 1.24). ``bench/papers`` says how far
off each is.

H200: measured through the server (``bench/density/profiled``, 2026-11-30, driver 580, CUDA 13.0, PyTorch 2.11), the
same eight models from graphs, BERT with 512 tokens; 54.1 GB/s a link, each GPU its own, 0.4 ms a load beside its bytes;
0.2 ms from core to executor or back; 330 GB/s between GPUs, mapping included (``bench/routes``).
"""

from dormouse.core.types import Bytes, Ns, Slo
from dormouse.sim.hardware import GB, MIB, MS_NS, Device, Machine, Model

V100_LINK_BYTES_PER_S = 9_700_000_000
V100_SWITCH_BYTES_PER_S = V100_LINK_BYTES_PER_S * 130 // 100
H200_LINK_BYTES_PER_S = 54_141_000_000

VISION = Slo(80 * MS_NS, 980_000)
LANGUAGE = Slo(200 * MS_NS, 980_000)


def _waiting(name: str, image_bytes: Bytes, times_ms: tuple[int, int, int], slo: Slo = VISION) -> Model:
    """A swap over PCIe ends with its copy. Times: resident, over PCIe, over NVLink."""
    resident_ms, pcie_ms, nvlink_ms = times_ms
    copy_ns = image_bytes * 1_000_000_000 // V100_LINK_BYTES_PER_S
    return Model(name, image_bytes, resident_ms * MS_NS, pcie_ms * MS_NS - copy_ns, slo, nvlink_ms * MS_NS)


def _hiding(name: str, image_bytes: Bytes, resident_ms: int, pcie_ms: int) -> Model:
    """A swap takes a little longer than a run, however it is copied."""
    return Model(name, image_bytes, resident_ms * MS_NS, MS_NS, VISION, pcie_ms * MS_NS)


PAPER_MODELS = {
    model.name: model
    for model in (
        _waiting("resnet-50", 102_548_480, (9, 13, 11)),
        _waiting("resnet-101", 178_619_904, (14, 22, 16)),
        _waiting("resnet-152", 241_530_880, (17, 25, 20)),
        _hiding("densenet-169", 57_230_848, 25, 27),
        _hiding("densenet-201", 80_946_688, 28, 30),
        _hiding("inception-v3", 108_938_752, 14, 17),
        _hiding("efficientnet", 21_320_704, 12, 13),
        _waiting("bert-qa", 1_336_410_112, (43, 144, 45), LANGUAGE),
    )
}
"""In the order of the paper's mix: function n is model n mod 8."""


def _h200_model(name: str, image_bytes: Bytes, resident_us: Ns, tail_us: Ns, slo: Slo = VISION) -> Model:
    return Model(name, image_bytes, resident_us * 1000, tail_us * 1000, slo)


H200_MODELS = {
    model.name: model
    for model in (
        _h200_model("resnet-50", 102_454_176, 1_122, 191),
        _h200_model("resnet-101", 178_644_640, 1_896, 148),
        _h200_model("resnet-152", 241_416_608, 2_661, 149),
        _h200_model("densenet-169", 57_295_776, 2_705, 2_176),
        _h200_model("densenet-201", 81_048_480, 3_205, 2_322),
        _h200_model("inception-v3", 95_513_504, 1_872, 723),
        _h200_model("efficientnet", 21_359_776, 891, 823),
        _h200_model("bert-qa", 1_336_385_544, 13_971, 360, LANGUAGE),
    )
}
"""In the same order."""


def _v100s(count: int, memory_bytes: Bytes = 25 * GB) -> Machine:
    # PCIe switches are shared by (0,1) and (2,3); NVLink is fast between 0-3, 1-2, 2-3 and slow between 0-1, 0-2, 1-3.
    devices = tuple(
        Device(
            f"v100:{number}",
            memory_bytes,
            V100_LINK_BYTES_PER_S,
            uplink=f"switch:{number // 2}",
            chunk_bytes=2 * MIB,
        )
        for number in range(count)
    )
    fast = {(0, 3), (1, 2), (2, 3)}
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    peers = {f"v100:{a}>v100:{b}": (40 if (min(a, b), max(a, b)) in fast else 20) * GB for a, b in pairs}
    switches = {device.uplink: V100_SWITCH_BYTES_PER_S for device in devices}
    return Machine(devices, switches, peers)


def _h200s(count: int, memory_bytes: Bytes = 25 * GB) -> Machine:
    devices = tuple(
        Device(f"h200:{number}", memory_bytes, H200_LINK_BYTES_PER_S, load_overhead_ns=402_000)
        for number in range(count)
    )
    pairs = [(one.name, other.name) for one in devices for other in devices if one is not other]
    return Machine(
        devices,
        {},
        {f"{one}>{other}": 330 * GB for one, other in pairs},
        detours=True,
        host_bytes=1000 * GB,
        hop_ns=200_000,
    )


MACHINES = {
    "v100": _v100s(1),
    "v100x4": _v100s(4),
    "h200": _h200s(1),
    "h200x2": _h200s(2),
    "h200x8": _h200s(8),
}
MODELS = {"v100": PAPER_MODELS, "h200": H200_MODELS}
