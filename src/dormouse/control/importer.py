"""Runs the importer in a process of its own, because it needs torch and reads files that nobody has checked yet."""

import asyncio
import shutil
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dormouse.core.types import Bytes
from dormouse.errors import DormouseError, RefusedSource
from dormouse.functions import Manifest
from dormouse.model.import_process import answer, process_for_one_import
from dormouse.store.image import remove_staging
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
    process = process_for_one_import()
    work = process.submit(answer, msgspec.json.encode(request))
    try:
        output = await asyncio.wrap_future(work)
    except BrokenProcessPool:
        _remove(target)
        raise RefusedSource(
            f"'{manifest.name}': the importer died while it read {manifest.source}; "
            "the source may be damaged, or memory may have run out"
        ) from None
    except asyncio.CancelledError:
        work.add_done_callback(lambda _: _remove(target))
        raise
    finally:
        process.shutdown(wait=False)
    told: Any = msgspec.json.decode(output)
    if "error" in told:
        raise _error(msgspec.convert(told, _Failed))
    return msgspec.convert(told, Imported)


def _remove(target: Path | None) -> None:
    """What an import that nobody waits for, or that died, has made."""
    if target is not None:
        remove_staging(target)
        shutil.rmtree(target, ignore_errors=True)


def _error(failed: _Failed) -> DormouseError:
    error = RefusedSource(failed.error)
    error.status = failed.status
    return error
