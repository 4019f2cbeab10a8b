"""A process that the demo starts: where its complaints go, how it is ended, and what it said last."""

import asyncio
import ctypes
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from dormouse.errors import DormouseError

_LINE_LIMIT_BYTES = 2**20
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


@asynccontextmanager
async def child(
    command: Sequence[str], log_file: Path, *, stop_limit_s: float
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running process with pipes for its input and output. When left it is asked to end, later made to."""
    with log_file.open("wb") as log:
        # A session of its own: Ctrl-C reaches the demo alone, which then ends its processes in order.
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=_LINE_LIMIT_BYTES,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        yield process
    finally:
        await _end(process, stop_limit_s)


def _end_with_parent() -> None:
    """The system ends the process when the demo is killed and can end nothing itself."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def _end(process: asyncio.subprocess.Process, limit_s: float) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def failure(what: str, process: asyncio.subprocess.Process, log_file: Path) -> DormouseError:
    """An error with the status and the last words of a process that is ending."""
    status = await process.wait()
    last = log_file.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    return DormouseError(f"{what} (status {status}): {last[0].removeprefix('error: ')}")
