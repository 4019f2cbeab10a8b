"""The OpenAPI document of all HTTP doors. Data only; tests hold it against the routes, and fuzz the server with it.

What it calls possible is what the doors read, which is wider than what a function takes: a request may follow it and
still be answered with 400, as the function's own signature decides.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from dormouse import __version__
from dormouse.core.types import Path
from dormouse.functions import NAME, Manifest
from dormouse.gateway.encoding import DATATYPES
from dormouse.gateway.kserve import LARGEST_PRIORITY, LONGEST_NAME, MOST_DIMENSIONS
from dormouse.gateway.openapi_dashboard import dashboard_paths, dashboard_schemas
from dormouse.gateway.openapi_parts import COUNT, FLAG, TEXT, Schema, list_of, object_of, operation, or_null, ref
from dormouse.gateway.openapi_v1 import v1_paths, v1_schemas

_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""How a key may be sent."""
_LENGTH_HEADER = {
    "Inference-Header-Content-Length": {
        "description": "How many bytes of JSON come before the raw bytes.",
        "schema": {"type": "integer", "minimum": 0},
    }
}


# ------------------------------------------------------------------ schemas


_NAME: Schema = {"type": "string", "maxLength": LONGEST_NAME}
_OBJECT: Schema = {"type": "object"}
_DATATYPE: Schema = {"enum": list(DATATYPES)}
_SHAPE: Schema = {"type": "array", "items": COUNT, "maxItems": MOST_DIMENSIONS}
_FREE_SHAPE: Schema = list_of({"type": "integer", "minimum": -1})
_DURATION: Schema = or_null({"type": "number", "minimum": 0})
_ROW: Schema = object_of({"name": TEXT, "version": TEXT, "state": TEXT, "tier": TEXT, "image_bytes": COUNT})

_BINARY_INPUT = or_null({"type": "object", "properties": {"binary_data_size": COUNT}})
_BINARY_OUTPUT = or_null({"type": "object", "properties": {"binary_data": or_null(FLAG)}})
_ASKED = {
    "type": "object",
    "properties": {
        "priority": {**COUNT, "maximum": LARGEST_PRIORITY, "description": "1 is the most urgent, 0 the default."},
        "timeout": {**_DURATION, "description": "Microseconds, after which the answer is 504."},
        "slo_ms": {**_DURATION, "description": "The deadline that the answer should make."},
        "top_k": {**or_null({**COUNT, "minimum": 1}), "description": "Labels of a classification."},
        "binary_data_output": or_null(FLAG),
    },
}
_OPERATED = {
    "type": "object",
    "properties": {"wait": {**or_null(FLAG), "description": "false: answer at once; the index says how it goes."}},
}
_TOLD = object_of(
    {
        "dormouse_path": {"enum": [str(path) for path in Path]},
        "dormouse_queued_us": COUNT,
        "dormouse_device_us": COUNT,
    },
    {"dormouse_request": {**TEXT, "description": "What the ledger calls the request."}},
)
_INPUT = object_of(
    {"name": _NAME, "datatype": _DATATYPE, "shape": _SHAPE},
    {"parameters": _BINARY_INPUT, "data": {"description": "Flat, or nested as the shape."}},
)
_OUTPUT = object_of(
    {"name": TEXT, "datatype": _DATATYPE, "shape": _SHAPE},
    {"parameters": object_of({"binary_data_size": COUNT}), "data": list_of({})},
)
_TENSOR = object_of({"name": TEXT, "datatype": _DATATYPE, "shape": _FREE_SHAPE})
_CONFIGURED = object_of({"name": TEXT, "data_type": TEXT, "dims": _FREE_SHAPE}, {"optional": FLAG})
_STATISTIC_NAMES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_STATISTICS = object_of(
    {
        "name": TEXT,
        "version": TEXT,
        "last_inference": {**COUNT, "description": "Milliseconds since 1970; 0: never."},
        "inference_count": COUNT,
        "execution_count": COUNT,
        "inference_stats": object_of(
            {name: ref("Duration") for name in (*_STATISTIC_NAMES, "cache_hit", "cache_miss")}
        ),
        "batch_stats": list_of(_OBJECT),
        "memory_usage": list_of(_OBJECT),
        "dormouse_paths": {"type": "object", "additionalProperties": ref("Duration")},
    }
)


