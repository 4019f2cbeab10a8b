"""Settings of a server: one frozen value, checked once, kept in the state directory between starts."""

from pathlib import Path

from msgspec import Struct

from dormouse.core.types import Bytes

MIB: Bytes = 1024 * 1024
GIB: Bytes = 1024 * MIB


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """Every setting of ``dormouse serve``; defaults fit a laptop."""

    state_dir: Path
    """Catalog, images, settings: everything that survives a restart."""
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"
    """``cpu``, ``cuda`` (every GPU), ``cuda:N``, or ``auto``: CUDA where there is a card."""
    device_bytes: Bytes | None = None
    """Device memory for images. None: 1 GiB on the CPU device, 80 % of what is free on a GPU."""
    chunk_bytes: Bytes | None = None
    """None: 2 MiB on the CPU device, 32 MiB on a GPU."""
    group_bytes: Bytes = 8 * MIB
    link_bytes_per_s: int | None = None
    host_bytes: Bytes = 4 * GIB
    request_slab_bytes: Bytes = 256 * MIB
    reply_slab_bytes: Bytes = 256 * MIB
    body_limit_bytes: Bytes = 64 * MIB
    queue_length: int = 10_000
    allow_code: tuple[Path, ...] = ()
    threads: int = 0
    """Torch threads of a CPU executor; 0: one fewer than the cores, at least one."""
    journal: Path | None = None
    """Record events and commands here, for replay."""
    poison: bool = False
    faults: tuple[str, ...] = ()
