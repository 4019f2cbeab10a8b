"""The part of the OpenAPI document that is OpenAI's door. Data only."""

from dormouse.gateway.openapi_parts import COUNT, TEXT, Schema, list_of, object_of, operation, or_null, ref
from dormouse.gateway.v1 import GENERATING
from dormouse.tasks.carriers import MOST_IMAGES, MOST_ITEMS

_ERROR = "OpenAiError"
_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_WANTED: Schema = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_SOME_TEXT: Schema = {"type": "string", "minLength": 1}
_IDS: Schema = {"type": "array", "items": _ID, "minItems": 1}


def _several(items: Schema, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


_INPUT: Schema = {
    "description": "A text, texts, token ids, or several of those.",
    "anyOf": [_SOME_TEXT, _several(_SOME_TEXT, MOST_ITEMS), _IDS, _several(_IDS, MOST_ITEMS)],
}
_IMAGE: Schema = {
    "description": "A picture's file in base64, or as a data URL; or several.",
    "anyOf": [_SOME_TEXT, _several(_SOME_TEXT, MOST_IMAGES)],
}
_USAGE = object_of({"prompt_tokens": COUNT, "total_tokens": COUNT})
_PATH_HEADER = {
    "X-Dormouse-Path": {"description": "How the model was found.", "schema": TEXT},
    "X-Dormouse-Request": {"description": "What the ledger calls the request; several by commas.", "schema": TEXT},
}


def v1_schemas() -> dict[str, Schema]:
    """By name."""
    model = object_of({"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT, "task": TEXT})
    vector: Schema = {"anyOf": [list_of({"type": "number"}), TEXT]}
    embedding = object_of({"object": {"const": "embedding"}, "index": COUNT, "embedding": vector})
    labels = list_of(object_of({"label": TEXT, "score": {"type": "number"}}))
    classified = object_of({"object": {"const": "classification"}, "index": COUNT, "labels": labels})
    a_list: Schema = {"const": "list"}
    return {
        _ERROR: object_of(
            {"error": object_of({"message": TEXT, "type": TEXT, "param": or_null(TEXT), "code": or_null(TEXT)})}
        ),
        "OpenAiModel": model,
        "OpenAiModels": object_of({"object": a_list, "data": list_of(ref("OpenAiModel"))}),
        "EmbeddingsRequest": object_of(
            {"model": TEXT, "input": _INPUT},
            {
                "encoding_format": {"enum": ["float", "base64"]},
                "dimensions": or_null(_WANTED),
                "user": or_null(TEXT),
            },
        ),
        "Embeddings": object_of({"object": a_list, "data": list_of(embedding), "model": TEXT, "usage": _USAGE}),
        "ClassifyRequest": object_of(
            {"model": TEXT},
            {"input": or_null(_INPUT), "image": or_null(_IMAGE), "top_k": or_null(_WANTED), "user": or_null(TEXT)},
        ),
        "Classified": object_of({"object": a_list, "data": list_of(classified), "model": TEXT}, {"usage": _USAGE}),
        "Generating": {"type": "object"},
    }


def v1_paths() -> dict[str, dict[str, Schema]]:
    """By path and method."""
    asking = (400, 404, 413, 500, 503, 504, 507)
    answers = {
        "/v1/embeddings": _posted("Embeddings of texts", "Embeddings", "EmbeddingsRequest", asking),
        "/v1/classify": _posted("Labels of texts or pictures", "Classified", "ClassifyRequest", asking),
    }
    for described in answers.values():
        described["responses"]["200"]["headers"] = _PATH_HEADER
    return {
        "/v1/models": {"get": operation("Every function", "OpenAiModels", error=_ERROR)},
        "/v1/models/{name}": {"get": operation("One function", "OpenAiModel", 404, error=_ERROR)},
        **{path: {"post": described} for path, described in answers.items()},
        **{path: {"post": _generating()} for path in GENERATING},
    }


def _posted(summary: str, answer: str, body: str, errors: tuple[int, ...]) -> Schema:
    return operation(summary, answer, *errors, body=body, body_needed=True, error=_ERROR)


def _generating() -> Schema:
    described = operation("Generation: not yet", _ERROR, 501, body="Generating", error=_ERROR)
    del described["responses"]["200"]
    return described
