"""What an OpenAPI document is made of: schemas, and operations with their statuses. Knows no door."""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

STATUSES = {
    "400": "Malformed; the line names the field.",
    "403": "Asked by a web page of another site.",
    "404": "No such path, function or version.",
    "409": "The state forbids it.",
    "413": "Over the body limit, packed or unpacked.",
    "501": "Not yet.",
    "500": "The model raised, or a bug.",
    "503": "Not now; see Retry-After.",
    "504": "The timeout passed.",
    "507": "No host memory, or no disk for it.",
}


def object_of(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these properties."""
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def list_of(items: Schema) -> Schema:
    """A list of such."""
    return {"type": "array", "items": items}


def ref(name: str) -> Schema:
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def or_null(schema: Schema) -> Schema:
    """Such, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}


def _json(schema: str) -> Schema:
    return {"application/json": {"schema": ref(schema)}}


def operation(
    summary: str,
    answer: str,
    *errors: int,
    body: str | None = None,
    body_needed: bool = False,
    status: int = 200,
    unready: str | None = None,
    error: str = "Error",
) -> Schema:
    """``errors``: which it has besides 403; ``unready``: what 503 says beside an error's one line; ``error``: the form
    of errors."""
    responses = {str(status): {"description": "Done.", "content": _json(answer)}}
    for code in map(str, sorted({403, *errors})):
        responses[code] = {"description": STATUSES[code], "content": _json(error)}
        if code == "503":
            responses[code]["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer"}}}
            responses[code]["content"] = _json(unready or error)
    described: Schema = {"summary": summary, "responses": responses}
    if body is not None:
        described["requestBody"] = {"required": body_needed, "content": _json(body)}
    return described
