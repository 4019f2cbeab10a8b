"""What the node's books say at one moment, for whoever shows it. Read, never written.

Ledgers in it are the core's own and live on, so read them where they are written: on the event loop's thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dormouse.core.ledger import Ledger
from dormouse.core.types import Bytes, Ns

REMOVED = "_removed"
"""Stands for all functions of one tenant that are no more; no function can be called so."""


@dataclass(slots=True)
class FunctionBook:
    """One name, whatever its revision: counts go on when a function is deployed anew."""

    name: str
    tenant: str
    ledger: Ledger
    """Of everybody's requests, since the server started."""
    queued: int = 0
    image_bytes: Bytes = 0
    compliant: bool = True
    """The promised share of its requests was in time."""


@dataclass(slots=True)
class DeviceBook:
    """One executor and its device; all zero while it is not there."""

    device: str
    up: bool = False
    restarts: int = 0
    capacity_bytes: Bytes = 0
    used_bytes: Bytes = 0
    waste_bytes: Bytes = 0
    """Between the ends of images and of the chunks that hold them."""
    images: int = 0
    graphs: int = 0
    unaccounted_bytes: Bytes = 0
    link_bytes: Mapping[tuple[str, str], Bytes] = field(default_factory=dict)
    """What has come in: by ``host``, ``peer`` or ``detour``, and from which device."""


@dataclass(slots=True)
class Books:
    functions: Sequence[FunctionBook] = ()
    gone: Sequence[FunctionBook] = ()
    """Those that were removed, a tenant each, named REMOVED. What a ledger's guests had is in books of theirs, too."""
    devices: Sequence[DeviceBook] = ()
    host_capacity_bytes: Bytes = 0
    host_used_bytes: Bytes = 0
    host_peak_bytes: Bytes = 0
    host_waste_bytes: Bytes = 0
    host_images: int = 0
    disk_images: int = 0
    reading: int = 0
    queued: int = 0
    oldest_wait_ns: Ns = 0
