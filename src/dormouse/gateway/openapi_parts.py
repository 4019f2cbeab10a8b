"""What an OpenAPI document is made of: schemas, and operations with their statuses. Knows no door."""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

STATUSES = {
    "400": "Malformed; the line names the field.",
    "401": "No key, or none of this server's.",
    "403": "An operator's call with a tenant's key, or asked by a web page of another site.",
    "404": "No such path, function or version; or none that the key's tenant may see.",
    "408": "The request took too long to arrive.",
    "409": "The state forbids it.",
    "413": "Over the body limit, packed or unpacked.",
    "429": "The tenant asks more than it may; see Retry-After.",
    "501": "Not yet.",
    "500": "The model raised, or a bug.",
    "503": "Not now; see Retry-After.",
    "504": "The timeout passed.",
    "507": "No host memory, or no disk for it.",
}
RETRY_AFTER = {"Retry-After": {"required": True, "schema": {"type": "integer"}}}
SAID_BESIDE = {
    "401": {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}},
    "429": RETRY_AFTER,
    "503": RETRY_AFTER,
}
"""Headers of refusals, by status."""


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
    is_open: bool = False,
) -> Schema:
    """``errors``: which it has besides those of all; ``unready``: what 503 says beside an error's one line; ``error``:
    the form of errors; ``is_open``: without a key, too."""
    responses = {str(status): {"description": "Done.", "content": _json(answer)}}
    of_all = {403, 408} if is_open else {401, 403, 408, 429}
    for code in map(str, sorted({*of_all, *errors})):
        form = unready if code == "503" and unready else error
        responses[code] = {"description": STATUSES[code], "content": _json(form)}
        if code in SAID_BESIDE:
            responses[code]["headers"] = SAID_BESIDE[code]
    described: Schema = {"summary": summary, "responses": responses}
    if is_open:
        described["security"] = []
    if body is not None:
        described["requestBody"] = {"required": body_needed, "content": _json(body)}
    return described
