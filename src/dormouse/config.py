"""Settings of a server: one frozen value, checked once, kept in the state directory between starts.

A setting comes from, in this order: the command line, a TOML file given on it, the last start, its default.
"""

import contextlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_type_hints

import msgspec
from msgspec import Struct

from dormouse.core.types import Bytes
from dormouse.errors import ConfigurationFault

KIB: Bytes = 1024
MIB: Bytes = 1024 * KIB
GIB: Bytes = 1024 * MIB
PAGE_BYTES: Bytes = 4096
SETTINGS_FILE = "settings.json"
GRPC_PORT = 8001
NO_GRPC = -1
"""In place of a port."""
FOR_ONE_START = ("state_dir", "faults", "poison", "auth", "tariff")
"""Not kept: where they are kept, what only tests and debugging want, a door left open, and what is told once."""


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """Every setting of ``dormouse serve``; defaults fit a laptop."""

    state_dir: Path
    """Catalog, images, settings: everything that survives a restart."""
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    """At the same host. None: 8001, or any free one where ``port`` is 0. ``NO_GRPC``: none."""
    device: str = "auto"
    """``cpu``, ``cuda`` (all), ``cuda:N``, several (``cuda:0,cuda:2``), or ``auto``: CUDA where there is a card."""
    device_bytes: Bytes | None = None
    """Device memory for images. None: 1 GiB on the CPU device, 80 % of what is free on a GPU."""
    chunk_bytes: Bytes | None = None
    """None: 2 MiB on the CPU device, 32 MiB on a GPU."""
    group_bytes: Bytes | None = None
    """None: by what was measured of the links, else 8 MiB."""
    link_bytes_per_s: int | None = None
    host_bytes: Bytes = 4 * GIB
    request_slab_bytes: Bytes = 256 * MIB
    reply_slab_bytes: Bytes = 256 * MIB
    body_limit_bytes: Bytes = 64 * MIB
    tenants: Path | None = None
    """A TOML file of tenants, their keys and limits."""
    auth: bool | None = None
    """Whether callers need keys. None: where there are any, and beyond the loopback address."""
    tls_cert: Path | None = None
    """A PEM file: the certificate, and those between it and a root. HTTP and gRPC are encrypted then."""
    tls_key: Path | None = None
    """Its private key, in PEM."""
    head_timeout_s: float = 20.0
    """How long a request's head may take to arrive."""
    body_timeout_s: float = 120.0
    """How long its body may; and how long a client may take nothing of its answer."""
    connections: int = 4_000
    """Open at once, over HTTP and over gRPC each."""
    image_pixels: int = 32_000_000
    """Pictures with more are refused before they are decoded."""
    queue_length: int = 10_000
    allow_code: tuple[Path, ...] = ()
    threads: int = 0
    """Torch threads of a CPU executor; 0: one fewer than the cores, at least one."""
    graphs: Literal["auto", "off"] = "auto"
    """Capture CUDA graphs of what is run, where that is possible; off: run everything eagerly."""
    images: Literal["disk", "dram"] = "disk"
    """Where sleeping images are kept: on disk and, as far as there is room, in host memory; or in host memory alone."""
    policy: Literal["dormouse", "torpor", "edf", "fifo"] = "dormouse"
    """Who is served first, where, and who makes room: ours, the published one, or a plain one (core/policies.py)."""
    shed: Literal["off", "late"] = "off"
    """Refuse requests that still wait at their deadline; or answer them late."""
    routes: Literal["auto", "peer", "host"] = "auto"
    """Ways to a device: ``host``, over its own link alone; ``peer``, from other devices too; ``auto``, over neighbours'
    links too."""
    calibrate: Literal["auto", "off"] = "auto"
    """Go by what was measured of this machine's links; ``off``: by what is assumed."""
    log_format: Literal["text", "json"] = "text"
    """How the lines on standard error look."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """From where on they are written."""
    log_requests: bool = False
    """A line for every request, not only for those that are refused, fail or are slow."""
    log_slow_ms: float = 1_000.0
    """From here on a request is slow."""
    ledger: Literal["on", "off"] = "on"
    """Record every request and what memory is taken, for bills; nothing is answered that is not recorded."""
    ledger_sync: Literal["process", "power"] = "process"
    """What an entry survives before its answer goes out: the end of the process, or a loss of power too."""
    tariff: Path | None = None
    """Prices that hold from this start on, in TOML. None: those that were set last."""
    journal: Path | None = None
    """Record events and commands here, for replay."""
    poison: bool = False
    faults: tuple[str, ...] = ()


LARGEST_BYTES: Bytes = 32 * 1024 * GIB
"""Of any size: more than a machine has, and little enough for several of them in one address space."""
SIZES = frozenset(name for name in Config.__struct_fields__ if "_bytes" in name)
"""Settings that may be written with a unit."""
MOST_THREADS = 1024
MOST_CONNECTIONS = 10**6
LONGEST_TIMEOUT_S = 86_400.0
OFF = "off"
FILES = ("journal", "tariff", "tenants", "tls_cert", "tls_key")
OPTIONAL = frozenset(
    name for name, hint in get_type_hints(Config).items() if type(None) in getattr(hint, "__args__", ())
)
"""Settings that may be ``auto``: found out at start; those of ``FILES`` are ``off`` then, and may be called so."""

_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([kKMGT]i?)?B?(?:/s)?\s*")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": 1024 * GIB}


def parse_size(key: str, text: str) -> Bytes:
    """``512MiB``, ``2GB``, ``1.5GiB`` or plain bytes. Raises ConfigurationFault naming ``key``."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigurationFault(f"{key} = {text!r} is no size; write 512MiB, 2GB, 1.5GiB or a number of bytes")
    number, unit = match.groups()
    return round(float(number) * _UNITS[(unit or "").replace("K", "k")])


