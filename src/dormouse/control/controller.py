"""The shell around the core: gives it the time, takes events in, performs the commands that come out.

One event at a time, in the event loop's thread; an event that a command brings forth waits for its turn. No
decision is taken here.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, assert_never

from dormouse.control.cashier import Cashier
from dormouse.control.payloads import Answer, Outputs, Payloads
from dormouse.core.messages import (
    Acknowledge,
    Cancel,
    Command,
    CommandRefused,
    DeleteImage,
    DropImage,
    Event,
    Evict,
    Execute,
    ExecutionFailed,
    ExecutionFinished,
    ExecutorLost,
    Forget,
    ImageRead,
    ImageReadFailed,
    Load,
    ReadImage,
    Refuse,
    Reply,
    RequestCancelled,
    SetTimer,
    TimerFired,
)
from dormouse.core.scheduler import Scheduler
from dormouse.core.types import ExecutorId, FunctionId, Ns, OperationId, RequestId, Settings
from dormouse.errors import DormouseError, Unavailable, error_for, without_paths
from dormouse.journal import JournalWriter
from dormouse.store.host import HostStore
from dormouse.wire import ExecuteRequest, LoadImage, ToExecutor

_LOG = logging.getLogger("dormouse.control")
_SECOND_NS = 1_000_000_000


class Executors(Protocol):
    """The seam to whatever runs models: live processes here, a cluster later."""

    def send(self, executor: ExecutorId, message: ToExecutor) -> None: ...


class Controller:
    """Drives one core."""

    def __init__(
        self,
        settings: Settings,
        *,
        executors: Executors,
        store: HostStore,
        payloads: Payloads,
        directory_of: Callable[[FunctionId], Path],
        journal: JournalWriter | None = None,
        cashier: Cashier | None = None,
        clock: Callable[[], Ns] = time.monotonic_ns,
    ) -> None:
        self.core = Scheduler(settings)
        self._executors = executors
        self._store = store
        self._payloads = payloads
        self._directory_of = directory_of
        self._journal = journal
        self._cashier = cashier
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[tuple[Event, Outputs]] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._operations: dict[OperationId, asyncio.Future[None]] = {}
        self._next_operation = 1
        self._work: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ events in

    def post(self, event: Event, outputs: Outputs | None = None) -> None:
        """Give the core an event; ``outputs`` are the tensors of the chunks it tells of."""
        self._inbox.append((event, outputs or {}))
        if self._handling:
            return
        self._handling = True
        try:
            while self._inbox:
                self._handle(*self._inbox.popleft())
        finally:
            self._handling = False

    def _handle(self, event: Event, outputs: Outputs) -> None:
        now = self._clock()
        commands = self.core.handle(now, event)
        if self._journal is not None:
            self._journal.append(now, event, commands)
        if self._cashier is not None:
            self._cashier.book(now, event, commands, outputs, self.core.state)
        for command in commands:
            self._perform(command, outputs)
        self._release_ended(event, commands)

    def _release_ended(self, event: Event, commands: list[Command]) -> None:
        """Free the tensors of requests that the core has forgotten: no executor will read them."""
        ended: set[RequestId] = {c.request for c in commands if isinstance(c, Reply | Refuse)}
        match event:
            case ExecutorLost() | CommandRefused():  # which do not say whose request it was
                ended.update(self._payloads.open_requests())
            case RequestCancelled():
                ended.add(event.request)
            case ExecutionFinished() | ExecutionFailed():
                ended.update((event.request, *event.others))
            case _:
                pass
        for request in ended:
            if request not in self.core.state.requests:
                self._payloads.release(request)

    def now(self) -> Ns:
        """The time as the core will see it."""
        return self._clock()

    # ------------------------------------------------------------------ operations

    async def operate(self, make: Callable[[OperationId], Event]) -> None:
        """Ask for an operation and wait until it has happened. Raises what the core's refusal means."""
        await asyncio.shield(self.begin(make))

    def begin(self, make: Callable[[OperationId], Event]) -> "asyncio.Future[None]":
        """Ask for an operation; the core knows of it when this returns."""
        operation = OperationId(self._next_operation)
        self._next_operation += 1
        done: asyncio.Future[None] = self._loop.create_future()
        self._operations[operation] = done
        self.post(make(operation))
        return done

    # ------------------------------------------------------------------ commands out

    def _perform(self, command: Command, outputs: Outputs) -> None:
        match command:
            case Load():
                directory = str(self._directory_of(command.function))
                from_host = command.source is None
                extents = self._store.extents(command.function) if from_host else ()
                self._executors.send(command.executor, LoadImage(command, directory, extents))
            case Execute():
                payload = self._payloads[command.request]
                others = tuple([self._payloads[request].inputs for request in command.others])
                request = ExecuteRequest(command, payload.inputs, payload.outputs, others)
                self._executors.send(command.executor, request)
            case Evict() | Cancel() | Forget():
                if isinstance(command, Evict):
                    _LOG.debug("%s gives back the memory of '%s'", command.executor, command.function)
                self._executors.send(command.executor, command)
            case ReadImage():
                self._spawn(self._read(command.function))
            case DropImage():
                self._spawn(self._store.drop(command.function))
            case DeleteImage():
                self._spawn(self._store.delete(command.function, self._directory_of(command.function)))
            case Reply():
                self._answer(command, outputs)
            case Refuse():
                self._refuse(command)
            case Acknowledge():
                self._acknowledge(command)
            case SetTimer():
                self._set_timer(command.at_ns)
            case _ as never:
                assert_never(never)

    def _answer(self, reply: Reply, outputs: Outputs) -> None:
        answers = self._payloads[reply.request].answers
        answer = Answer(reply, outputs.get(reply.request, ()))
        if self._cashier is None or not reply.final:
            answers.put_nowait(answer)
        else:
            self._cashier.hand_out(reply.request, answers, answer)

    def _refuse(self, command: Refuse) -> None:
        retry_after_s = command.retry_after_ns / _SECOND_NS if command.retry_after_ns else None
        error = error_for(command.reason, command.message, retry_after_s)
        self._payloads[command.request].answers.put_nowait(error)

    def _acknowledge(self, command: Acknowledge) -> None:
        done = self._operations.pop(command.operation)
        if command.reason is None:
            done.set_result(None)
        else:
            done.set_exception(error_for(command.reason, command.message))
            done.exception()  # marks it as seen: whoever waited may have gone away

    def _set_timer(self, at_ns: Ns) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(at_ns - self._clock(), 0) / _SECOND_NS
        self._timer = self._loop.call_later(delay_s, self.post, TimerFired())

    async def _read(self, function: FunctionId) -> None:
        try:
            await self._store.read(function, self._directory_of(function))
        except DormouseError as fault:
            _LOG.error("the image of '%s' cannot be read: %s", function, fault.message)
            message = without_paths(fault.message, str(self._directory_of(function)))
            self.post(ImageReadFailed(function, message))
        else:
            self.post(ImageRead(function))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._work.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _LOG.error("%s", fault)

    # ------------------------------------------------------------------ the end

    async def close(self) -> None:
        """Answer everybody who still waits, and let what was begun in the host store end."""
        if self._timer is not None:
            self._timer.cancel()
        for request in self._payloads.open_requests():
            self._payloads[request].answers.put_nowait(Unavailable("the server is shutting down"))
        for done in self._operations.values():
            done.set_exception(Unavailable("the server is shutting down"))
            done.exception()
        if self._work:
            await asyncio.wait(self._work)
        if self._cashier is not None:
            await self._cashier.close(self._clock())
        if self._journal is not None:
            self._journal.close()
