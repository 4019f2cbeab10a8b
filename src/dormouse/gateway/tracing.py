"""Spans for OpenTelemetry, if its SDK is installed and the environment says where to send them. Else nothing of it is
imported.

A request's span is made when its answer has been sent, with the times that were noted: what is not recorded costs a
request nothing while it runs.
"""

import importlib.util
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dormouse import __version__
from dormouse.core.types import Ns, Path
from dormouse.gateway.notes import Note
from dormouse.submit import Chunk

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_LOG = logging.getLogger("dormouse.gateway")
_WHERE = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTERS = "OTEL_TRACES_EXPORTER"


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for spans, in OpenTelemetry's own words."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environment.get(_EXPORTERS, "")
    return exporter == "otlp" if exporter else any(environment.get(name) for name in _WHERE)


def begin(environment: Mapping[str, str]) -> "Tracing | None":
    """What records spans from now on; None where nobody wants them, or nothing is there to make them."""
    if not wanted(environment):
        return None
    if importlib.util.find_spec("opentelemetry") is None:
        _LOG.warning("OTEL_* asks for traces, but OpenTelemetry is not installed: pip install 'dormouse-serve[otel]'")
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": "dormouse"}
    provider = TracerProvider(resource=Resource.create({**named, "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


class Tracing:
    """Makes spans of notes."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("dormouse", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._inside = set_span_in_context
        self._error = Status(StatusCode.ERROR)

    def record(self, note: Note, took_ns: Ns) -> None:
        """One span for the request, one each in it for waiting and for the device."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        began_ns = note.began_ns + offset_ns
        span = self._tracer.start_span(
            "infer" if note.function else f"{note.door} request",
            self._propagator.extract(note.parent or {}),
            self._kind,
            _attributes(note),
            start_time=began_ns,
        )
        if note.chunk is not None and span.is_recording():
            self._parts(span, note.chunk, note.answered_ns + offset_ns)
        if note.status >= 500:
            span.set_status(self._error)
        span.end(began_ns + took_ns)

    def _parts(self, span: "Span", chunk: Chunk, answered_ns: Ns) -> None:
        started_ns = answered_ns - chunk.device_ns
        inside = self._inside(span)
        if chunk.path is not Path.RESIDENT:
            span.add_event("load", {"dormouse.path": str(chunk.path)}, started_ns - chunk.queued_ns)
        parts = (("queued", started_ns - chunk.queued_ns, started_ns), ("device", started_ns, answered_ns))
        for name, began_ns, ended_ns in parts:
            self._tracer.start_span(name, inside, start_time=began_ns).end(ended_ns)

    def close(self) -> None:
        """Send what is left; may wait for the collector."""
        self._provider.shutdown()


def _attributes(note: Note) -> dict[str, str | int]:
    told: dict[str, str | int] = {
        "dormouse.door": note.door,
        "dormouse.request.id": note.id,
        "dormouse.call": note.call,
        "http.response.status_code": note.status,
    }
    if note.tenant is not None:
        told["dormouse.tenant"] = note.tenant
    if note.function:
        told["dormouse.function"] = note.function
    if note.fault:
        told["error.message"] = note.fault
    if (chunk := note.chunk) is not None:
        told["dormouse.path"] = str(chunk.path)
        told["dormouse.function.version"] = chunk.version
        told["dormouse.queued_ns"] = chunk.queued_ns
        told["dormouse.device_ns"] = chunk.device_ns
    return told
