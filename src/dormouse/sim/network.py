"""Copies in flight over links that share their capacity fairly. Knows bytes and time, not what is copied or why.

A copy has one or more routes, each a chain of links; a route is as fast as its slowest link, of which every copy on it
gets an equal share. So two neighbours behind one PCIe switch slow each other down while both copy, and only then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from dormouse.core.types import Bytes, Ns

_BILLION = 1_000_000_000


@dataclass(eq=False, slots=True)
class Link:
    """``bytes_per_s`` of one direction."""

    name: str
    bytes_per_s: float
    copies: int = 0
    """Routes that run over it now."""


Route = Sequence[Link]


@dataclass(eq=False, slots=True)
class Copy:
    """``remaining_bytes`` as of the network's last change."""

    remaining_bytes: float
    routes: tuple[Route, ...]
    bytes_per_ns: float = 0.0
    ends_ns: Ns = 0


@dataclass(slots=True)
class Network:
    """Everything that is being copied. Times never go back."""

    _copies: list[Copy] = field(default_factory=list)
    _now_ns: Ns = 0

    def start(self, now_ns: Ns, size_bytes: Bytes, routes: Sequence[Route]) -> Copy:
        """Begin a copy over all its routes at once."""
        assert size_bytes > 0 and routes, (size_bytes, routes)
        self._advance(now_ns)
        copy = Copy(float(size_bytes), tuple(routes))
        for link in _links(copy):
            link.copies += 1
        self._copies.append(copy)
        self._share()
        return copy

    def end(self, now_ns: Ns, copy: Copy) -> None:
        """A copy has ended, or is given up."""
        self._advance(now_ns)
        self._copies.remove(copy)
        for link in _links(copy):
            link.copies -= 1
        self._share()

    def change(self, now_ns: Ns, link: Link, bytes_per_s: float) -> None:
        """A link is slower, or faster, from now on."""
        self._advance(now_ns)
        link.bytes_per_s = bytes_per_s
        self._share()

    def next(self) -> Copy | None:
        """The copy that ends first if nothing changes; of several the one begun first."""
        return min(self._copies, key=lambda copy: copy.ends_ns, default=None)

    def _advance(self, now_ns: Ns) -> None:
        passed_ns = now_ns - self._now_ns
        assert passed_ns >= 0, (now_ns, self._now_ns)
        for copy in self._copies:
            copy.remaining_bytes = max(0.0, copy.remaining_bytes - passed_ns * copy.bytes_per_ns)
        self._now_ns = now_ns

    def _share(self) -> None:
        for copy in self._copies:
            per_s = sum(min(link.bytes_per_s / link.copies for link in route) for route in copy.routes)
            copy.bytes_per_ns = per_s / _BILLION
            copy.ends_ns = self._now_ns + ceil(copy.remaining_bytes / copy.bytes_per_ns)


def _links(copy: Copy) -> list[Link]:
    return [link for route in copy.routes for link in route]
