"""The parent's side of an executor: starts the process, passes messages, and starts it again when it dies.

One supervisor for one executor. It knows frames, exit statuses and back-off; what a message means is the listener's
business. Whether a process lives is learned from its socket: it ends when the process does, however that ended.

    starting --ExecutorReady--> ready --end of socket--> lost, back-off, starting
        |--ExecutorUnusable, no process at the first try, or too many deaths in a row--> given up
"""

import asyncio
import logging
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from io import BufferedWriter
from pathlib import Path
from typing import Protocol

import msgspec

from dormouse import wire
from dormouse.core.types import Bytes

COMMAND = (sys.executable, "-m", "dormouse.executor.process")
"""What is started; the number of the inherited socket follows."""

DELAYS_S = (0.0, 0.5, 2.0, 10.0)
"""Before the first restart, the second, ...; the last one repeats."""

_LOG = logging.getLogger("dormouse.executor")
_LOG_LIMIT_BYTES: Bytes = 4 * 1024 * 1024


class Listener(Protocol):
    """Called from the event loop, in the order things happened."""

    def joined(self, ready: wire.ExecutorReady) -> None: ...

    def received(self, message: wire.FromExecutor) -> None: ...

    def lost(self, message: str) -> None:
        """Once for each ``joined``, unless the supervisor was stopped. The executor is being started again."""

    def unusable(self, message: str) -> None:
        """Given up: there will be no executor."""