def configure(state_dir: Path, given: Mapping[str, object], file: Path | None = None, *, reset: bool = False) -> Config:
    """The settings of this start: ``given`` ones over those of ``file`` over the last start's, unless ``reset``.

    Raises ConfigurationFault naming the key and the value.
    """
    last = {} if reset else _saved(state_dir)
    from_file = {} if file is None else _from_toml(file)
    said = {**from_file, **given}
    given = {**last, **said}
    config = checked(_converted({**given, "state_dir": state_dir.absolute()}))
    if "allow_code" in said:  # what is only remembered may have gone since, and the rest is served without it
        for directory in missing_code(config):
            _require(False, "allow_code", str(directory), "a directory that exists")
    return config


def missing_code(config: Config) -> list[Path]:
    """Directories of ``allow_code`` that are not there."""
    return [directory for directory in config.allow_code if not directory.is_dir()]


def save(config: Config) -> None:
    """Keep the settings for the next start."""
    kept = {key: value for key, value in msgspec.to_builtins(config, enc_hook=str).items() if key not in FOR_ONE_START}
    try:
        config.state_dir.mkdir(parents=True, exist_ok=True)
        unfinished = config.state_dir / f"{SETTINGS_FILE}.new"
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
        unfinished.replace(config.state_dir / SETTINGS_FILE)
    except OSError as fault:
        raise ConfigurationFault(f"state_dir = {str(config.state_dir)!r} cannot be written: {fault.strerror}") from None


def checked(config: Config) -> Config:
    """The settings themselves, if they make sense together. Raises ConfigurationFault naming key and value."""
    smallest = {"device_bytes": MIB, "chunk_bytes": PAGE_BYTES, "group_bytes": PAGE_BYTES, "host_bytes": MIB}
    smallest |= {"request_slab_bytes": KIB, "reply_slab_bytes": KIB, "body_limit_bytes": KIB, "link_bytes_per_s": 1}
    smallest |= {"queue_length": 1, "threads": 0, "port": 0, "connections": 1, "image_pixels": 1}
    for key, least in smallest.items():
        value = getattr(config, key)
        _require(value is None or value >= least, key, value, f"at least {least}")
    for key in SIZES:
        value = getattr(config, key)
        _require(value is None or value <= LARGEST_BYTES, key, value, f"at most {LARGEST_BYTES}")
    _require(config.connections <= MOST_CONNECTIONS, "connections", config.connections, f"at most {MOST_CONNECTIONS}")
    for key in ("head_timeout_s", "body_timeout_s"):
        value = getattr(config, key)
        _require(0 < value <= LONGEST_TIMEOUT_S, key, value, f"seconds, more than 0 and at most {LONGEST_TIMEOUT_S:g}")
    slow_ms = config.log_slow_ms
    _require(0 < slow_ms <= 1e9, "log_slow_ms", slow_ms, "milliseconds, more than 0 and at most 1e9")
    together = (config.tls_cert is None) == (config.tls_key is None)
    _require(together, "tls_cert", config.tls_cert and str(config.tls_cert), "tls_key beside it, and neither without")
    _require(config.threads <= MOST_THREADS, "threads", config.threads, f"at most {MOST_THREADS}")
    _require(config.host != "", "host", config.host, "an address to listen on, 0.0.0.0 for all")
    _require(config.port < 2**16, "port", config.port, "0 to 65535; 0 picks a free one")
    grpc_port = config.grpc_port
    possible = grpc_port is None or NO_GRPC <= grpc_port < 2**16
    _require(possible, "grpc_port", grpc_port, "0 to 65535; 0 picks a free one, -1 or off means no gRPC")
    _require(not grpc_port or grpc_port != config.port, "grpc_port", grpc_port, "another than port")
    device = re.fullmatch(r"auto|cpu|cuda|(?:(?:cpu|cuda):[0-9]{1,3}(?:,(?!$)|$))+", config.device)
    _require(device is not None, "device", config.device, "auto, cpu, cuda, cuda:N or several: cuda:0,cuda:1")
    chunk = config.chunk_bytes
    _require(chunk is None or chunk % PAGE_BYTES == 0, "chunk_bytes", chunk, f"a multiple of {PAGE_BYTES}")
    within = config.device_bytes is None or chunk is None or chunk <= config.device_bytes
    _require(within, "chunk_bytes", chunk, f"at most device_bytes ({config.device_bytes})")
    slab = config.request_slab_bytes
    _require(
        config.body_limit_bytes <= slab,
        "body_limit_bytes",
        config.body_limit_bytes,
        f"at most request_slab_bytes ({slab})",
    )
    return config


