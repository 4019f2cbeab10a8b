"""The ways an image's groups travel to a device: from host memory over one link or several, or from a peer's pool.

What travels is cut up elsewhere; a route only says how a piece is asked of the device. Links take turns copy by copy,
so that groups arrive roughly in order; fences see to it that they count as arrived in exactly that order.
"""

from dataclasses import dataclass
from typing import Protocol

from dormouse.core.types import Bytes
from dormouse.device.base import Device, Region
from dormouse.device.pool import runs
from dormouse.executor.copying import Piece
from dormouse.wire import Extent, LoadImage


class Route(Protocol):
    """One load's way."""

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where the image lies at the other end."""

    @property
    def kind(self) -> str:
        """Loads of one kind come at the same speed."""

    @property
    def groups_per_copy(self) -> int:
        """How many groups are asked for at once, after the first few: what is over sooner than it is asked for gains by
        it."""

    @property
    def is_brief(self) -> bool:
        """Whether its copies are over so soon that what is done beside them would hold up the run that waits for them;
        nor does mapping wait for copies that do not come over the host's link."""

    def queue(self, device: Device, region: Region, number: int, piece: Piece) -> None:
        """Queue the copy of a piece; ``number`` counts copies. Raises DeviceError."""


@dataclass(frozen=True)
class FromHost:
    """Every group over the device's own link, or by turns over that and the links of neighbours."""

    host_address: int
    extents: tuple[Extent, ...]
    detours: tuple[str, ...] = ()

    groups_per_copy = 1
    is_brief = False

    @property
    def kind(self) -> str:
        return "+".join(("host", *self.detours))

    def queue(self, device: Device, region: Region, number: int, piece: Piece) -> None:
        link = number % (len(self.detours) + 1)
        detour = self.detours[link - 1] if link else None
        device.copy_in(region, piece.offset, self.host_address + piece.host_offset, piece.size_bytes, detour)


@dataclass(frozen=True)
class FromPeer:
    """Every group from the pool of a peer that was adopted."""

    peer: str
    extents: tuple[Extent, ...]

    kind = "peer"
    groups_per_copy = 16
    is_brief = True

    def queue(self, device: Device, region: Region, number: int, piece: Piece) -> None:
        del number  # one link carries all
        device.copy_peer(region, piece.offset, self.peer, piece.host_offset, piece.size_bytes)


def route_of(asked: LoadImage, host_address: int) -> FromHost | FromPeer:
    """The way that the control side has chosen."""
    if asked.source is not None:
        return FromPeer(asked.source.address, asked.source.extents)
    return FromHost(host_address, asked.extents, asked.detours)


def held_by(region: Region, chunk_bytes: Bytes) -> tuple[Extent, ...]:
    """Where a region's memory lies in the device's pool, as peers count it."""
    return tuple(Extent(first * chunk_bytes, count * chunk_bytes) for first, count in runs(region.chunks))
