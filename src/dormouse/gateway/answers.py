"""What leaves the server: JSON, errors in the form that a door's clients read, tensors, JSON lines.

Knows what an error looks like, and not what caused it.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dormouse.errors import DormouseError, Forbidden, Unavailable
from dormouse.gateway import notes, openai_form
from dormouse.gateway.notes import NO_ONE_LEFT

Handler = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")

CHALLENGE = 'Bearer realm="dormouse"'
OPENAI = "/v1/"
"""Below it, errors have OpenAI's form."""

_UNWATCHED_S = 0.01
"""So long nobody looks whether the client is still there."""

log = logging.getLogger("dormouse.gateway")


def json_answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_answer(fault: DormouseError, path: str = "") -> Response:
    notes.failed(fault)
    headers = {"WWW-Authenticate": CHALLENGE} if fault.status == 401 else {}
    if fault.retry_after_s is not None or fault.status == 503:
        headers["Retry-After"] = str(max(1, math.ceil(fault.retry_after_s or 1)))
    body = openai_form.error_body(fault) if path.startswith(OPENAI) else {"error": fault.message}
    return json_answer(body, fault.status, headers)


async def routing_answer(request: Request, fault: Exception) -> Response:
    """Unknown paths and wrong methods, which the router reports as HTTPException."""
    assert isinstance(fault, HTTPException)
    path = request.url.path[:200]
    if fault.status_code == 405:
        allowed = (fault.headers or {}).get("Allow", "")
        text = f"{request.method} is not allowed on {path}; allowed: {allowed}"
    else:
        text = f"no such path: {path}"
    refusal = DormouseError(text)
    refusal.status = fault.status_code
    answer = error_answer(refusal, path)
    answer.headers.update(fault.headers or {})
    return answer


def guarded(handler: Handler) -> Handler:
    """The handler, with every failure turned into an answer of one line."""

    async def answer(request: Request) -> Response:
        try:
            _check_origin(request)
            return await handler(request)
        except DormouseError as fault:
            return error_answer(fault, request.url.path)
        except ClientDisconnect:
            return Response(status_code=NO_ONE_LEFT)
        except asyncio.CancelledError:  # by the HTTP server, when its grace is over; the client still listens
            return error_answer(Unavailable("the server is shutting down", retry_after_s=1), request.url.path)
        except Exception as fault:
            return error_answer(unexpected(f"{request.method} {request.url.path}", fault), request.url.path)

    return answer


def _check_origin(request: Request) -> None:
    """A page in somebody's browser may not use that browser's way to a loopback server. Raises Forbidden."""
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise Forbidden(f"requests from pages of {origin} are not answered here")


def unexpected(during: str, fault: Exception) -> DormouseError:
    """A bug of ours: the log gets all of it, the client one line."""
    log.error("unexpected failure in %s", during, exc_info=fault)
    return DormouseError(f"internal error: {type(fault).__name__}; the server's log has the details")


async def unless_gone(receive: Receive, work: Coroutine[None, None, Result]) -> Result:
    """The result of ``work``, which is cancelled if the client goes first. Raises ClientDisconnect then."""
    watch = _Watch(receive)
    try:
        return await work
    except asyncio.CancelledError:
        if watch.client_gone:
            raise ClientDisconnect from None
        raise
    finally:
        watch.end()


class _Watch:
    """Cancels the task that made it when its client goes, but looks only after a while: most answers are there by
    then, and a task that watches costs as much as what the answer takes of the server."""

    def __init__(self, receive: Receive) -> None:
        self.client_gone = False
        self._receive = receive
        self._for = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(_UNWATCHED_S, self._look)
        self._looking: asyncio.Task[None] | None = None

    def _look(self) -> None:
        self._looking = asyncio.create_task(_disconnected(self._receive))
        self._looking.add_done_callback(self._seen)

    def _seen(self, looking: "asyncio.Task[None]") -> None:
        if not looking.cancelled() and self._for is not None:
            self.client_gone = self._for.cancel()

    def end(self) -> None:
        """The work has ended."""
        self._timer.cancel()
        if self.client_gone and self._for is not None:
            self._for.uncancel()
        self._for = None
        if self._looking is not None:
            self._looking.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class TensorAnswer(Response):
    """A body in parts, sent as they are: joining would copy every tensor once more."""

    def __init__(self, parts: Sequence[bytes | memoryview], media_type: str, headers: Mapping[str, str]) -> None:
        length = sum(len(part) for part in parts)
        super().__init__(headers={**headers, "Content-Length": str(length)}, media_type=media_type)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive  # ASGI's signature
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = len(self._parts) - 1
        for index, part in enumerate(self._parts):
            await send({"type": "http.response.body", "body": part, "more_body": index < last})


class PiecesAnswer(Response):
    """A body that is made piece by piece as the client takes it; how long it will be nobody knows before."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], media_type: str, headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["Content-Length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope  # ASGI's signature
        async with contextlib.aclosing(self._pieces):
            with contextlib.suppress(ClientDisconnect):
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class LinesAnswer(Response):
    """JSON lines as they come. A failure after the first line is the last line; the status is long gone."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="application/x-ndjson")
        del self.headers["Content-Length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope  # ASGI's signature
        async with contextlib.aclosing(self._rest):
            with contextlib.suppress(ClientDisconnect):
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for line in self._rest:
                await send({"type": "http.response.body", "body": line, "more_body": True})
        except DormouseError as fault:
            await send({"type": "http.response.body", "body": _error_line(fault), "more_body": True})
        except Exception as fault:
            line = _error_line(unexpected("a stream", fault))
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _error_line(fault: DormouseError) -> bytes:
    return msgspec.json.encode({"error": fault.message}) + b"\n"
