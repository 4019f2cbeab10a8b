"""Measures this machine's links and what mapping costs: ``python -m dormouse.device.measuring`` prints it as JSON.

A process of its own, because it leaves a context on every card until it ends. It uses the devices as executors do, so
what is measured is what a load will get: pieces queued one behind another, each with its fence. Rates are medians.
"""

import ctypes
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median

from msgspec import Struct, json

from dormouse.core.types import Bytes, Ns
from dormouse.device.base import Region
from dormouse.device.driver import Driver
from dormouse.device.vmm import VmmDevice
from dormouse.errors import DeviceError

MIB: Bytes = 1024 * 1024
POOL_BYTES: Bytes = 256 * MIB
COPY_SIZES: tuple[Bytes, ...] = tuple(size * 1024 for size in (64, 256, 1024, 2048, 4096, 8192, 16384, 65536, 262144))
PEER_SIZES: tuple[Bytes, ...] = tuple(size * MIB for size in (2, 8, 16, 64, 256))
CHUNK_SIZES: tuple[Bytes, ...] = tuple(size * MIB for size in (2, 8, 32, 128))
DETOUR_PIECE_BYTES: Bytes = 8 * MIB
REPEATS = 5
ELBOW_PERCENT = 95
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


class CardMeasured(Struct, frozen=True):
    device: str
    from_host: tuple[Rate, ...]
    elbow_bytes: Bytes
    """The smallest piece that comes at 95 % of the best rate."""
    to_host_bytes_per_s: int
    maps: tuple[MapCost, ...]

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


def measure(driver: Driver) -> Measured:
    """Everything about every card. Raises DeviceError if one cannot be used."""
    began = time.monotonic_ns()
    count = driver.device_count()
    with ExitStack() as closing:
        maps = [tuple(_map_cost(driver, card, chunk) for chunk in CHUNK_SIZES) for card in range(count)]
        stands = [_Stand(driver, card, closing) for card in range(count)]
        cards = tuple(_card(stand, costs) for stand, costs in zip(stands, maps, strict=True))
        notes: list[str] = []
        if count == 1:
            notes.append("one GPU: no other to copy from, and no other link to borrow")
        pairs = tuple(_pair(driver, one, other, notes) for one in stands for other in stands if one is not other)
        return Measured(machine_of(driver), cards, pairs, tuple(notes), time.monotonic_ns() - began)


class _Stand:
    """A device with a small pool all of which is mapped, and host memory that it may copy from."""

    def __init__(self, driver: Driver, card: int, closing: ExitStack) -> None:
        self.device = VmmDevice(card, POOL_BYTES, driver=driver)
        closing.callback(self.device.close)
        self.region: Region = self.device.reserve(POOL_BYTES)
        self.device.map(self.region, POOL_BYTES)
        memory = mmap.mmap(-1, POOL_BYTES)
        self.host = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory = memory
        self.device.register_host(self.host, POOL_BYTES)

    def from_host(self, offset: Bytes, size_bytes: Bytes, detour: str | None = None) -> None:
        self.device.copy_in(self.region, offset, self.host + offset, size_bytes, detour)

    def to_host(self, offset: Bytes, size_bytes: Bytes) -> None:
        self.device.copy_out(self.region, offset, self.host + offset, size_bytes)

    def rate(self, size_bytes: Bytes, copy: Callable[[Bytes, Bytes], None]) -> int:
        """Bytes a second of copies of that size, queued one behind another."""
        offsets = list(_offsets(size_bytes))[:64]

        def once() -> None:
            for offset in offsets:
                copy(offset, size_bytes)
                fence = self.device.fence()
            fence.synchronize()

        return len(offsets) * size_bytes * _BILLION // _median_ns(once)


def _offsets(size_bytes: Bytes) -> Iterator[Bytes]:
    yield from range(0, POOL_BYTES - size_bytes + 1, size_bytes)


def _median_ns(work: Callable[[], None]) -> Ns:
    """At the second try and later: the first one warms up."""
    took = []
    for _ in range(REPEATS + 1):
        began = time.monotonic_ns()
        work()
        took.append(time.monotonic_ns() - began)
    return max(round(median(took[1:])), 1)


def _card(stand: _Stand, maps: tuple[MapCost, ...]) -> CardMeasured:
    rates = tuple(Rate(size, stand.rate(size, stand.from_host)) for size in COPY_SIZES)
    best = max(rate.bytes_per_s for rate in rates)
    elbow = next(rate.size_bytes for rate in rates if rate.bytes_per_s * 100 >= best * ELBOW_PERCENT)
    return CardMeasured(stand.device.id, rates, elbow, stand.rate(COPY_SIZES[-1], stand.to_host), maps)


def _map_cost(driver: Driver, card: int, chunk_bytes: Bytes) -> MapCost:
    device = VmmDevice(card, POOL_BYTES, chunk_bytes, driver=driver)
    try:
        region = device.reserve(POOL_BYTES)
        mapped, unmapped = [], []
        for _ in range(REPEATS + 1):
            began = time.monotonic_ns()
            device.map(region, POOL_BYTES)
            between = time.monotonic_ns()
            device.unmap(region)
            mapped.append(between - began)
            unmapped.append(time.monotonic_ns() - between)
        chunks = POOL_BYTES // chunk_bytes
        return MapCost(chunk_bytes, round(median(mapped[1:]) / chunks), round(median(unmapped[1:]) / chunks))
    finally:
        device.close()


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
            stand.from_host(0, POOL_BYTES)
        for stand in (one, other):
            stand.device.fence().synchronize()

    return 2 * POOL_BYTES * _BILLION // _median_ns(once)


def _peer_rates(source: _Stand, stand: _Stand) -> tuple[Rate, ...]:
    peer, device = source.device.id, stand.device
    device.adopt(peer, source.device.part_bytes, POOL_BYTES // source.device.part_bytes, source.device.share())
    try:

        def copy(offset: Bytes, size_bytes: Bytes) -> None:
            device.copy_peer(stand.region, offset, peer, offset, size_bytes)

        return tuple(Rate(size, stand.rate(size, copy)) for size in PEER_SIZES)
    finally:
        device.forsake(peer)


def _two_links(source: _Stand, stand: _Stand) -> int:
    """Half of the pieces direct, half over the neighbour's link."""
    neighbour = source.device.id
    stand.device.open_detour(neighbour)

    def copy(offset: Bytes, size_bytes: Bytes) -> None:
        stand.from_host(offset, size_bytes, neighbour if offset // size_bytes % 2 else None)

    return stand.rate(DETOUR_PIECE_BYTES, copy)


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
