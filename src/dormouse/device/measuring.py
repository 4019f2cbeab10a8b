"""Measures this machine's links and what mapping costs: ``python -m dormouse.device.measuring`` prints it as JSON.

A process of its own, because it leaves a context on every card until it ends. It uses the devices as executors do, so
what is measured is what a load will get: pieces queued one behind another, each with its fence. Rates are medians.
"""

import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

from msgspec import Struct, json

from dormouse.core.types import Bytes, Ns
from dormouse.device.base import Region
from dormouse.device.driver import Driver
from dormouse.device.vmm import CHUNK_BYTES, VmmDevice
from dormouse.errors import DeviceError

MIB: Bytes = 1024 * 1024
POOL_BYTES: Bytes = 256 * MIB
COPY_SIZES: tuple[Bytes, ...] = tuple(size * 1024 for size in (64, 256, 1024, 2048, 4096, 8192, 16384, 65536, 262144))
PEER_SIZES: tuple[Bytes, ...] = tuple(size * MIB for size in (2, 8, 16, 64, 256))
CHUNK_SIZES: tuple[Bytes, ...] = tuple(size * MIB for size in (2, 8, 32, 128))
PIECE_BYTES: Bytes = 8 * MIB
MOST_COPIES = 64
"""At a time, of the smallest sizes."""
REPEATS = 5
ELBOW_PERCENT = 95
SLOW_BESIDE_COPIES = 3
"""So many times as long as on an idle device."""
_BILLION = 1_000_000_000


class Machine(Struct, frozen=True):
    """What a measurement is of."""

    cards: tuple[str, ...]
    """Name, driver and place on the bus."""


class Rate(Struct, frozen=True, array_like=True):
    size_bytes: Bytes
    bytes_per_s: int


class MapCost(Struct, frozen=True):
    """Of one chunk, mapped and unmapped together with others."""

    chunk_bytes: Bytes
    map_ns: Ns
    unmap_ns: Ns
    beside_copies_ns: Ns
    """To map it while an image is being copied in: on some machines that waits for the copies."""

    @property
    def is_slow_beside_copies(self) -> bool:
        return self.beside_copies_ns > SLOW_BESIDE_COPIES * self.map_ns


class CardMeasured(Struct, frozen=True):
    device: str
    from_host: tuple[Rate, ...]
    elbow_bytes: Bytes
    """The smallest piece that comes at 95 % of the best rate."""
    to_host_bytes_per_s: int
    maps: tuple[MapCost, ...]

    @property
    def maps_ahead(self) -> bool:
        """Whether loads had better be mapped before their first copy."""
        return any(cost.is_slow_beside_copies for cost in self.maps if cost.chunk_bytes == CHUNK_BYTES)

    @property
    def best_bytes_per_s(self) -> int:
        return max(rate.bytes_per_s for rate in self.from_host)


class PairMeasured(Struct, frozen=True):
    """From the source to the destination."""

    source: str
    destination: str
    both_links_bytes_per_s: int
    """From host memory to both at once, together."""
    peer: tuple[Rate, ...] = ()
    """From the memory of one to that of the other; nothing if there is no way."""
    two_links_bytes_per_s: int = 0
    """From host memory to the destination, half of it over the source's link; 0 if there is no way."""


