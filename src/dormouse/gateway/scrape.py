"""``GET /metrics``: the books as Prometheus reads them, a piece at a time, so that requests go on being served."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from dormouse.gateway import content
from dormouse.gateway.answers import Handler
from dormouse.metrics.exposition import Exposition
from dormouse.submit import Submit


class Scrape:
    """The handlers of one server."""

    def __init__(self, submit: Submit, exposition: Exposition) -> None:
        self._submit = submit
        self._exposition = exposition

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Handlers by path and method."""
        return {"/metrics": {"GET": self._metrics}}

    async def _metrics(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        parts = []
        for piece in self._exposition.pieces(self._submit.books(), accept):
            if piece:
                parts.append(piece)
            else:
                await asyncio.sleep(0)
        headers = {"Content-Type": self._exposition.content_type(accept)}
        coding = content.chosen_coding(request.headers.get("accept-encoding", ""))
        body = [part.encode() for part in parts]
        if coding is None:
            return Response(b"".join(body), headers=headers)
        return Response(await content.compressed(coding, body), headers={**headers, "Content-Encoding": coding})