class _Frames(asyncio.Protocol):
    """The bytes of a socket, cut into messages as they come: no task wakes for each of them."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take: Callable[[wire.FromExecutor], None] | None = None
        self._refuse: Callable[[str], None] = _LOG.error
        self._unread = bytearray()

    async def deliver(self, take: Callable[[wire.FromExecutor], None], refuse: Callable[[str], None]) -> None:
        """Give ``take`` every message, until the socket has ended, however it did; ``refuse`` is told what is none,
        after which nothing more is taken. Raises what ``take`` raises."""
        self._take, self._refuse = take, refuse
        self.data_received(b"")  # what came before
        await self._ended

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if self._take is None:
            return
        try:
            for body in wire.whole_frames(self._unread):
                self._take(wire.decode_from_executor(body))
        except msgspec.DecodeError as fault:
            self._take = None
            self._refuse(str(fault))
        except Exception as fault:  # a bug in whoever takes: not for the event loop, which would say little of it
            self._take = None
            self._end(fault)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # how its process ended says more
        self._end(None)

    def _end(self, fault: Exception | None) -> None:
        if self._ended.done():
            return
        if fault is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(fault)


@dataclass(slots=True)
class _Child:
    process: Process
    frames: _Frames
    transport: asyncio.Transport
    log_start: Bytes
    condemned: str = ""
    """Why the supervisor killed it, if it did."""
    ready: bool = False
    outgoing: list[bytes] = field(default_factory=list)


class Supervisor:
    """``start.arena_fd`` and the slabs' descriptors are inherited by every process that is started."""

    def __init__(
        self,
        start: wire.StartExecutor,
        listener: Listener,
        log_file: Path,
        *,
        command: Sequence[str] = COMMAND,
        delays_s: Sequence[float] = DELAYS_S,
        health_s: float = 60.0,
        start_limit_s: float = 120.0,
        reap_limit_s: float = 5.0,
        outgoing_limit_bytes: Bytes = 16 * 1024 * 1024,
    ) -> None:
        self._start = start
        self._listener = listener
        self._log_file = log_file
        self._command = tuple(command)
        self._delays_s = tuple(delays_s)
        self._health_s = health_s
        self._start_limit_s = start_limit_s
        self._reap_limit_s = reap_limit_s
        self._outgoing_limit_bytes = outgoing_limit_bytes
        self._child: _Child | None = None
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; ``joined`` or ``unusable`` follows. Needs a running event loop."""
        assert self._task is None, "started twice"
        self._task = asyncio.get_running_loop().create_task(self._supervise())
        self._task.add_done_callback(_complain)

    def send(self, message: wire.ToExecutor) -> None:
        """Queue a message and return. What is sent while there is no executor is lost, as it is with a dying one."""
        child = self._child
        if child is None or child.transport.is_closing():
            return
        if not child.outgoing:
            asyncio.get_running_loop().call_soon(self._flush, child)
        child.outgoing.append(wire.frame(message))

    def _flush(self, child: _Child) -> None:
        """Write what has been sent since the loop last came round: one system call for all of it."""
        if not child.transport.is_closing():
            child.transport.write(b"".join(child.outgoing))
            waiting = child.transport.get_write_buffer_size()
            if waiting > self._outgoing_limit_bytes:
                self._condemn(child, f"did not read its messages, {waiting} bytes were waiting")
        child.outgoing.clear()

    async def stop(self, limit_s: float = 10.0) -> None:
        """Ask the executor to end, kill it if it has not within ``limit_s``, and wait until it is gone."""
        self._stopping.set()
        if self._task is None:
            return
        self.send(wire.Shutdown())
        done, _ = await asyncio.wait([self._task], timeout=limit_s)
        if not done and self._child is not None:
            self._condemn(self._child, f"did not end within {limit_s:g} s")
        await self._task

    # -------------------------------------------------------------- the life of one process after another

    async def _supervise(self) -> None:
        attempt = failed_starts = 0
        proved = False
        while not self._stopping.is_set():
            began_s = asyncio.get_running_loop().time()
            try:
                child = await self._spawn()
            except OSError as fault:
                message = f"executor {self._start.executor} cannot be started: {fault}"
                if not proved:
                    self._listener.unusable(message)
                    return
                await self._back_off(attempt, message)  # it could be before: memory or descriptors have run out
                attempt += 1
                continue
            unusable = await self._converse(child)
            message = await self._bury(child)
            if self._stopping.is_set():
                return
            proved = proved or child.ready
            failed_starts = 0 if child.ready else failed_starts + 1
            if child.ready:
                self._listener.lost(message)
            if unusable or failed_starts > len(self._delays_s):
                self._listener.unusable(unusable or f"{message}; given up after {failed_starts} starts")
                return
            if asyncio.get_running_loop().time() - began_s > self._health_s:
                attempt = 0
            await self._back_off(attempt, message)
            attempt += 1

    async def _back_off(self, attempt: int, message: str) -> None:
        delay_s = self._delays_s[min(attempt, len(self._delays_s) - 1)]
        _LOG.warning("%s; starting it again in %g s", message, delay_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _spawn(self) -> _Child:
        ours, theirs = socket.socketpair()
        with ExitStack() as undo, theirs, self._open_log() as log:
            undo.enter_context(ours)
            inherited = (
                theirs.fileno(),
                self._start.arena_fd,
                self._start.request_slab_fd,
                self._start.reply_slab_fd,
            )
            process = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=inherited,
                start_new_session=True,  # Ctrl-C in a terminal is for the parent, which then asks us to end
            )
            log_start = log.tell()
            undo.pop_all()
        transport, frames = await asyncio.get_running_loop().create_connection(_Frames, sock=ours)
        child = self._child = _Child(process, frames, transport, log_start)
        self.send(self._start)
        if self._stopping.is_set():  # while it was being made
            self.send(wire.Shutdown())
        return child

    async def _converse(self, child: _Child) -> str:
        """Deliver messages until the socket ends; the message of an ExecutorUnusable, else nothing."""
        limit = asyncio.get_running_loop().call_later(
            self._start_limit_s, self._condemn, child, f"was not ready within {self._start_limit_s:g} s"
        )
        unusable = ""

        def take(message: wire.FromExecutor) -> None:
            nonlocal unusable
            limit.cancel()
            if isinstance(message, wire.ExecutorUnusable):
                unusable = message.message
            elif isinstance(message, wire.ExecutorReady):
                child.ready = True
                if not self._stopping.is_set():
                    self._listener.joined(message)
            else:
                self._listener.received(message)

        try:
            await child.frames.deliver(take, lambda why: self._condemn(child, f"sent what is no message: {why}"))
        finally:
            limit.cancel()
        return unusable

    async def _bury(self, child: _Child) -> str:
        """Reap a process whose socket has ended; how it ended, in words."""
        self._child = None
        child.transport.abort()
        try:
            await asyncio.wait_for(child.process.wait(), self._reap_limit_s)
        except TimeoutError:
            self._condemn(child, "closed its socket and lived on")
            await child.process.wait()
        words = self._last_words(child)
        said = f"it last wrote: {words}" if words else f"it wrote nothing to {self._log_file}"
        return f"executor {self._start.executor} (pid {child.process.pid}) {_end_of(child)}; {said}"

    def _condemn(self, child: _Child, why: str) -> None:
        if child.process.returncode is None and not child.condemned:
            child.condemned = why
            child.process.kill()

    # -------------------------------------------------------------- its log

    def _open_log(self) -> BufferedWriter:
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            if self._log_file.stat().st_size > _LOG_LIMIT_BYTES:
                self._log_file.replace(self._log_file.with_suffix(".log.1"))
        return self._log_file.open("ab")

    def _last_words(self, child: _Child) -> str:
        """The last line that this process wrote: of a Python error, the line that says what it was."""
        with suppress(OSError), self._log_file.open("rb") as log:
            log.seek(max(child.log_start, log.seek(0, 2) - 16 * 1024))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            return lines[-1].strip() if lines else ""
        return ""


def _complain(task: "asyncio.Task[None]") -> None:
    """A listener that raises is a bug, and must not look like a quiet executor."""
    if not task.cancelled() and (fault := task.exception()) is not None:
        _LOG.critical("the supervision of an executor ended", exc_info=fault)


def _end_of(child: _Child) -> str:
    status = child.process.returncode
    assert status is not None
    if child.condemned:
        return f"{child.condemned} and was killed"
    if status < 0:
        named = -status in {known.value for known in signal.Signals}
        return f"was killed by {signal.Signals(-status).name if named else f'signal {-status}'}"
    return f"exited with status {status}" if status else "exited without being asked"
