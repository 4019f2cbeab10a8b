"""The HTTP application: both doors, one form of error. Thin, and plain ASGI all the way."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dormouse.core.types import Bytes
from dormouse.gateway.admin import Admin
from dormouse.gateway.answers import Handler, guarded, routing_answer
from dormouse.gateway.v2 import V2
from dormouse.submit import Submit


def create_app(submit: Submit, *, body_limit_bytes: Bytes) -> Starlette:
    """The application in front of one node. Bodies over the limit, packed or unpacked, are refused with 413."""
    table = V2(submit, body_limit_bytes).routes() | Admin(submit, body_limit_bytes).routes()
    app = Starlette(
        routes=[_route(path, methods) for path, methods in table.items()],
        exception_handlers={HTTPException: routing_answer},
    )
    # A slash too many is an unknown path, not a redirection that POST bodies would not survive.
    app.router.redirect_slashes = False
    return app


def _route(path: str, methods: dict[str, Handler]) -> Route:
    handlers = {method: guarded(handler) for method, handler in methods.items()}

    async def answer(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, answer, methods=list(methods))
