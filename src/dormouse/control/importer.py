"""Runs the importer in a process of its own, because it needs torch and reads files that nobody has checked yet."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dormouse.core.types import Bytes
from dormouse.errors import DormouseError, RefusedSource
from dormouse.functions import Manifest
from dormouse.model.import_process import ImportProcess
from dormouse.store.image import remove_staging
from dormouse.tasks.description import Task
from dormouse.tensors import Signature


class Imported(Struct, frozen=True):
    """What the importer made, or with ``inspect`` would make."""

    image_bytes: Bytes
    state_bytes: Bytes
    signature: Signature
    platform: str
    task: Task | None = None


class _Failed(Struct, frozen=True):
    error: str
    status: int


async def import_source(
    manifest: Manifest,
    target: Path | None,
    allow_code: tuple[Path, ...],
    *,
    inspect: bool = False,
    durable: bool = True,
    like: Path | None = None,
) -> Imported:
    """Turn a source into an image directory at ``target``, with weights alone where it is ``like`` another image.
    Raises RefusedSource; nothing is left behind then."""
    request = {
        "manifest": msgspec.to_builtins(manifest),
        "target": "" if target is None else str(target),
        "allow_code": [str(directory) for directory in allow_code],
        "inspect": inspect,
        "durable": durable,
        "like": None if like is None else str(like),
    }
    try:
        told: Any = msgspec.json.decode(await _answer(msgspec.json.encode(request)))
    except msgspec.DecodeError:
        _remove(target)
        raise RefusedSource(
            f"'{manifest.name}': the importer died while it read {manifest.source}; "
            "the source may be damaged, or memory may have run out"
        ) from None
    except asyncio.CancelledError:
        _remove(target)
        raise
    if "error" in told:
        raise _error(msgspec.convert(told, _Failed))
    return msgspec.convert(told, Imported)


async def _answer(request: bytes) -> bytes:
    """What an import says, which is nothing if it died. It has ended when this returns or is cancelled."""
    process = await asyncio.to_thread(ImportProcess, request)
    try:
        reader, writer = await asyncio.open_connection(sock=process.answers)
        try:
            return await reader.read()
        finally:
            writer.close()
    finally:
        await asyncio.to_thread(process.end)


def _remove(target: Path | None) -> None:
    """What an import that nobody waits for, or that died, has made."""
    if target is not None:
        remove_staging(target)
        shutil.rmtree(target, ignore_errors=True)


def _error(failed: _Failed) -> DormouseError:
    error = RefusedSource(failed.error)
    error.status = failed.status
    return error
