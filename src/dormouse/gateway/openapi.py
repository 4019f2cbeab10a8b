"""The OpenAPI document of both HTTP doors. Data only; tests hold it against the routes, and fuzz the server with it.

What it calls possible is what the doors read, which is wider than what a function takes: a request may follow it and
still be answered with 400, as the function's own signature decides.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dormouse import __version__
from dormouse.core.types import Path
from dormouse.functions import NAME, Manifest
from dormouse.gateway.encoding import DATATYPES
from dormouse.gateway.kserve import LARGEST_PRIORITY, LONGEST_NAME, MOST_DIMENSIONS
from dormouse.watch.picture import Picture

Schema = dict[str, Any]

_STATUSES = {
    "400": "Malformed; the line names the field.",
    "401": "No key, or none of this server's.",
    "403": "An operator's call with a tenant's key, or asked by a web page of another site.",
    "404": "No such path, function or version; or none that the key's tenant may see.",
    "408": "The request took too long to arrive.",
    "409": "The state forbids it.",
    "413": "Over the body limit, packed or unpacked.",
    "429": "The tenant asks more than it may; see Retry-After.",
    "500": "The model raised, or a bug.",
    "503": "Not now; see Retry-After.",
    "504": "The timeout passed.",
    "507": "No host memory, or no disk for it.",
}
_RETRY_AFTER = {"Retry-After": {"required": True, "schema": {"type": "integer"}}}
_SAID_BESIDE = {
    "401": {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}},
    "429": _RETRY_AFTER,
    "503": _RETRY_AFTER,
}
"""Headers of refusals, by status."""
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


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "maxLength": LONGEST_NAME}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_DATATYPE: Schema = {"enum": list(DATATYPES)}
_SHAPE: Schema = {"type": "array", "items": _COUNT, "maxItems": MOST_DIMENSIONS}
_FREE_SHAPE: Schema = _list({"type": "integer", "minimum": -1})
_DURATION: Schema = _or_null({"type": "number", "minimum": 0})
_ROW: Schema = _object({"name": _TEXT, "version": _TEXT, "state": _TEXT, "tier": _TEXT, "image_bytes": _COUNT})

_BINARY_INPUT = _or_null({"type": "object", "properties": {"binary_data_size": _COUNT}})
_BINARY_OUTPUT = _or_null({"type": "object", "properties": {"binary_data": _or_null(_FLAG)}})
_ASKED = {
    "type": "object",
    "properties": {
        "priority": {**_COUNT, "maximum": LARGEST_PRIORITY, "description": "1 is the most urgent, 0 the default."},
        "timeout": {**_DURATION, "description": "Microseconds, after which the answer is 504."},
        "slo_ms": {**_DURATION, "description": "The deadline that the answer should make."},
        "binary_data_output": _or_null(_FLAG),
    },
}
_OPERATED = {
    "type": "object",
    "properties": {"wait": {**_or_null(_FLAG), "description": "false: answer at once; the index says how it goes."}},
}
_TOLD = _object(
    {
        "dormouse_path": {"enum": [str(path) for path in Path]},
        "dormouse_queued_us": _COUNT,
        "dormouse_device_us": _COUNT,
    }
)
_INPUT = _object(
    {"name": _NAME, "datatype": _DATATYPE, "shape": _SHAPE},
    {"parameters": _BINARY_INPUT, "data": {"description": "Flat, or nested as the shape."}},
)
_OUTPUT = _object(
    {"name": _TEXT, "datatype": _DATATYPE, "shape": _SHAPE},
    {"parameters": _object({"binary_data_size": _COUNT}), "data": _list({})},
)
_TENSOR = _object({"name": _TEXT, "datatype": _DATATYPE, "shape": _FREE_SHAPE})
_CONFIGURED = _object({"name": _TEXT, "data_type": _TEXT, "dims": _FREE_SHAPE}, {"optional": _FLAG})
_STATISTIC_NAMES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_STATISTICS = _object(
    {
        "name": _TEXT,
        "version": _TEXT,
        "last_inference": {**_COUNT, "description": "Milliseconds since 1970; 0: never."},
        "inference_count": _COUNT,
        "execution_count": _COUNT,
        "inference_stats": _object({name: _ref("Duration") for name in (*_STATISTIC_NAMES, "cache_hit", "cache_miss")}),
        "batch_stats": _list(_OBJECT),
        "memory_usage": _list(_OBJECT),
        "dormouse_paths": {"type": "object", "additionalProperties": _ref("Duration")},
    }
)


def _schemas() -> dict[str, Schema]:
    _, structs = msgspec.json.schema_components((Manifest, Picture), ref_template="#/components/schemas/{name}")
    return structs | {
        "Error": _object({"error": _TEXT}),
        "Empty": {"type": "object", "maxProperties": 0},
        "Server": _object({"name": _TEXT, "version": _TEXT, "extensions": _list(_TEXT)}),
        "Live": _object({"live": _FLAG}, {"error": _TEXT}),
        "Ready": _object({"ready": _FLAG, "live": _FLAG}, {"error": _TEXT}),
        "Models": _object({"models": _list(_TEXT)}),
        "ModelReady": _object({"name": _TEXT, "ready": _FLAG}),
        "Metadata": _object(
            {
                "name": _TEXT,
                "versions": _list(_TEXT),
                "platform": _TEXT,
                "inputs": _list(_TENSOR),
                "outputs": _list(_TENSOR),
            }
        ),
        "Configuration": _object(
            {
                "name": _TEXT,
                "platform": _TEXT,
                "max_batch_size": _COUNT,
                "input": _list(_CONFIGURED),
                "output": _list(_CONFIGURED),
                "parameters": {"type": "object", "additionalProperties": _object({"string_value": _TEXT})},
            },
            {"dynamic_batching": _object({"max_queue_delay_microseconds": _COUNT})},
        ),
        "Duration": _object({"count": _COUNT, "ns": _COUNT}),
        "Statistics": _object({"model_stats": _list(_STATISTICS)}),
        "InferRequest": _object(
            {"inputs": _list(_INPUT)},
            {
                "id": _or_null(_TEXT),
                "outputs": _or_null(_list(_object({"name": _NAME}, {"parameters": _BINARY_OUTPUT}))),
                "parameters": _or_null(_ASKED),
            },
        ),
        "InferAnswer": _object(
            {"model_name": _TEXT, "model_version": _TEXT, "parameters": _TOLD, "outputs": _list(_OUTPUT)},
            {"id": _TEXT},
        ),
        "IndexRequest": {"type": "object", "properties": {"ready": _or_null(_FLAG)}},
        "Index": _list(
            _object(
                {
                    "name": _TEXT,
                    "version": _TEXT,
                    "state": {"enum": ["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]},
                    "reason": _TEXT,
                }
            )
        ),
        "Operation": {"type": "object", "properties": {"parameters": _or_null(_OPERATED)}},
        "Functions": _object({"functions": _list(_ROW)}),
        "Function": _ROW,
        "Deployed": _object({"name": _TEXT, "version": _TEXT}),
        "Removed": _object({"name": _TEXT}),
        "Node": _OBJECT,
        "Checked": _object({"name": _TEXT, "admitted": _FLAG, "refusal": _or_null(_TEXT)}),
        "OpenApi": _object({"openapi": _TEXT, "paths": _OBJECT}),
    }


# ------------------------------------------------------------------ operations


def _json(schema: str) -> Schema:
    return {"application/json": {"schema": _ref(schema)}}


def _operation(
    summary: str,
    answer: str,
    *errors: int,
    body: str | None = None,
    body_needed: bool = False,
    status: int = 200,
    unready: str | None = None,
    is_open: bool = False,
) -> Schema:
    """``errors``: which it has besides those of all; ``unready``: what 503 says beside an error's one line;
    ``is_open``: without a key, too."""
    responses = {str(status): {"description": "Done.", "content": _json(answer)}}
    of_all = {403, 408} if is_open else {401, 403, 408, 429}
    for code in map(str, sorted({*of_all, *errors})):
        responses[code] = {"description": _STATUSES[code], "content": _json("Error")}
        if code in _SAID_BESIDE:
            responses[code]["headers"] = _SAID_BESIDE[code]
    if unready is not None:
        responses["503"]["content"] = _json(unready)
    operation: Schema = {"summary": summary, "responses": responses}
    if is_open:
        operation["security"] = []
    if body is not None:
        operation["requestBody"] = {"required": body_needed, "content": _json(body)}
    return operation


def _infer() -> Schema:
    operation = _operation(
        "Outputs for inputs", "InferAnswer", 400, 404, 413, 500, 503, 504, body="InferRequest", body_needed=True
    )
    raw: Schema = {"schema": {"type": "string", "format": "binary"}}
    operation["description"] = (
        "JSON, or JSON and then raw bytes of tensors, as Inference-Header-Content-Length says. With "
        "Accept: application/x-ndjson each chunk of the answer is a line of JSON."
    )
    operation["requestBody"]["content"]["application/octet-stream"] = raw
    operation["responses"]["200"]["content"]["application/octet-stream"] = raw
    operation["responses"]["200"]["content"]["application/x-ndjson"] = {"schema": _TEXT}
    operation["responses"]["200"]["headers"] = _LENGTH_HEADER
    operation["parameters"] = [{"name": name, "in": "header", **header} for name, header in _LENGTH_HEADER.items()]
    return operation


def _events() -> Schema:
    operation = _operation("The picture, and then its changes, without an end", "Picture")
    operation["description"] = (
        "Server-sent events: `picture`, then `changes` with what differs, at most four a second; a comment "
        "now and then where nothing does; `goodbye` when the server stops. Who reads too slowly gets another `picture`."
    )
    operation["responses"]["200"]["content"] = {"text/event-stream": {"schema": _TEXT}}
    return operation


def _of_models() -> dict[str, dict[str, Schema]]:
    """What every model has, and every version of one."""
    below = {
        "": {"get": _operation("Versions, platform, inputs and outputs", "Metadata", 404)},
        "/ready": {"get": _operation("Whether it can be served now", "ModelReady", 404, 503)},
        "/config": {"get": _operation("Its configuration", "Configuration", 404)},
        "/stats": {"get": _operation("How it has been served", "Statistics", 404)},
        "/infer": {"post": _infer()},
    }
    models = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    return {model + path: operations for model in models for path, operations in below.items()}


def _paths() -> dict[str, dict[str, Schema]]:
    server = {"get": _operation("Name, version, extensions", "Server")}
    loading = (400, 404, 409, 413, 503, 507)
    return {
        "/v2": server,
        "/v2/": server,
        "/v2/health/live": {"get": _operation("Whether it lives", "Live", 503, unready="Live", is_open=True)},
        "/v2/health/ready": {
            "get": _operation("Whether it takes requests", "Ready", 503, unready="Ready", is_open=True)
        },
        "/v2/models": {"get": _operation("Names of all functions", "Models")},
        "/v2/models/stats": {"get": _operation("How all functions have been served", "Statistics")},
        **_of_models(),
        "/v2/repository/index": {
            "post": _operation("Every function with its state and tier", "Index", 400, 413, body="IndexRequest")
        },
        "/v2/repository/models/{name}/load": {
            "post": _operation("Admit it to host memory", "Empty", *loading, body="Operation")
        },
        "/v2/repository/models/{name}/unload": {
            "post": _operation("Free its memory", "Empty", *loading, body="Operation")
        },
        "/dormouse/node": {"get": _operation("Devices, host memory, totals", "Node")},
        "/dormouse/functions": {
            "get": _operation("A row for each function", "Functions"),
            "post": _operation("Deploy", "Deployed", *loading, 500, body="Manifest", body_needed=True, status=201),
        },
        "/dormouse/functions/{name}": {
            "get": _operation("Its row", "Function", 404),
            "delete": _operation("Remove", "Removed", 404, 409, 503, 507),
        },
        "/dormouse/picture": {"get": _operation("All that the dashboard shows, once", "Picture")},
        "/dormouse/events": {"get": _events()},
        "/dormouse/check": {
            "post": _operation("What a deploy would do", "Checked", *loading, 500, body="Manifest", body_needed=True)
        },
        "/openapi.json": {"get": _operation("This document", "OpenApi", is_open=True)},
    }


def _named(path: str) -> Sequence[Schema]:
    """The parameters that are in a path."""
    schemas = {"name": {"type": "string", "pattern": f"^{NAME.pattern}$"}, "version": {**_TEXT, "pattern": "^[0-9]+$"}}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in schemas.items()
        if f"{{{name}}}" in path
    ]


def document() -> dict[str, Any]:
    """The whole of it."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Dormouse", "version": __version__, "description": "KServe V2, and the operators' door."},
        "paths": {path: {**operations, "parameters": _named(path)} for path, operations in _paths().items()},
        "components": {"schemas": _schemas(), "securitySchemes": _KEYS},
        # The last: none, where the server does not ask for keys.
        "security": [*({name: []} for name in _KEYS), {}],
    }
