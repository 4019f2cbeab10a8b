"""What simulated machines and models are like: devices, the links between them, and what a model costs on them."""

from msgspec import Struct

from dormouse.core.types import Bytes, Ns, Pin, Slo

MIB: Bytes = 1024 * 1024
GB: Bytes = 10**9
MS_NS: Ns = 1_000_000


class Model(Struct, frozen=True):
    """What one model costs, alone on a device. Loading is bytes over a link; the rest is time."""

    name: str
    image_bytes: Bytes
    resident_ns: Ns
    """One execution when all of the image is there."""
    tail_ns: Ns
    """From the last byte's arrival to the answer, when it runs while it arrives."""
    slo: Slo
    streamed_ns: Ns = 0
    """One execution that begins before all of the image is there, if it never has to wait for a byte; 0: as any."""
    build_ns: Ns = 0
    """Before the first load on a device."""
    pin: Pin = Pin.NONE


class Device(Struct, frozen=True):
    """One device; ``uplink`` names what it shares with its neighbours, empty: nothing."""

    name: str
    capacity_bytes: Bytes
    link_bytes_per_s: int
    uplink: str = ""
    chunk_bytes: Bytes = 32 * MIB
    load_overhead_ns: Ns = 0
    """Before the first byte of a load moves: mapping the first chunks, starting the copy."""
    evict_ns: Ns = 100_000


class Machine(Struct, frozen=True):
    """One node."""

    devices: tuple[Device, ...]
    uplinks: dict[str, int] = {}
    """Bytes per second by name of what several devices share."""
    peers: dict[str, int] = {}
    """Bytes per second from one device to another, by ``source>target``; a pair that is missing has no link."""
    detours: bool = False
    """Whether a load may take a part of its way over the links of others."""
    host_bytes: Bytes = 384 * GB
    disk_bytes_per_s: int = 2 * GB
    hop_ns: Ns = 50_000
    """A message between control and an executor."""
