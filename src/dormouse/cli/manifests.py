"""From what a user types to a Manifest: a path or a manifest file, and options that go over it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from dormouse.core.types import Pin
from dormouse.errors import ConfigurationFault
from dormouse.functions import Manifest, TaskManifest, checked, parse_manifest

Part = TypeVar("Part", bound=Struct)

_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Changes(Struct, frozen=True):
    """Options of ``deploy``; None: as the manifest says, or the default."""

    name: str | None = None
    dtype: str | None = None
    task: str | None = None
    pin: Pin | None = None
    slo_ms: float | None = None
    percentile: float | None = None
    timeout_ms: float | None = None
    code: Path | None = None
    arguments: Sequence[str] = ()
    like: str | None = None
    tenant: str | None = None
    public: bool | None = None


def manifest_of(source: str, changes: Changes) -> Manifest:
    """The manifest in a ``.toml`` file, or a fresh one for a path or ``module:callable``, with the changes made.

    Paths come out absolute, since the server has another working directory. Raises ConfigurationFault.
    """
    if not source:
        raise ConfigurationFault(
            "the source is empty; give a directory, a .pt2 file, a manifest.toml or module:callable"
        )
    file = Path(source)
    manifest = _read(file) if file.suffix == ".toml" else _fresh(source, changes.name)
    values = {
        "name": changes.name,
        "dtype": changes.dtype,
        "task": changes.task,
        "pin": changes.pin,
        "like": changes.like,
        "tenant": changes.tenant,
        "public": changes.public,
        "code": None if changes.code is None else str(changes.code.absolute()),
    }
    manifest = _replaced(manifest, values)
    slo = _replaced(manifest.slo, {"deadline_ms": changes.slo_ms, "percentile": changes.percentile})
    limits = _replaced(manifest.limits, {"timeout_ms": changes.timeout_ms})
    arguments = manifest.arguments | dict(_argument(text) for text in changes.arguments)
    return checked(msgspec.structs.replace(manifest, slo=slo, limits=limits, arguments=arguments), source)


def _replaced(value: Part, changes: dict[str, Any]) -> Part:
    return msgspec.structs.replace(value, **{key: change for key, change in changes.items() if change is not None})


def _read(file: Path) -> Manifest:
    try:
        manifest = parse_manifest(file.read_text(), str(file))
    except OSError as fault:
        raise ConfigurationFault(f"{file} cannot be read: {fault.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationFault(f"{file} is no text") from None
    return msgspec.structs.replace(
        manifest,
        source=_located(manifest.source, file.parent),
        code=None if manifest.code is None else str((file.parent / manifest.code).absolute()),
        task=manifest.task if isinstance(manifest.task, str) else _task(manifest.task, file.parent),
    )


def _task(task: TaskManifest, directory: Path) -> TaskManifest:
    """Labels are read here, since the server gives nobody its files to read."""
    labels = task.labels
    if isinstance(labels, str):
        try:
            labels = tuple(line.strip() for line in (directory / labels).read_text().splitlines() if line.strip())
        except (OSError, UnicodeDecodeError) as fault:
            raise ConfigurationFault(f"task.labels = {task.labels!r} cannot be read: {fault}") from None
    tokenizer = None if task.tokenizer is None else str((directory / task.tokenizer).absolute())
    return msgspec.structs.replace(task, labels=labels, tokenizer=tokenizer)


def _fresh(source: str, name: str | None) -> Manifest:
    located = _located(source, Path())
    if located != source or Path(source).is_absolute():
        if not Path(located).exists():
            raise ConfigurationFault(
                f"{source} does not exist; give a directory, a .pt2 file, a manifest.toml or module:callable"
            )
        return Manifest(
            name or _name_from(Path(located).stem if Path(located).is_file() else Path(located).name), located
        )
    return Manifest(name or _name_from(source.rpartition(":")[2]), source)


def _located(source: str, directory: Path) -> str:
    """An absolute path, unless the source is a ``module:callable``."""
    if _REFERENCE.fullmatch(source) and not (directory / source).exists():
        return source
    return str((directory / source).resolve())


def _name_from(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")


def _argument(text: str) -> tuple[str, object]:
    """``key=value``; a value that is JSON is taken as such, any other as text."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigurationFault(f"--arg {text!r} cannot be used; expected key=value")
    try:
        return key, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return key, value
    except RecursionError:
        raise ConfigurationFault(f"--arg {key} cannot be used: its value is nested too deeply") from None
