"""The operator's door, plain JSON under ``/dormouse``: what is deployed, deploy, remove, and dry runs."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dormouse.core.types import Bytes
from dormouse.errors import InvalidRequest
from dormouse.functions import Manifest, checked
from dormouse.gateway import content
from dormouse.gateway.answers import Handler, json_answer
from dormouse.submit import Submit


class Admin:
    """The handlers of one server."""

    def __init__(self, submit: Submit, body_limit_bytes: Bytes) -> None:
        self._submit = submit
        self._body_limit_bytes = body_limit_bytes

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Handlers by path and method."""
        return {
            "/dormouse/node": {"GET": self._node},
            "/dormouse/functions": {"GET": self._functions, "POST": self._deploy},
            "/dormouse/functions/{name}": {"GET": self._function, "DELETE": self._remove},
            "/dormouse/check": {"POST": self._check},
        }

    async def _node(self, _: Request) -> Response:
        return json_answer(self._submit.node())

    async def _functions(self, _: Request) -> Response:
        return json_answer({"functions": self._submit.functions()})

    async def _function(self, request: Request) -> Response:
        return json_answer(self._submit.function(request.path_params["name"]))

    async def _deploy(self, request: Request) -> Response:
        manifest = await self._manifest(request)
        version = await self._submit.deploy(manifest)
        return json_answer({"name": manifest.name, "version": version}, 201)

    async def _remove(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._submit.remove(name)
        return json_answer({"name": name})

    async def _check(self, request: Request) -> Response:
        return json_answer(await self._submit.check(await self._manifest(request)))

    async def _manifest(self, request: Request) -> Manifest:
        body = await content.read_body(request, self._body_limit_bytes)
        try:
            manifest = msgspec.json.decode(body, type=Manifest)
        except (msgspec.DecodeError, RecursionError) as fault:
            raise InvalidRequest(f"manifest: {fault}") from None
        return checked(manifest, "manifest")
