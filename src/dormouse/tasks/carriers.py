"""How texts and pictures travel as V2 tensors, and what a task adds to a function's signature for them.

Inputs of bytes: ``text`` (UTF-8), ``tokens`` (ids, four bytes each) and ``image`` (files). Outputs: ``label`` and
``score`` of a classification, ``token_count`` of texts.
"""

import base64
import binascii
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from dormouse.errors import InvalidRequest
from dormouse.tasks.description import Task
from dormouse.tensors import Signature, TensorSpec

TEXT, TOKENS, IMAGE = "text", "tokens", "image"
LABEL, SCORE, TOKEN_COUNT = "label", "score", "token_count"
CARRIERS = frozenset((TEXT, TOKENS, IMAGE))
MADE = frozenset((LABEL, SCORE, TOKEN_COUNT))
MOST_ITEMS = 2048
"""Texts of one request."""
MOST_IMAGES = 64


def widened_by(task: Task, signature: Signature) -> Signature:
    """The signature with what a task adds; its own inputs may then be left out."""
    carried = [*((TEXT, TOKENS) if task.text is not None else ()), *((IMAGE,) if task.image is not None else ())]
    inputs = [msgspec.structs.replace(spec, optional=True) for spec in signature.inputs]
    kinds = {LABEL: ("BYTES", (-1, -1)), SCORE: ("FP32", (-1, -1)), TOKEN_COUNT: ("INT64", (-1,))}
    made = [*made_by(task), *((TOKEN_COUNT,) if task.text is not None else ())]
    return Signature(
        (*inputs, *(TensorSpec(name, "BYTES", (-1,), optional=True) for name in carried)),
        (*signature.outputs, *(TensorSpec(name, *kinds[name]) for name in made)),
    )


def made_by(task: Task) -> tuple[str, ...]:
    """What an answer to texts or pictures has besides the model's own outputs."""
    return (LABEL, SCORE) if task.kind == "classification" else ()


def texts_in(items: Iterable[memoryview]) -> list[str]:
    try:
        return [str(item, "utf-8") for item in items]
    except UnicodeDecodeError as fault:
        raise InvalidRequest(f"input {TEXT!r} has bytes that are no UTF-8: {fault.reason}") from None


def ids_in(number: int, item: memoryview) -> list[int]:
    if len(item) % 4:
        raise InvalidRequest(f"input {TOKENS!r}: element {number} has {len(item)} bytes, no whole number of ids")
    ids: list[int] = np.frombuffer(item, "<i4").tolist()
    return ids


def tokens_element(ids: Sequence[int]) -> bytes:
    """Ids as an element of ``tokens``."""
    return np.asarray(ids, "<i4").tobytes()


def file_in(item: memoryview) -> bytes | memoryview:
    """A picture's file, which JSON carries as a data URL."""
    if bytes(item[:5]) != b"data:":
        return item
    head, comma, body = bytes(item).partition(b",")
    try:
        if not comma or not head.endswith(b";base64"):
            raise InvalidRequest("the picture's data URL is not in base64")
        return base64.b64decode(body, validate=True)
    except binascii.Error as fault:
        raise InvalidRequest(f"the picture is no base64: {fault}") from None
