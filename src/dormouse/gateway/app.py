"""The HTTP application: the gate, both doors, one form of error. Thin, and plain ASGI all the way."""

import asyncio
import re

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dormouse.core.types import Bytes
from dormouse.errors import DormouseError
from dormouse.gateway import notes
from dormouse.gateway.access import OPEN_PATHS, Table, Views, key_headers
from dormouse.gateway.admin import Admin
from dormouse.gateway.answers import error_answer, guarded, json_answer, routing_answer
from dormouse.gateway.dashboard import EVENTS, Dashboard, Page
from dormouse.gateway.observing import Observer, observing
from dormouse.gateway.openapi import document
from dormouse.gateway.scrape import Scrape
from dormouse.gateway.v1 import V1
from dormouse.gateway.v2 import V2
from dormouse.metrics.exposition import Exposition
from dormouse.submit import Submit
from dormouse.tenants.callers import STRANGER
from dormouse.tenants.gate import Gate, OpenGate

_INFER_PATH = "/v2/models/{name}/infer"
_INFER = re.compile(r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")


_TABLE = "dormouse.table"
"""Where a request's scope has the handlers of its caller."""


_OPEN = OPEN_PATHS | Page().routes().keys()


def create_app(
    submit: Submit,
    *,
    body_limit_bytes: Bytes,
    gate: Gate | None = None,
    ended: asyncio.Event | None = None,
    observer: Observer | None = None,
) -> ASGIApp:
    """The application in front of one node. Bodies over the limit, packed or unpacked, are refused with 413. Without
    a gate everybody may do everything. ``ended``: set when the server stops, so that endless answers end, too."""
    ends = ended or asyncio.Event()

    observer = observer or Observer()
    exposition = Exposition(observer.answers)

    def handlers(seen: Submit) -> Table:
        doors = (
            V2(seen, body_limit_bytes),
            V1(seen, body_limit_bytes),
            Admin(seen, body_limit_bytes),
            Dashboard(seen, ends),
            Page(),
            Scrape(seen, exposition),
        )
        table = {path: methods for door in doors for path, methods in door.routes().items()}
        table["/openapi.json"] = {"GET": _described}
        return {path: {name: guarded(each) for name, each in methods.items()} for path, methods in table.items()}

    views = Views(submit, handlers)
    app = Starlette(
        routes=[_route(path, list(methods)) for path, methods in views.of(STRANGER).items()],
        exception_handlers={HTTPException: routing_answer},
    )
    # A slash too many is an unknown path, not a redirection that POST bodies would not survive.
    app.router.redirect_slashes = False
    return observing(observer, _past_the_gate(gate or OpenGate(), views, _past_the_router(app)))


async def _described(_: Request) -> Response:
    return json_answer(document())


def _past_the_gate(gate: Gate, views: Views, inside: ASGIApp) -> ASGIApp:
    """Refusals come before the body has been read; who is let in is inside until the whole answer has been sent."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await inside(scope, receive, send)
            return
        if scope["path"] in _OPEN:
            scope[_TABLE] = views.of(STRANGER)
            await inside(scope, receive, send)
            return
        try:
            caller = gate.caller_of(key_headers(scope))
            notes.asked_by(caller.tenant)
            if scope["path"] == EVENTS:  # who watches takes no request's place
                gate.check(caller)
                with gate.streaming(caller):
                    scope[_TABLE] = views.of(caller)
                    await inside(scope, receive, send)
                return
            gate.enter(caller)
        except DormouseError as fault:
            await error_answer(fault, scope["path"])(scope, receive, send)
            return
        try:
            scope[_TABLE] = views.of(caller)
            await inside(scope, receive, send)
        finally:
            gate.leave(caller)

    return answer


def _past_the_router(rest: ASGIApp) -> ASGIApp:
    """Inference at the shortest way: routing and its layers cost as much as the whole of the HTTP server."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or (found := _INFER.fullmatch(scope["path"])) is None:
            await rest(scope, receive, send)
            return
        scope["path_params"] = found.groupdict()
        table: Table = scope[_TABLE]
        response = await table[_INFER_PATH]["POST"](Request(scope, receive))
        await response(scope, receive, send)

    return answer


def _route(path: str, methods: list[str]) -> Route:
    async def answer(request: Request) -> Response:
        table: Table = request.scope[_TABLE]
        return await table[path]["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, answer, methods=methods)