class Measured(Struct, frozen=True):
    machine: Machine
    cards: tuple[CardMeasured, ...] = ()
    pairs: tuple[PairMeasured, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be measured, and why; a line each."""
    took_ns: Ns = 0


def machine_of(driver: Driver) -> Machine:
    """This machine. Makes no context."""
    cards = range(driver.device_count())
    return Machine(tuple(f"{driver.description(card)}, {driver.address_on_bus(card)}" for card in cards))


def measure(driver: Driver, pool_bytes: Bytes = POOL_BYTES) -> Measured:
    """Everything about every card, with so much memory on each. Raises DeviceError if one cannot be used."""
    began = time.monotonic_ns()
    count = driver.device_count()
    chunks = [size for size in CHUNK_SIZES if size <= pool_bytes]
    with ExitStack() as closing:
        maps = [tuple(map_cost(driver, card, pool_bytes, chunk) for chunk in chunks) for card in range(count)]
        stands = [_Stand(driver, card, pool_bytes, closing) for card in range(count)]
        cards = tuple(_card(stand, costs) for stand, costs in zip(stands, maps, strict=True))
        notes: list[str] = []
        if count == 1:
            notes.append("one GPU: no other to copy from, and no other link to borrow")
        pairs = tuple(_pair(driver, one, other, notes) for one in stands for other in stands if one is not other)
        return Measured(machine_of(driver), cards, pairs, tuple(notes), time.monotonic_ns() - began)


class _Stand:
    """A device with a small pool all of which is mapped, and host memory that it may copy from."""

    def __init__(
        self, driver: Driver, card: int, pool_bytes: Bytes, closing: ExitStack, chunk_bytes: Bytes = CHUNK_BYTES
    ) -> None:
        self.pool_bytes = pool_bytes
        self.device = VmmDevice(card, pool_bytes, min(chunk_bytes, pool_bytes), driver=driver)
        closing.callback(self.device.close)
        self.region: Region = self.device.reserve(pool_bytes)
        self.device.map(self.region, pool_bytes)
        memory = mmap.mmap(-1, pool_bytes)
        self.host = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory = memory
        self.device.register_host(self.host, pool_bytes)

    def from_host(self, offset: Bytes, size_bytes: Bytes, detour: str | None = None) -> None:
        self.device.copy_in(self.region, offset, self.host + offset, size_bytes, detour)

    def to_host(self, offset: Bytes, size_bytes: Bytes) -> None:
        self.device.copy_out(self.region, offset, self.host + offset, size_bytes)

    def rates(self, sizes: tuple[Bytes, ...], copy: Callable[[Bytes, Bytes], None]) -> tuple[Rate, ...]:
        return tuple(Rate(size, self.rate(size, copy)) for size in sizes if size <= self.pool_bytes)

    def rate(self, size_bytes: Bytes, copy: Callable[[Bytes, Bytes], None]) -> int:
        """Bytes a second of copies of that size, queued one behind another."""
        offsets = range(0, self.pool_bytes - size_bytes + 1, size_bytes)[:MOST_COPIES]

        def once() -> None:
            for offset in offsets:
                copy(offset, size_bytes)
                fence = self.device.fence()
            fence.synchronize()

        return len(offsets) * size_bytes * _BILLION // _median_ns(once)


def _median_ns(work: Callable[[], None]) -> Ns:
    """At the second try and later: the first one warms up."""
    took = []
    for _ in range(REPEATS + 1):
        began = time.monotonic_ns()
        work()
        took.append(time.monotonic_ns() - began)
    return max(round(median(took[1:])), 1)


def _card(stand: _Stand, maps: tuple[MapCost, ...]) -> CardMeasured:
    rates = stand.rates(COPY_SIZES, stand.from_host)
    best = max(rate.bytes_per_s for rate in rates)
    elbow = next(rate.size_bytes for rate in rates if rate.bytes_per_s * 100 >= best * ELBOW_PERCENT)
    return CardMeasured(stand.device.id, rates, elbow, stand.rate(stand.pool_bytes, stand.to_host), maps)


def map_cost(driver: Driver, card: int, pool_bytes: Bytes = POOL_BYTES, chunk_bytes: Bytes = CHUNK_BYTES) -> MapCost:
    """What mapping costs on an idle device and beside copies."""
    with ExitStack() as closing:
        stand = _Stand(driver, card, pool_bytes, closing, chunk_bytes)
        device, half = stand.device, stand.pool_bytes // chunk_bytes // 2 * chunk_bytes
        other = device.reserve(max(half, chunk_bytes))
        took: dict[str, list[Ns]] = {"map": [], "beside": [], "unmap": []}

        def timed(name: str, work: Callable[[], None]) -> None:
            began = time.monotonic_ns()
            work()
            took[name].append((time.monotonic_ns() - began) * chunk_bytes // other.reserved_bytes)

        for _ in range(REPEATS + 1):
            device.unmap(stand.region)
            timed("map", lambda: device.map(other, other.reserved_bytes))
            timed("unmap", lambda: device.unmap(other))
            device.map(stand.region, half)
            for offset in range(0, half - PIECE_BYTES + 1, PIECE_BYTES):
                stand.from_host(offset, PIECE_BYTES)
            timed("beside", lambda: device.map(other, other.reserved_bytes))
            device.fence().synchronize()
            device.unmap(other)
        costs = {name: round(median(values[1:])) for name, values in took.items()}
        return MapCost(chunk_bytes, costs["map"], costs["unmap"], costs["beside"])


def _pair(driver: Driver, source: _Stand, stand: _Stand, notes: list[str]) -> PairMeasured:
    names = source.device.id, stand.device.id
    both = _both_links(source, stand)
    if not driver.can_access(*(int(name.partition(":")[2]) for name in reversed(names))):
        notes.append(f"no way from the memory of {names[0]} to {names[1]}: they have no peer access to each other")
        return PairMeasured(*names, both)
    try:
        return PairMeasured(*names, both, _peer_rates(source, stand), _two_links(source, stand))
    except DeviceError as fault:
        notes.append(f"no way from the memory of {names[0]} to {names[1]}: {fault.message}")
        return PairMeasured(*names, both)


def _both_links(one: _Stand, other: _Stand) -> int:
    def once() -> None:
        for stand in (one, other):
            stand.from_host(0, stand.pool_bytes)
        for stand in (one, other):
            stand.device.fence().synchronize()

    return 2 * one.pool_bytes * _BILLION // _median_ns(once)


def _peer_rates(source: _Stand, stand: _Stand) -> tuple[Rate, ...]:
    peer, device = source.device.id, stand.device
    part_bytes = source.device.part_bytes
    device.adopt(peer, part_bytes, source.pool_bytes // part_bytes, source.device.share())
    try:

        def copy(offset: Bytes, size_bytes: Bytes) -> None:
            device.copy_peer(stand.region, offset, peer, offset, size_bytes)

        return stand.rates(PEER_SIZES, copy)
    finally:
        device.forsake(peer)


def _two_links(source: _Stand, stand: _Stand) -> int:
    """Half of the pieces direct, half over the neighbour's link."""
    neighbour = source.device.id
    stand.device.open_detour(neighbour)

    def copy(offset: Bytes, size_bytes: Bytes) -> None:
        stand.from_host(offset, size_bytes, neighbour if offset // size_bytes % 2 else None)

    return stand.rate(PIECE_BYTES, copy)


def main() -> int:
    try:
        measured = measure(Driver())
    except DeviceError as fault:
        print(fault.message, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(json.encode(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
