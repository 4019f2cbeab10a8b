"""OpenAI's bodies, and ours beside them (``/v1/classify``): to what is asked, and from what is answered. Pure.

An input is texts or token ids, one or several. Fields that are not known are ignored, as OpenAI's clients send more
with every version.
"""

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from dormouse.errors import DormouseError, InvalidRequest, UnknownFunction
from dormouse.functions import NAME
from dormouse.gateway import encoding
from dormouse.gateway.kserve import shown
from dormouse.submit import Chunk, Description
from dormouse.tasks.carriers import IMAGE, LABEL, MOST_IMAGES, MOST_ITEMS, SCORE, TEXT, TOKENS, tokens_element
from dormouse.tasks.text import TooLong
from dormouse.tensors import Tensor

Vectors = npt.NDArray[np.float32]
Answer = dict[str, object]

_Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Wanted = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Texts = str | list[str | _Id | list[_Id]]
_Images = str | list[str]


class EmbeddingsRequest(Struct):
    """``POST /v1/embeddings``."""

    model: str
    input: _Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: _Wanted | None = None
    user: str | None = None


class ClassifyRequest(Struct):
    """``POST /v1/classify``: ``input`` or ``image``, one or several."""

    model: str
    input: _Texts | None = None
    image: _Images | None = None
    top_k: _Wanted | None = None
    user: str | None = None


class WrongField(InvalidRequest):
    """A request is wrong in one field, ``param`` in OpenAI's words."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


_WHITESPACE = b" \t\r\n"

Wire = TypeVar("Wire")
embeddings_decoder = msgspec.json.Decoder(EmbeddingsRequest)
classify_decoder = msgspec.json.Decoder(ClassifyRequest)


def decoded(decoder: "msgspec.json.Decoder[Wire]", body: bytes | bytearray) -> Wire:
    """Raises InvalidRequest."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as fault:
        place = str(fault).partition(" - at `$.")[2].partition("`")[0]
        message = f"the request cannot be used: {fault}"
        raise WrongField(place.partition("[")[0], message) if place else InvalidRequest(message) from None
    except msgspec.DecodeError as fault:
        raise InvalidRequest(f"the request is no valid JSON: {fault}") from None
    except RecursionError:
        raise InvalidRequest("the request is nested too deeply") from None


def check_name(name: str) -> None:
    """What cannot be a function's name is no function. Raises UnknownFunction."""
    if NAME.fullmatch(name) is None:
        raise UnknownFunction(f"the model {shown(name)} does not exist")


# ------------------------------------------------------------------ what is asked


def texts_of(given: _Texts) -> Tensor:
    """Texts or token ids as a tensor of bytes. Raises WrongField."""
    if isinstance(given, str):
        return _texts([given])
    if not len(given) > 0:
        raise WrongField("input", "input is empty; send at least one text")
    if all(isinstance(each, int) for each in given):
        return _of_bytes(TOKENS, [tokens_element([each for each in given if isinstance(each, int)])])
    if len(given) > MOST_ITEMS:
        raise WrongField("input", f"input has {len(given)} texts, {MOST_ITEMS} are the most of one request")
    if all(isinstance(each, str) for each in given):
        return _texts([each for each in given if isinstance(each, str)])
    if all(isinstance(each, list) for each in given):
        return _of_bytes(TOKENS, [tokens_element(each) for each in given if isinstance(each, list)])
    raise WrongField("input", "input mixes texts and token ids; send one or the other")


def _texts(texts: Sequence[str]) -> Tensor:
    for number, text in enumerate(texts):
        if not text:
            raise WrongField("input", f"input has an empty text, number {number}; an embedding of nothing is nothing")
    return _of_bytes(TEXT, [_utf8(text) for text in texts])


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # JSON can write half of a pair
        raise WrongField("input", "input has a text with a lone surrogate, which is no character") from None


def images_of(given: _Images) -> Tensor:
    """Pictures in base64, or as data URLs, as a tensor of bytes. Raises WrongField."""
    images = [given] if isinstance(given, str) else given
    if not 0 < len(images) <= MOST_IMAGES:
        raise WrongField("image", f"image has {len(images)} pictures, expected 1 to {MOST_IMAGES}")
    return _of_bytes(IMAGE, [_file(image) for image in images])


def _file(image: str) -> bytes:
    body = image.partition(",")[2] if image.startswith("data:") else image
    try:
        # Line breaks are what programs write that make base64 for letters.
        return base64.b64decode(body.encode().translate(None, _WHITESPACE), validate=True)
    except (binascii.Error, ValueError) as fault:
        raise WrongField("image", f"image is no base64 and no data URL in base64: {fault}") from None


def _of_bytes(name: str, items: Sequence[bytes]) -> Tensor:
    return Tensor(name, "BYTES", (len(items),), encoding.prefixed(items))


# ------------------------------------------------------------------ what is answered


def model_answer(described: Description) -> Answer:
    """A model as OpenAI lists it, and what it is for."""
    task = "" if described.task is None else described.task.kind
    return {
        "id": described.name,
        "object": "model",
        "created": described.deployed_s,
        "owned_by": "dormouse",
        "task": task,
    }


def embeddings_answer(model: str, vectors: Vectors, tokens: int, encoding_format: str) -> Answer:
    """Vectors in the order of what was asked."""
    written: Iterable[object] = (
        [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
        if encoding_format == "base64"
        else vectors.tolist()
    )
    data = [{"object": "embedding", "index": number, "embedding": row} for number, row in enumerate(written)]
    return {"object": "list", "data": data, "model": model, "usage": _usage(tokens)}


def classify_answer(model: str, chunk: Chunk, tokens: int | None) -> Answer:
    """Labels with their scores, the likeliest first."""
    tensors = {tensor.name: tensor for tensor in chunk.outputs}
    scores = np.frombuffer(tensors[SCORE].data, "<f4").reshape(tensors[SCORE].shape).tolist()
    names = iter(encoding.elements(LABEL, tensors[LABEL].data))
    data = [
        {
            "object": "classification",
            "index": number,
            "labels": [{"label": str(next(names), "utf-8"), "score": score} for score in row],
        }
        for number, row in enumerate(scores)
    ]
    answer: Answer = {"object": "list", "data": data, "model": model}
    return answer if tokens is None else answer | {"usage": _usage(tokens)}


def _usage(tokens: int) -> Answer:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}
_CODES = {401: "invalid_api_key", 413: "request_too_large", 429: "rate_limit_exceeded"}
"""What OpenAI's clients know of a status beside its number."""


def error_body(fault: DormouseError) -> Answer:
    """A failure as OpenAI's clients read it."""
    kind = _TYPES.get(fault.status, "invalid_request_error" if fault.status < 500 else "server_error")
    param, code = getattr(fault, "param", None), _CODES.get(fault.status)
    if isinstance(fault, UnknownFunction):
        param, code = "model", "model_not_found"
    if isinstance(fault, TooLong):
        param, code = "input", "context_length_exceeded"
    return {"error": {"message": fault.message, "type": kind, "param": param, "code": code}}
