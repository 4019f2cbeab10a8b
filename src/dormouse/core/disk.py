"""How fast images come from disk: assumed at first, then as measured, the latest reads counting most."""

from dataclasses import dataclass

from dormouse.core.types import Bytes, Ns

ASSUMED_BYTES_PER_S = 1_000_000_000
OVERHEAD_NS: Ns = 2_000_000
"""What a read costs beside its bytes: opening, checking, messages."""
KEPT_BYTES: Bytes = 4 * 1024 * 1024 * 1024
"""So many bytes are remembered; then what is known is halved."""


@dataclass(slots=True)
class Disk:
    read_bytes: Bytes = 0
    took_ns: Ns = 0

    def measured(self, size_bytes: Bytes, took_ns: Ns) -> None:
        """A read has ended. Several at once share the disk, and each is seen as it then was."""
        self.read_bytes += size_bytes
        self.took_ns += max(1, took_ns)
        if self.read_bytes > KEPT_BYTES:
            self.read_bytes, self.took_ns = self.read_bytes // 2, self.took_ns // 2

    def read_ns(self, size_bytes: Bytes) -> Ns:
        """How long a read would take."""
        if self.read_bytes and self.took_ns:
            return OVERHEAD_NS + size_bytes * self.took_ns // self.read_bytes
        return OVERHEAD_NS + size_bytes * 1_000_000_000 // ASSUMED_BYTES_PER_S
