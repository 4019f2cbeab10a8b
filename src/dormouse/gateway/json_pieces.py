"""Large tensors as JSON, in pieces of a millisecond or so: joined they are, byte by byte, what encoding.py makes.

Knows one tensor at a time, and not who lets go of the event loop between two pieces.
"""

import codecs
from collections.abc import Iterator

import msgspec
import numpy as np

from dormouse.core.types import Bytes
from dormouse.gateway import encoding
from dormouse.tensors import Tensor

LARGE_BYTES: Bytes = 32 * 1024
"""From here on a tensor is written in pieces."""
PIECE_ELEMENTS = 8 * 1024
PIECE_TEXTS = 2 * 1024
PIECE_BYTES: Bytes = 64 * 1024
_CHECKED_BYTES: Bytes = 1024 * 1024


def is_large(tensor: Tensor) -> bool:
    return len(tensor.data) >= LARGE_BYTES


def checked(where: str, tensor: Tensor) -> Iterator[None]:
    """Goes through what cannot be written; a pause after each piece. Raises InvalidRequest."""
    if tensor.datatype == "BYTES":
        for _ in _texts(where, tensor.data):
            yield
        return
    if encoding.DTYPES[tensor.datatype].kind != "f":
        return
    for begin in range(0, len(tensor.data), _CHECKED_BYTES):
        encoding.check_finite(where, tensor.datatype, tensor.data[begin : begin + _CHECKED_BYTES])
        yield


def written(where: str, tensor: Tensor) -> Iterator[bytes]:
    """The elements with commas between them, and no brackets around. What they are has been checked."""
    if tensor.datatype == "BYTES":
        yield from _written_texts(where, tensor.data)
        return
    array = np.frombuffer(tensor.data, encoding.DTYPES[tensor.datatype])
    for begin in range(0, array.size, PIECE_ELEMENTS):
        text = msgspec.json.encode(array[begin : begin + PIECE_ELEMENTS].tolist())
        yield text[1:-1] if begin == 0 else b"," + text[1:-1]


def _written_texts(where: str, data: bytes | memoryview) -> Iterator[bytes]:
    first = True
    inside = False
    for texts, ends in _texts(where, data):
        # A piece of a long text: its quotes are at its ends only.
        text = msgspec.json.encode(texts)[1 + inside : -1 if ends else -2]
        yield text if first or inside else b"," + text
        first, inside = False, not ends


def _texts(where: str, data: bytes | memoryview) -> Iterator[tuple[list[str], bool]]:
    """Some elements together, or one of a long element's pieces; and whether the last of them ends here."""
    texts: list[str] = []
    size = 0
    for element in encoding.elements(where, data):
        if len(element) > PIECE_BYTES:
            if texts:
                yield texts, True
                texts, size = [], 0
            yield from _pieces_of_one(where, element)
            continue
        texts.append(encoding.text_of(where, element))
        size += len(element)
        if size >= PIECE_BYTES or len(texts) >= PIECE_TEXTS:
            yield texts, True
            texts, size = [], 0
    if texts:
        yield texts, True


def _pieces_of_one(where: str, element: memoryview) -> Iterator[tuple[list[str], bool]]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, len(element), PIECE_BYTES):
        last = begin + PIECE_BYTES >= len(element)
        try:
            yield [decoder.decode(element[begin : begin + PIECE_BYTES], last)], last
        except UnicodeDecodeError:
            raise encoding.not_utf8(where) from None
