"""The page, and what feeds it: files as they lie in the package, the picture, and the stream of its changes.

The files need no key, since there is nothing in them; everything that the page shows comes through the picture.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from dormouse.gateway.answers import Handler, json_answer, unless_gone
from dormouse.submit import Submit
from dormouse.watch.feed import Feed

PAGE = "/dormouse/"
EVENTS = "/dormouse/events"
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_START = "index.html"


class File(Struct, frozen=True):
    content: bytes
    kind: str
    tag: str


@cache
def page_files() -> Mapping[str, File]:
    """Every file of the page by its path on the server."""
    found = {}
    for file in files("dormouse.gateway").joinpath("page").iterdir():
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            path = PAGE if file.name == _START else f"{PAGE}page/{file.name}"
            found[path] = File(content, kind, f'"{sha256(content).hexdigest()[:32]}"')
    return found


class Dashboard:
    """The handlers of one caller."""

    def __init__(self, submit: Submit, ended: asyncio.Event) -> None:
        self._submit = submit
        self._feed = Feed(submit.picture, ended)

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Handlers by path and method."""
        return {
            "/dormouse/picture": {"GET": self._picture},
            EVENTS: {"GET": self._events},
        }

    async def _picture(self, _: Request) -> Response:
        return json_answer(self._submit.picture())

    async def _events(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type=EventsAnswer.media_type)
        return EventsAnswer(self._feed.watch())


class Page:
    """The handlers of the page itself, which no client reads but a browser. They need no key."""

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Handlers by path and method."""
        moved: dict[str, dict[str, Handler]] = {path: {"GET": _to_the_page} for path in ("/", PAGE.rstrip("/"))}
        return moved | {path: {"GET": _file} for path in page_files()}


async def _to_the_page(_: Request) -> Response:
    return RedirectResponse(PAGE, 307)


async def _file(request: Request) -> Response:
    file = page_files()[request.url.path]
    headers = {**HEADERS, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.kind)


class EventsAnswer(Response):
    """Server-sent events for as long as there are any, or the client is there."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope  # ASGI's signature
        async with contextlib.aclosing(self._frames):
            with contextlib.suppress(ClientDisconnect):
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
