"""One stream of infer requests over gRPC: served side by side, answered in the order they came.

A request that fails has its failure as its answer, and the stream goes on. No more than ``MOST_AT_ONCE`` are open:
the next is not read from the wire before the oldest has been answered, nor a chunk rendered that the client is too
slow to take.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

from dormouse.errors import DormouseError
from dormouse.gateway import grpc_form, notes
from dormouse.gateway.answers import unexpected
from dormouse.gateway.grpc_messages import Message, decoded, message
from dormouse.submit import Submit

MOST_AT_ONCE = 64
MOST_CHUNKS_AHEAD = 4

Answers: TypeAlias = "asyncio.Queue[bytes | None]"
"""One request's answers; None: there are no more."""

_Request = message("ModelInferRequest")


class Stream:
    """``terms`` says what the client has said beside its requests; each is served inside of ``enter``, and of
    ``observed``; ``write`` sends one message, when there is room."""

    def __init__(
        self,
        submit: Submit,
        terms: Callable[[], grpc_form.Terms],
        enter: Callable[[], AbstractContextManager[None]],
        write: Callable[[bytes], Awaitable[None]],
        observed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._submit = submit
        self._terms = terms
        self._enter = enter
        self._write = write
        self._observed = observed
        self._turns: asyncio.Queue[Answers | None] = asyncio.Queue(MOST_AT_ONCE)

    async def answer(self, wires: AsyncIterable[bytes]) -> None:
        """Serve until the client has no more requests and all are answered."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(wires, tasks))
            while (answers := await self._turns.get()) is not None:
                while (answer := await answers.get()) is not None:
                    await self._write(answer)

    async def _read(self, wires: AsyncIterable[bytes], tasks: asyncio.TaskGroup) -> None:
        async for wire in wires:
            answers: Answers = asyncio.Queue(MOST_CHUNKS_AHEAD)
            await self._turns.put(answers)
            tasks.create_task(self._serve(wire, answers))
        await self._turns.put(None)

    async def _serve(self, wire: bytes, answers: Answers) -> None:
        with self._observed():
            request = _Request()
            try:
                request = decoded(_Request, wire)
                with self._enter():
                    await self._infer(request, answers)
            except DormouseError as fault:
                await answers.put(_failed(request, fault))
            except Exception as fault:
                await answers.put(_failed(request, unexpected("ModelStreamInfer", fault)))
        await answers.put(None)

    async def _infer(self, request: Message, answers: Answers) -> None:
        version = request.model_version or None
        notes.asks(request.model_name, request.id)
        described = self._submit.describe(request.model_name, version)
        parsed = grpc_form.parse_infer(request, described, version, self._terms())
        async with contextlib.aclosing(self._submit.infer(parsed.inference)) as chunks:
            async for chunk in chunks:
                notes.answered(chunk)
                await answers.put(grpc_form.render_streamed(parsed, chunk).SerializeToString())


def _failed(request: Message, fault: DormouseError) -> bytes:
    notes.failed(fault)
    wire: bytes = grpc_form.render_failed(request.model_name, request.id, fault.message).SerializeToString()
    return wire
