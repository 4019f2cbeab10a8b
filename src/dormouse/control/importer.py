"""Runs the importer in a process of its own, because it needs torch and reads files that nobody has checked yet."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dormouse.core.types import Bytes
from dormouse.errors import DormouseError, RefusedSource
from dormouse.functions import Manifest
from dormouse.tensors import Signature


class Imported(Struct, frozen=True):
    """What the importer made, or with ``inspect`` would make."""

    image_bytes: Bytes
    state_bytes: Bytes
    signature: Signature
    platform: str


class _Failed(Struct, frozen=True):
    error: str
    status: int


async def import_source(
    manifest: Manifest, target: Path | None, allow_code: tuple[Path, ...], *, inspect: bool = False
) -> Imported:
    """Turn a source into an image directory at ``target``. Raises RefusedSource; nothing is left behind then."""
    request = {
        "manifest": msgspec.to_builtins(manifest),
        "target": "" if target is None else str(target),
        "allow_code": [str(directory) for directory in allow_code],
        "inspect": inspect,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "dormouse.model.importing",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, noise = await process.communicate(msgspec.json.encode(request))
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    return _result(manifest, process.returncode, output, noise)


def _result(manifest: Manifest, status: int | None, output: bytes, noise: bytes) -> Imported:
    lines = output.strip().splitlines()
    try:
        answer: Any = msgspec.json.decode(lines[-1])
        if "error" in answer:
            raise _error(msgspec.convert(answer, _Failed))
        return msgspec.convert(answer, Imported)
    except (IndexError, msgspec.MsgspecError):
        last = noise.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise RefusedSource(
            f"'{manifest.name}': importing {manifest.source} ended with status {status}: {last[0]}"
        ) from None


def _error(failed: _Failed) -> DormouseError:
    error = RefusedSource(failed.error)
    error.status = failed.status
    return error
