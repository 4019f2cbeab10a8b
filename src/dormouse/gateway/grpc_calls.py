"""The gRPC door: each call of KServe V2 and its extensions, from message to message, and failures as status codes.

Decides nothing: grpc_form.py reads and writes messages, reports.py says what is known of functions, Submit does the
work.
"""

import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import grpc

from dormouse import __version__
from dormouse.core.types import Ns
from dormouse.errors import DormouseError, InvalidRequest, OverLimit, Unauthenticated
from dormouse.gateway import grpc_form, kserve, notes, reports
from dormouse.gateway.answers import unexpected
from dormouse.gateway.chunks import last_of
from dormouse.gateway.grpc_messages import HEALTH, INFERENCE, Message, Method, decoded, message, methods
from dormouse.gateway.grpc_stream import Stream
from dormouse.gateway.grpc_waiting import Waiting
from dormouse.gateway.notes import ID_HEADER, TRACE_HEADERS, Note
from dormouse.gateway.observing import Observer
from dormouse.gateway.repository import Repository
from dormouse.submit import Submit
from dormouse.tenants.callers import STRANGER, Caller
from dormouse.tenants.gate import KEY_HEADERS, NEEDED, Gate

Context: TypeAlias = Any
"""grpc.aio's ServicerContext; grpc has no types."""
Work = Callable[[Message, Context], Awaitable[Message]]

LONGEST_DETAILS = 2_000
"""In characters. It travels as metadata, of which clients take a few kilobytes."""
SECOND_NS: Ns = 1_000_000_000
SERVING, NOT_SERVING = 1, 2
METHODS = {f"/{service}/{method.name}": method for service in (INFERENCE, HEALTH) for method in methods(service)}
"""Every call of this server, by its path."""
OPEN_CALLS = frozenset(("ServerLive", "ServerReady", "Check"))
"""Those that need no key and count against no limit."""
PUSHBACK = "grpc-retry-pushback-ms"

STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""What HTTP's statuses are called here."""


def handlers(calls: "Calls", waiting: Waiting) -> dict[str, Any]:
    """Every call by its path, as grpc.aio wants it."""
    return {path: _handler(method, calls, waiting) for path, method in METHODS.items()}


def _handler(method: Method, calls: "Calls", waiting: Waiting) -> Any:
    # Messages are decoded inside, so that what is no message gets an answer in our words.
    if method.streams:
        return grpc.stream_stream_rpc_method_handler(calls.stream)
    answer = _guarded(method, calls.entered(method), calls)
    if method.name not in OPEN_CALLS:
        return grpc.unary_unary_rpc_method_handler(answer)

    async def patient(wires: AsyncIterator[bytes], context: Context) -> bytes:
        # grpc itself would wait for the message for ever, and so for everybody.
        try:
            wire = await waiting.first_of(wires)
        except DormouseError as fault:
            with calls.observer.observed(note_of(method.name, context.invocation_metadata(), calls.tenant)):
                await refuse(context, fault)
        return await answer(wire, context)

    return grpc.stream_unary_rpc_method_handler(patient)


def _guarded(method: Method, work: Work, calls: "Calls") -> Callable[[bytes, Context], Awaitable[bytes]]:
    """The call, with every failure turned into a status and one line."""

    async def answer(wire: bytes, context: Context) -> bytes:
        note = note_of(method.name, context.invocation_metadata(), calls.tenant)
        with calls.observer.observed(note):
            try:
                answered: bytes = (await work(decoded(method.request, wire), context)).SerializeToString()
            except DormouseError as fault:
                await refuse(context, fault)
            except Exception as fault:
                await refuse(context, unexpected(method.name, fault))
            context.set_trailing_metadata(((ID_HEADER, note.id),))
        return answered

    return answer


def key_headers(metadata: Any) -> dict[str, str]:
    """The metadata in which there may be a key; of several, the first."""
    found: dict[str, str] = {}
    for name, value in metadata or ():
        if name in KEY_HEADERS:
            found.setdefault(name, value)
    return found


def note_of(call: str, metadata: Any, tenant: str | None) -> Note:
    """The note of a call, or of one request of a stream."""
    found = {name: value for name, value in metadata or () if name == ID_HEADER or name in TRACE_HEADERS}
    note = Note("grpc", call, found.pop(ID_HEADER, None), found or None)
    note.tenant = tenant
    return note


async def refuse(context: Context, fault: DormouseError) -> None:
    """Ends the call; does not return."""
    notes.failed(fault)
    note = notes.current()
    said: tuple[tuple[str, str], ...] = () if note is None else ((ID_HEADER, note.id),)
    if fault.retry_after_s is not None or fault.status == 503:
        said = (*said, *_when(fault.retry_after_s or 1, pushes_back=fault.status == 429))
    context.set_trailing_metadata(said)
    await context.abort(STATUS[fault.status], fault.message[:LONGEST_DETAILS])


def _when(retry_after_s: float, *, pushes_back: bool) -> tuple[tuple[str, str], ...]:
    """When to come again, in HTTP's words, and in those that gRPC's own retries obey."""
    said = (("retry-after", str(max(1, math.ceil(retry_after_s)))),)
    return (*said, (PUSHBACK, str(math.ceil(1_000 * retry_after_s)))) if pushes_back else said


