"""The HTTP application: all doors. Thin, and plain ASGI all the way."""

import re

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dormouse.core.types import Bytes
from dormouse.gateway.admin import Admin
from dormouse.gateway.answers import Handler, guarded, json_answer, routing_answer
from dormouse.gateway.openapi import document
from dormouse.gateway.v1 import V1
from dormouse.gateway.v2 import V2
from dormouse.submit import Submit

_INFER = re.compile(r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")


def create_app(submit: Submit, *, body_limit_bytes: Bytes) -> ASGIApp:
    """The application in front of one node. Bodies over the limit, packed or unpacked, are refused with 413."""
    v2 = V2(submit, body_limit_bytes)
    table = v2.routes() | V1(submit, body_limit_bytes).routes() | Admin(submit, body_limit_bytes).routes()
    table |= {"/openapi.json": {"GET": _described}}
    app = Starlette(
        routes=[_route(path, methods) for path, methods in table.items()],
        exception_handlers={HTTPException: routing_answer},
    )
    # A slash too many is an unknown path, not a redirection that POST bodies would not survive.
    app.router.redirect_slashes = False
    return _past_the_router(guarded(v2.infer), app)


async def _described(_: Request) -> Response:
    return json_answer(document())


def _past_the_router(infer: Handler, rest: ASGIApp) -> ASGIApp:
    """Inference at the shortest way: routing and its layers cost as much as the whole of the HTTP server."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or (found := _INFER.fullmatch(scope["path"])) is None:
            await rest(scope, receive, send)
            return
        scope["path_params"] = found.groupdict()
        response = await infer(Request(scope, receive))
        await response(scope, receive, send)

    return answer


def _route(path: str, methods: dict[str, Handler]) -> Route:
    handlers = {method: guarded(handler) for method, handler in methods.items()}

    async def answer(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, answer, methods=list(methods))
