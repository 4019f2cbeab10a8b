"""Spans: one a request with what was noted, over both doors, under the caller's own trace."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dormouse.gateway.grpc_messages import message
from dormouse.gateway.observing import Observer
from dormouse.gateway.tracing import Tracing, begin, wanted
from tests.shell.in_memory import DEVICE_NS, QUEUED_NS
from tests.shell.running import RunningServer, running

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}


@pytest.fixture
def kept() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@contextmanager
def traced(kept: InMemorySpanExporter) -> Iterator[RunningServer]:
    """A server whose spans have all been kept when it has ended."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    with running(observer=Observer(record=Tracing(provider).record)) as started:
        yield started


def named(kept: InMemorySpanExporter, name: str) -> ReadableSpan:
    (found,) = [span for span in kept.get_finished_spans() if span.name == name]
    return found


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_a_request_is_a_span_in_its_caller_s_trace_and_has_its_parts(kept: InMemorySpanExporter) -> None:
    with traced(kept) as server:
        httpx.post(f"{server.url}/v2/models/affine/infer", json={**BODY, "id": "t1"}, headers=PARENT)
    span = named(kept, "infer")
    assert span.context is not None and span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    told = attributes(span)
    assert (told["dormouse.function"], told["dormouse.tenant"], told["dormouse.request.id"]) == ("affine", "", "t1")
    assert (told["http.response.status_code"], told["dormouse.queued_ns"]) == (200, QUEUED_NS)
    queued, device = named(kept, "queued"), named(kept, "device")
    for part, took_ns in ((queued, QUEUED_NS), (device, DEVICE_NS)):
        assert part.parent is not None and part.parent.span_id == span.context.span_id
        assert part.start_time is not None and part.end_time is not None
        assert part.end_time - part.start_time == took_ns
    assert queued.end_time == device.start_time


def test_over_grpc_the_trace_is_in_the_metadata(kept: InMemorySpanExporter) -> None:
    asked = message("ModelInferRequest")(model_name="nobody")
    with traced(kept) as server, grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError):
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        call(asked.SerializeToString(), metadata=tuple(PARENT.items()))
    span = named(kept, "infer")
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert attributes(span)["http.response.status_code"] == 404


def test_a_damaged_parent_begins_a_trace_of_its_own(kept: InMemorySpanExporter) -> None:
    with traced(kept) as server:
        httpx.get(f"{server.url}/v2", headers={"traceparent": "00-nonsense"})
    assert named(kept, "v2 request").parent is None


@pytest.mark.parametrize(
    ("environment", "asks"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, False),
    ],
)
def test_the_environment_says_whether_there_are_traces(environment: dict[str, str], asks: bool) -> None:
    assert wanted(environment) == asks
    tracing = begin(environment)
    assert (tracing is not None) == asks
    if tracing is not None:
        tracing.close()