class Calls:
    """What each call of one caller does."""

    def __init__(self, submit: Submit, gate: Gate, caller: Caller, observer: Observer) -> None:
        self.observer = observer
        self.tenant = caller.tenant
        self._submit = submit
        self._gate = gate
        self._caller = caller
        self._repository = Repository(submit)

    def entered(self, method: Method) -> Work:
        """How a call of one message is answered, if it may enter; it leaves however it ends."""
        work = self._work(method)
        if method.name in OPEN_CALLS:
            return work

        async def enter(asked: Message, context: Context) -> Message:
            with self._gate.inside(self._caller):
                return await work(asked, context)

        return enter

    def _work(self, method: Method) -> Work:
        return {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._server,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._metadata,
            "ModelInfer": self._infer,
            "ModelConfig": self._configuration,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "Check": self._check,
        }[method.name]

    async def _live(self, _: Message, __: Context) -> Message:
        return message("ServerLiveResponse")(live=self._submit.live())

    async def _ready(self, _: Message, __: Context) -> Message:
        return message("ServerReadyResponse")(ready=self._submit.ready())

    async def _server(self, _: Message, __: Context) -> Message:
        return message("ServerMetadataResponse")(name="dormouse", version=__version__, extensions=kserve.EXTENSIONS)

    async def _model_ready(self, asked: Message, _: Context) -> Message:
        ready = self._submit.function_ready(asked.name, asked.version or None)
        return message("ModelReadyResponse")(ready=ready)

    async def _metadata(self, asked: Message, _: Context) -> Message:
        described = self._submit.describe(asked.name, asked.version or None)
        return grpc_form.filled(message("ModelMetadataResponse"), reports.metadata(described))

    async def _configuration(self, asked: Message, _: Context) -> Message:
        report = reports.configuration(self._submit.describe(asked.name, asked.version or None))
        return grpc_form.filled(message("ModelConfigResponse"), {"config": report})

    async def _statistics(self, asked: Message, _: Context) -> Message:
        if asked.version and not asked.name:
            raise InvalidRequest(f"version is {kserve.shown(asked.version)}, of no model; name the model, too")
        found = self._submit.statistics(asked.name or None, asked.version or None)
        return grpc_form.filled(message("ModelStatisticsResponse"), reports.statistics(found))

    async def _index(self, asked: Message, _: Context) -> Message:
        entries = kserve.index(self._submit.index(), only_ready=asked.ready)
        return grpc_form.render_index(message("RepositoryIndexResponse"), entries)

    async def _load(self, asked: Message, _: Context) -> Message:
        name, parameters = grpc_form.parse_operation(asked)
        await self._repository.load(name, parameters)
        return message("RepositoryModelLoadResponse")(model_name=name, isLoaded=self._submit.function_ready(name))

    async def _unload(self, asked: Message, _: Context) -> Message:
        name, parameters = grpc_form.parse_operation(asked)
        await self._repository.unload(name, parameters)
        return message("RepositoryModelUnloadResponse")(
            model_name=name, isUnloaded=not self._submit.function_ready(name)
        )

    async def _check(self, asked: Message, _: Context) -> Message:
        server = asked.service in ("", INFERENCE)
        if not server and self._caller == STRANGER:
            raise Unauthenticated(NEEDED)
        ready = self._submit.ready() if server else self._submit.function_ready(asked.service)
        return message("HealthCheckResponse", HEALTH)(status=SERVING if ready else NOT_SERVING)

    async def _infer(self, wire: Message, context: Context) -> Message:
        version = wire.model_version or None
        notes.asks(wire.model_name, wire.id)
        described = self._submit.describe(wire.model_name, version)
        parsed = grpc_form.parse_infer(wire, described, version, terms_of(context))
        chunks = self._submit.infer(parsed.inference)
        async with contextlib.aclosing(chunks):  # a client that goes away cancels this task, and so its request
            answer = await last_of(chunks)
        notes.answered(answer)
        return grpc_form.render_infer(parsed, answer)

    async def stream(self, wires: Any, context: Context) -> None:
        """Answers ModelStreamInfer."""
        headers = key_headers(context.invocation_metadata())

        def enter() -> AbstractContextManager[None]:
            # Asked again for each request: streams live long, and keys are revoked.
            return self._gate.inside(self._gate.caller_of(headers))

        def observed() -> AbstractContextManager[None]:
            note = note_of("ModelStreamInfer", context.invocation_metadata(), self.tenant)
            return self.observer.observed(note)

        try:
            with self._gate.streaming(self._caller):
                stream = Stream(self._submit, lambda: terms_of(context), enter, context.write, observed)
                await stream.answer(wires)
        except OverLimit as fault:
            await refuse(context, fault)


def terms_of(context: Context) -> grpc_form.Terms:
    """What a call says beside its message, now. Raises InvalidRequest."""
    left_s = context.time_remaining()
    # At least a nanosecond, as the client waits still.
    left_ns = None if left_s is None else max(1, round(left_s * SECOND_NS))
    return grpc_form.Terms(left_ns, kserve.promised(dict(context.invocation_metadata() or ())))
