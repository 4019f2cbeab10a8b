"""Makes executors known to each other, and remembers where each one's images lie for those who copy from it.

It decides nothing: it introduces whom the topology says has a way to whom, tells the core which ways are open, and
adds to a load what the core does not know: addresses, places in a peer's pool, the names of devices.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from dormouse import wire
from dormouse.control.payloads import Outputs
from dormouse.core.messages import RouteOpened
from dormouse.core.types import DeviceId, ExecutorId, Topology

_LOG = logging.getLogger("dormouse.control")

Send = Callable[[ExecutorId, wire.ToExecutor], None]
Post = Callable[[RouteOpened, Outputs], None]
PeerMessage = wire.ImageHeld | wire.PeerAdopted | wire.PeerNotAdopted


@dataclass
class _Known:
    """One life of an executor's process."""

    device: DeviceId
    address: str
    held: dict[str, tuple[wire.Extent, ...]] = field(default_factory=dict)
    """By function: where it lay when it was loaded last."""


class Introductions:
    """``detours``: ways over neighbours' links are wanted too."""

    def __init__(self, topology: Topology, send: Send, *, detours: bool) -> None:
        self._topology = topology
        self._send = send
        self._detours = detours
        self._known: dict[ExecutorId, _Known] = {}

    def joined(self, name: ExecutorId, ready: wire.ExecutorReady) -> None:
        """Introduce a new executor to the others, and the others to it."""
        new = _Known(DeviceId(ready.device), ready.address)
        for other, known in self._known.items():
            self._introduce(name, new, other, known)
            self._introduce(other, known, name, new)
        self._known[name] = new

    def lost(self, name: ExecutorId) -> None:
        """Tell the others, before they are told anything else, that they copy from a dead one's memory."""
        gone = self._known.pop(name, None)
        if gone is not None:
            for other in self._known:
                self._send(other, wire.PeerLost(gone.address))

    def received(self, name: ExecutorId, message: PeerMessage, post: Post) -> None:
        match message:
            case wire.ImageHeld():
                self._known[name].held[message.function] = message.extents
            case wire.PeerAdopted():
                peer = self._known.get(ExecutorId(message.peer))
                if peer is not None and peer.address == message.address:  # it may have died meanwhile
                    post(RouteOpened(name, ExecutorId(message.peer), message.detours), {})
            case wire.PeerNotAdopted():
                _LOG.warning("%s cannot copy from %s: %s", name, message.peer, message.message)

    def addressed(self, load: wire.LoadImage) -> wire.LoadImage:
        """A load with what it needs to know of others."""
        command = load.command
        detours = tuple(str(self._known[helper].device) for helper in command.helpers)
        if command.source is None:
            return msgspec.structs.replace(load, detours=detours) if detours else load
        peer = self._known[command.source]
        return msgspec.structs.replace(load, source=wire.PeerSource(peer.address, peer.held[command.function]))

    def forget(self, function: str) -> None:
        for known in self._known.values():
            known.held.pop(function, None)

    def _introduce(self, reader: ExecutorId, reading: _Known, source: ExecutorId, read: _Known) -> None:
        pair = self._topology.pair(read.device, reading.device)
        if read.device.partition(":")[0] == reading.device.partition(":")[0] and pair.peer_bytes_per_s:
            detours = self._detours and pair.detour_bytes_per_s > 0
            self._send(reader, wire.Introduce(source, read.device, read.address, detours))