def _schemas() -> dict[str, Schema]:
    _, manifest = msgspec.json.schema_components((Manifest,), ref_template="#/components/schemas/{name}")
    return (
        manifest
        | v1_schemas()
        | dashboard_schemas()
        | {
            "Error": object_of({"error": TEXT}),
            "Empty": {"type": "object", "maxProperties": 0},
            "Server": object_of({"name": TEXT, "version": TEXT, "extensions": list_of(TEXT)}),
            "Live": object_of({"live": FLAG}, {"error": TEXT}),
            "Ready": object_of({"ready": FLAG, "live": FLAG}, {"error": TEXT}),
            "Models": object_of({"models": list_of(TEXT)}),
            "ModelReady": object_of({"name": TEXT, "ready": FLAG}),
            "Metadata": object_of(
                {
                    "name": TEXT,
                    "versions": list_of(TEXT),
                    "platform": TEXT,
                    "inputs": list_of(_TENSOR),
                    "outputs": list_of(_TENSOR),
                }
            ),
            "Configuration": object_of(
                {
                    "name": TEXT,
                    "platform": TEXT,
                    "max_batch_size": COUNT,
                    "input": list_of(_CONFIGURED),
                    "output": list_of(_CONFIGURED),
                    "parameters": {"type": "object", "additionalProperties": object_of({"string_value": TEXT})},
                },
                {"dynamic_batching": object_of({"max_queue_delay_microseconds": COUNT})},
            ),
            "Duration": object_of({"count": COUNT, "ns": COUNT}),
            "Statistics": object_of({"model_stats": list_of(_STATISTICS)}),
            "InferRequest": object_of(
                {"inputs": list_of(_INPUT)},
                {
                    "id": or_null(TEXT),
                    "outputs": or_null(list_of(object_of({"name": _NAME}, {"parameters": _BINARY_OUTPUT}))),
                    "parameters": or_null(_ASKED),
                },
            ),
            "InferAnswer": object_of(
                {"model_name": TEXT, "model_version": TEXT, "parameters": _TOLD, "outputs": list_of(_OUTPUT)},
                {"id": TEXT},
            ),
            "IndexRequest": {"type": "object", "properties": {"ready": or_null(FLAG)}},
            "Index": list_of(
                object_of(
                    {
                        "name": TEXT,
                        "version": TEXT,
                        "state": {"enum": ["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]},
                        "reason": TEXT,
                    }
                )
            ),
            "Operation": {"type": "object", "properties": {"parameters": or_null(_OPERATED)}},
            "Functions": object_of({"functions": list_of(_ROW)}),
            "Function": _ROW,
            "Deployed": object_of({"name": TEXT, "version": TEXT}),
            "Removed": object_of({"name": TEXT}),
            "Node": _OBJECT,
            "Checked": object_of({"name": TEXT, "admitted": FLAG, "refusal": or_null(TEXT)}),
            "Metrics": TEXT,
            "OpenApi": object_of({"openapi": TEXT, "paths": _OBJECT}),
        }
    )


# ------------------------------------------------------------------ operations


def _infer() -> Schema:
    inferring = operation(
        "Outputs for inputs", "InferAnswer", 400, 404, 413, 500, 503, 504, 507, body="InferRequest", body_needed=True
    )
    raw: Schema = {"schema": {"type": "string", "format": "binary"}}
    inferring["description"] = (
        "JSON, or JSON and then raw bytes of tensors, as Inference-Header-Content-Length says. With "
        "Accept: application/x-ndjson each chunk of the answer is a line of JSON."
    )
    inferring["requestBody"]["content"]["application/octet-stream"] = raw
    inferring["responses"]["200"]["content"]["application/octet-stream"] = raw
    inferring["responses"]["200"]["content"]["application/x-ndjson"] = {"schema": TEXT}
    inferring["responses"]["200"]["headers"] = _LENGTH_HEADER
    inferring["parameters"] = [{"name": name, "in": "header", **header} for name, header in _LENGTH_HEADER.items()]
    return inferring


def _metrics() -> Schema:
    scraped = operation("What Prometheus is told", "Metrics")
    scraped["responses"]["200"]["content"] = {
        "text/plain": {"schema": ref("Metrics")},
        "application/openmetrics-text": {"schema": ref("Metrics")},
    }
    return scraped


def _of_models() -> dict[str, dict[str, Schema]]:
    """What every model has, and every version of one."""
    below = {
        "": {"get": operation("Versions, platform, inputs and outputs", "Metadata", 404)},
        "/ready": {"get": operation("Whether it can be served now", "ModelReady", 404, 503)},
        "/config": {"get": operation("Its configuration", "Configuration", 404)},
        "/stats": {"get": operation("How it has been served", "Statistics", 404)},
        "/infer": {"post": _infer()},
    }
    models = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    return {model + path: operations for model in models for path, operations in below.items()}


def _paths() -> dict[str, dict[str, Schema]]:
    server = {"get": operation("Name, version, extensions", "Server")}
    loading = (400, 404, 409, 413, 503, 507)
    return {
        "/v2": server,
        "/v2/": server,
        "/v2/health/live": {"get": operation("Whether it lives", "Live", 503, unready="Live", is_open=True)},
        "/v2/health/ready": {
            "get": operation("Whether it takes requests", "Ready", 503, unready="Ready", is_open=True)
        },
        "/v2/models": {"get": operation("Names of all functions", "Models")},
        "/v2/models/stats": {"get": operation("How all functions have been served", "Statistics")},
        **_of_models(),
        "/v2/repository/index": {
            "post": operation("Every function with its state and tier", "Index", 400, 413, body="IndexRequest")
        },
        "/v2/repository/models/{name}/load": {
            "post": operation("Admit it to host memory", "Empty", *loading, body="Operation")
        },
        "/v2/repository/models/{name}/unload": {
            "post": operation("Free its memory", "Empty", *loading, body="Operation")
        },
        **v1_paths(),
        "/dormouse/node": {"get": operation("Devices, host memory, totals", "Node")},
        "/dormouse/functions": {
            "get": operation("A row for each function", "Functions"),
            "post": operation("Deploy", "Deployed", *loading, 500, body="Manifest", body_needed=True, status=201),
        },
        "/dormouse/functions/{name}": {
            "get": operation("Its row", "Function", 404),
            "delete": operation("Remove", "Removed", 404, 409, 503, 507),
        },
        **dashboard_paths(),
        "/dormouse/check": {
            "post": operation("What a deploy would do", "Checked", *loading, 500, body="Manifest", body_needed=True)
        },
        "/metrics": {"get": _metrics()},
        "/openapi.json": {"get": operation("This document", "OpenApi", is_open=True)},
    }


def _named(path: str) -> Sequence[Schema]:
    """The parameters that are in a path."""
    schemas = {"name": {"type": "string", "pattern": f"^{NAME.pattern}$"}, "version": {**TEXT, "pattern": "^[0-9]+$"}}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in schemas.items()
        if f"{{{name}}}" in path
    ]


def document() -> dict[str, Any]:
    """The whole of it."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Dormouse",
            "version": __version__,
            "description": "KServe V2, OpenAI's embeddings, and the operators' door.",
        },
        "paths": {path: {**operations, "parameters": _named(path)} for path, operations in _paths().items()},
        "components": {"schemas": _schemas(), "securitySchemes": _KEYS},
        # The last: none, where the server does not ask for keys.
        "security": [*({name: []} for name in _KEYS), {}],
    }
