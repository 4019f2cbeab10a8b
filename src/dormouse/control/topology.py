"""What the core is told of links, and how executors cut images: by what was measured of this machine, or assumed."""

from dataclasses import dataclass

import msgspec

from dormouse.config import MIB, Config
from dormouse.core.types import Bytes, DeviceId, Link, Pair, Topology
from dormouse.device.measuring import Measured, PairMeasured

MEMORY_BYTES_PER_S = 5_000_000_000
"""What one thread copies in host memory, and so every way between CPU devices."""
GROUP_BYTES: Bytes = 8 * MIB
LARGEST_GROUP_BYTES: Bytes = 32 * MIB


@dataclass(frozen=True)
class Links:
    """What is known or assumed, for all who go by it."""

    topology: Topology
    group_bytes: Bytes
    """The smallest copy of an image."""
    maps_ahead: frozenset[str] = frozenset()
    """Devices that map a load before they copy it."""


def links_of(config: Config, devices: list[str], measured: Measured | None) -> Links:
    """``measured``: None if nothing was, or nothing shall be made of it."""
    ahead = frozenset(card.device for card in measured.cards if card.maps_ahead) if measured else frozenset()
    return Links(_topology_of(config, devices, measured), _group_bytes_of(config, measured), ahead)


def _topology_of(config: Config, devices: list[str], measured: Measured | None) -> Topology:
    if any(device.startswith("cpu") for device in devices):
        rate = config.link_bytes_per_s or MEMORY_BYTES_PER_S
        # As executors name themselves: what is asked for as ``cpu`` is ``cpu:0``.
        links = tuple(Link(DeviceId(device if ":" in device else f"{device}:0"), rate) for device in devices)
        return msgspec.structs.replace(Topology(), links=links, peer_bytes_per_s=rate, detour_bytes_per_s=0)
    if measured is None:
        return Topology()
    rates = {card.device: card.best_bytes_per_s for card in measured.cards}
    links = tuple(Link(DeviceId(device), rate) for device, rate in rates.items())
    return msgspec.structs.replace(
        Topology(), links=links, pairs=tuple(_pair(pair, rates[pair.destination]) for pair in measured.pairs)
    )


def _pair(pair: PairMeasured, own_bytes_per_s: int) -> Pair:
    return Pair(
        DeviceId(pair.source),
        DeviceId(pair.destination),
        peer_bytes_per_s=max((rate.bytes_per_s for rate in pair.peer), default=0),
        detour_bytes_per_s=max(pair.two_links_bytes_per_s - own_bytes_per_s, 0),
    )


def _group_bytes_of(config: Config, measured: Measured | None) -> Bytes:
    """Twice the size at which a link comes to its full rate, which leaves room for what else a group costs."""
    if config.group_bytes is not None:
        return config.group_bytes
    if measured is None or not measured.cards:
        return GROUP_BYTES
    elbow = max(card.elbow_bytes for card in measured.cards)
    return min(max(2 * elbow, MIB), LARGEST_GROUP_BYTES)
