"""The V2 door: each route of KServe V2 and its repository extension, from request to answer.

Decides nothing: bodies.py reads and writes bodies, reports.py says what is known of functions, Submit does the work.
"""

import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from dormouse import __version__
from dormouse.core.types import Bytes
from dormouse.errors import Unavailable
from dormouse.gateway import bodies, content, kserve, notes, reports
from dormouse.gateway.answers import Handler, LinesAnswer, PiecesAnswer, TensorAnswer, json_answer, unless_gone
from dormouse.gateway.chunks import last_of
from dormouse.gateway.pacing import all_of, paced, result_of
from dormouse.gateway.repository import Repository
from dormouse.submit import Chunk, Submit


class V2:
    """The handlers of one server."""

    def __init__(self, submit: Submit, body_limit_bytes: Bytes) -> None:
        self._submit = submit
        self._repository = Repository(submit)
        self._body_limit_bytes = body_limit_bytes

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Handlers by path and method."""
        models = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
        return {
            **{f"{model}/infer": {"POST": self.infer} for model in models},
            "/v2/models/stats": {"GET": self._statistics_of_all},  # before the models, one of which may be called so
            "/v2/health/live": {"GET": self._live},
            "/v2/health/ready": {"GET": self._ready},
            **{f"{model}/ready": {"GET": self._model_ready} for model in models},
            **{model: {"GET": self._metadata} for model in models},
            **{f"{model}/config": {"GET": self._configuration} for model in models},
            **{f"{model}/stats": {"GET": self._statistics} for model in models},
            "/v2/models": {"GET": self._models},
            "/v2/repository/index": {"POST": self._index},
            "/v2/repository/models/{name}/load": {"POST": self._load},
            "/v2/repository/models/{name}/unload": {"POST": self._unload},
            "/v2": {"GET": self._server},
            "/v2/": {"GET": self._server},
        }

    async def _server(self, _: Request) -> Response:
        return json_answer({"name": "dormouse", "version": __version__, "extensions": kserve.EXTENSIONS})

    async def _live(self, _: Request) -> Response:
        return self._health({"live": self._submit.live()}, "live")

    async def _ready(self, _: Request) -> Response:
        return self._health({"ready": self._submit.ready(), "live": self._submit.live()}, "ready")

    def _health(self, state: dict[str, bool], asked: str) -> Response:
        """Some clients read the status, others the body."""
        if state[asked]:
            return json_answer(state)
        return json_answer({**state, "error": f"the server is not {asked}"}, 503, {"Retry-After": "1"})

    async def _models(self, _: Request) -> Response:
        return json_answer({"models": sorted({entry.name for entry in self._submit.index()})})

    async def _metadata(self, request: Request) -> Response:
        return json_answer(reports.metadata(self._submit.describe(*_model(request))))

    async def _configuration(self, request: Request) -> Response:
        return json_answer(reports.configuration(self._submit.describe(*_model(request))))

    async def _statistics(self, request: Request) -> Response:
        return json_answer(reports.statistics(self._submit.statistics(*_model(request))))

    async def _statistics_of_all(self, _: Request) -> Response:
        return json_answer(reports.statistics(self._submit.statistics()))

    async def _model_ready(self, request: Request) -> Response:
        name, version = _model(request)
        if not self._submit.function_ready(name, version):
            raise Unavailable(f"function {name!r} is not ready", retry_after_s=1)
        return json_answer({"name": name, "ready": True})

    async def _index(self, request: Request) -> Response:
        only_ready = bodies.parse_index(await content.read_body(request, self._body_limit_bytes))
        return json_answer(kserve.index(self._submit.index(), only_ready=only_ready))

    async def _load(self, request: Request) -> Response:
        parameters = bodies.parse_operation(await content.read_body(request, self._body_limit_bytes))
        await self._repository.load(request.path_params["name"], parameters)
        return json_answer({})

    async def _unload(self, request: Request) -> Response:
        parameters = bodies.parse_operation(await content.read_body(request, self._body_limit_bytes))
        await self._repository.unload(request.path_params["name"], parameters)
        return json_answer({})

    async def infer(self, request: Request) -> Response:
        """Answers ``.../infer``."""
        name, version = _model(request)
        notes.asks(name)
        self._submit.describe(name, version)  # an unknown name is refused before its body is read
        body = await content.read_body(request, self._body_limit_bytes)
        lines = "application/x-ndjson" in request.headers.get("accept", "").lower()
        header_length = request.headers.get(bodies.LENGTH_HEADER)
        # Asked again: the function may have been deployed anew while the body came in.
        described = self._submit.describe(name, version)
        slo_ms = kserve.promised(request.headers)
        asked = (body, header_length, described, version)
        if len(body) < bodies.LARGE_BYTES:
            parsed = bodies.parse_infer(*asked, lines=lines, slo_ms=slo_ms)
        else:
            parsed = await result_of(bodies.parse_pieces(*asked, lines=lines, slo_ms=slo_ms))
        notes.asks(name, parsed.id)
        chunks = self._submit.infer(parsed.inference)
        if lines:
            return await _streamed(request, parsed, chunks)
        async with contextlib.aclosing(chunks):
            answer = await unless_gone(request.receive, last_of(chunks))
        notes.answered(answer)
        coding = content.chosen_coding(request.headers.get("accept-encoding", ""))
        if not bodies.is_large(parsed, answer):
            return await _packed(bodies.render_infer(parsed, answer), coding)
        await all_of(bodies.check_large(parsed, answer))
        pieces = bodies.render_pieces(parsed, answer)
        if not parsed.binary and request.scope["http_version"] != "1.0":
            return _packed_pieces(paced(pieces), coding)
        # Its length is told first: that of the JSON, or of all of it where the client knows no chunks.
        parts = await all_of(pieces)
        length = sum(map(len, parts)) if parsed.binary else None
        return await _packed(bodies.Reply((*parts, *bodies.tails(parsed, answer)), length), coding)


def _model(request: Request) -> tuple[str, str | None]:
    return request.path_params["name"], request.path_params.get("version")


async def _streamed(request: Request, parsed: bodies.InferRequest, chunks: AsyncGenerator[Chunk, None]) -> LinesAnswer:
    """The first chunk is awaited here, so that a refusal still has a status of its own."""
    lines = _lines(parsed, chunks)
    try:
        return LinesAnswer(await unless_gone(request.receive, _next(lines)), lines)
    except BaseException:
        await lines.aclose()
        raise


async def _lines(parsed: bodies.InferRequest, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            notes.answered(chunk)
            if not bodies.is_large(parsed, chunk):
                yield bodies.render_line(parsed, chunk)
                continue
            await all_of(bodies.check_large(parsed, chunk))
            async for piece in paced(bodies.render_pieces(parsed, chunk)):
                yield piece
            yield b"\n"


async def _next(lines: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(lines)


async def _packed(reply: bodies.Reply, coding: str | None) -> Response:
    # The length header counts the JSON before compression: clients read it after unpacking.
    headers = {} if reply.json_bytes is None else {bodies.LENGTH_HEADER: str(reply.json_bytes)}
    if coding is None:
        return TensorAnswer(reply.parts, reply.content_type, headers)
    headers["Content-Encoding"] = coding
    return TensorAnswer((await content.compressed(coding, reply.parts),), reply.content_type, headers)


def _packed_pieces(pieces: AsyncGenerator[bytes, None], coding: str | None) -> Response:
    if coding is None:
        return PiecesAnswer(pieces, "application/json", {})
    packed = content.compressed_pieces(coding, pieces)
    return PiecesAnswer(packed, "application/json", {"Content-Encoding": coding})