def _require(sound: bool, key: str, value: object, expected: str) -> None:
    if not sound:
        raise ConfigurationFault(f"{key} = {value!r} cannot be used; expected {expected}")


def _converted(values: Mapping[str, object]) -> Config:
    values = {key: _plain(key, value) for key, value in values.items()}
    unknown = sorted(values.keys() - set(Config.__struct_fields__))
    if unknown:
        raise ConfigurationFault(f"{unknown[0]} = {values[unknown[0]]!r}: there is no such setting")
    for key, hint in get_type_hints(Config).items():
        if key in values:
            try:
                msgspec.convert(values[key], hint, dec_hook=_path)
            except msgspec.ValidationError as fault:
                raise ConfigurationFault(f"{key} = {values[key]!r} cannot be used: {fault}") from None
    config = msgspec.convert(values, Config, dec_hook=_path)
    return msgspec.structs.replace(
        config,
        allow_code=tuple(directory.absolute() for directory in config.allow_code),
        **{name: file.absolute() for name in FILES if (file := getattr(config, name)) is not None},
    )


def _path(kind: type, value: object) -> Path:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError("expected a path")


def _plain(key: str, value: object) -> object:
    """A setting as the command line or a file writes it, without units and Path objects."""
    if isinstance(value, Path):
        value = str(value)
    if (value == "auto" and key in OPTIONAL) or (value == OFF and key in FILES):
        return None
    if key == "grpc_port" and isinstance(value, str):
        return NO_GRPC if value == "off" else int(value) if re.fullmatch("-?[0-9]{1,6}", value) else value
    if isinstance(value, str) and key in SIZES:
        return parse_size(key, value)
    if isinstance(value, list | tuple):
        return [str(item) if isinstance(item, Path) else item for item in value]
    return value


def _from_toml(file: Path) -> dict[str, object]:
    """The file's settings; its relative paths count from its own directory."""
    try:
        values: dict[str, object] = tomllib.loads(file.read_text())
    except OSError as fault:
        raise ConfigurationFault(f"{file} cannot be read: {fault.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise ConfigurationFault(f"{file}: {fault}") from None
    except RecursionError:
        raise ConfigurationFault(f"{file} is nested too deeply to be settings") from None
    for key in sorted(values.keys() - set(Config.__struct_fields__)):
        raise ConfigurationFault(f"{file}: {key} = {str(values[key])[:80]!r}: there is no such setting")
    match values.get("allow_code"):
        case [*directories] if all(isinstance(directory, str) for directory in directories):
            values["allow_code"] = [file.parent / str(directory) for directory in directories]
    for name in FILES:
        if isinstance(values.get(name), str) and values[name] not in ("auto", OFF):
            values[name] = file.parent / str(values[name])
    return values


def _saved(state_dir: Path) -> dict[str, object]:
    file = state_dir / SETTINGS_FILE
    text = b"{}"
    try:
        with contextlib.suppress(FileNotFoundError):
            text = file.read_bytes()
    except OSError as fault:
        raise ConfigurationFault(f"state_dir = {str(state_dir)!r} cannot be used: {fault.strerror}") from None
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as fault:
        raise ConfigurationFault(f"{file} is damaged ({fault}); remove it, or serve with --reset") from None
