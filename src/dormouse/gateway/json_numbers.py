"""Large tensors given as JSON numbers, read in pieces of a millisecond or so. What is no large array of numbers is left
alone, and read by encoding.py at once.

A pause is a ``yield``: who lets go of the event loop then is somebody else's business.
"""

import re
import secrets
from collections.abc import Generator, Sequence
from itertools import accumulate
from operator import mul

import msgspec
import numpy as np
import numpy.typing as npt

from dormouse.core.types import Bytes
from dormouse.errors import InvalidRequest
from dormouse.gateway import encoding

LARGE_BYTES: Bytes = 64 * 1024
"""From here on an array is read in pieces."""
PIECE_BYTES: Bytes = 32 * 1024
LONGEST_PIECE_BYTES: Bytes = 1024 * 1024
"""Where an element has much white space around it."""
MOST_STRINGS = 64 * 1024
"""So many strings are passed over in search of an array; a body with more is one of strings."""
_BEGINNING_BYTES = 4 * 1024
_PAUSE_STRINGS = 4 * 1024

_BEGIN = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*(?=\[)")
_INDEX = re.compile(r"\$\[(\d+)\]")
_OPEN, _CLOSE, _COMMA, _NUMBER = (ord(each) for each in "[],0")
_BLANKS = b" \t\r\n"
_KINDS = np.full(256, _NUMBER, np.uint8)
"""What each byte is part of; 0: nothing."""
_KINDS[[_OPEN, _CLOSE, _COMMA]] = _OPEN, _CLOSE, _COMMA
_KINDS[list(_BLANKS)] = 0

Regions = dict[bytes, memoryview]


def cut_out(body: bytes | bytearray, end: int) -> Generator[None, None, tuple[bytes | memoryview, Regions]]:
    """The JSON up to ``end`` with a string of ours for each large array called ``data``, and these by that string."""
    parts: list[bytes | memoryview] = []
    regions: Regions = {}
    view, kept, at, mark = memoryview(body), 0, 0, secrets.token_hex(16)
    key = b""
    for number in range(MOST_STRINGS):
        if number % _PAUSE_STRINGS == 0:
            yield
        quote = body.find(b'"', at, end)
        stop = end if quote < 0 else quote
        if stop - at >= LARGE_BYTES and key == b"data" and (found := _array(body, at, stop)) is not None:
            token = f'"{mark}:{number}"'.encode()
            parts += [view[kept : found[0]], token]
            regions[token], kept = view[found[0] : found[1]], found[1]
            yield
        if quote < 0:
            break
        at = _after_string(body, quote, end)
        key = bytes(view[quote + 1 : min(at - 1, quote + 16)])
    return (b"".join([*parts, view[kept:end]]) if parts else view[:end]), regions


def _array(body: bytes | bytearray, at: int, stop: int) -> tuple[int, int] | None:
    """Of what stands after a key and before the next string: the array that is the key's."""
    begin = _BEGIN.match(body, at, stop)
    if begin is None:
        return None
    brace = body.find(b"}", at, stop)
    last = body.rfind(b"]", begin.end(), stop if brace < 0 else brace)
    return None if last < 0 else (begin.end(), last + 1)


def _after_string(body: bytes | bytearray, quote: int, end: int) -> int:
    at = quote
    while (at := body.find(b'"', at + 1, end)) >= 0:
        before = at
        while body[before - 1] == ord("\\"):
            before -= 1
        if (at - before) % 2 == 0:
            return at + 1
    return end


def read(
    where: str, datatype: str, shape: Sequence[int], count: int, text: memoryview
) -> Generator[None, None, bytes | memoryview]:
    """Raw bytes of a tensor, as ``encoding.from_json`` has them. Raises InvalidRequest."""
    depth = encoding.depth_of(bytes(text[:_BEGINNING_BYTES]))
    if count == 0 or datatype in ("BYTES", *encoding.BINARY_ONLY) or depth not in (1, len(shape)):
        return encoding.from_json(where, datatype, shape, count, msgspec.Raw(text))
    reading = _Reading(where, datatype, tuple(shape), tuple(shape) if depth == len(shape) else (count,))
    while text:
        size = _piece_bytes(where, text)
        reading.add(bytes(text[:size]))
        if size + 1 == len(text):  # it ends with a comma
            raise reading.malformed()
        text = text[size + 1 :]
        yield
    return reading.finished()


def _piece_bytes(where: str, text: memoryview) -> Bytes:
    """Up to a comma, or the end."""
    if len(text) <= PIECE_BYTES:
        return len(text)
    size = bytes(text[:PIECE_BYTES]).rfind(b",")
    if size < 0:
        size = bytes(text[:LONGEST_PIECE_BYTES]).find(b",")
    if size < 0 and len(text) > LONGEST_PIECE_BYTES:
        raise InvalidRequest(f"{where}: data has {LONGEST_PIECE_BYTES} bytes without a comma")
    return len(text) if size < 0 else size


class _Reading:
    """Of one array, front to back."""

    def __init__(self, where: str, datatype: str, shape: tuple[int, ...], dimensions: tuple[int, ...]) -> None:
        """``dimensions``: as which it is written, flat or as its shape."""
        self._where = where
        self._datatype = datatype
        self._dimensions = dimensions
        self._shape = list(shape)
        self._spans = list(accumulate(reversed(dimensions), mul))
        """Elements of a row, of a row of rows, and so on."""
        self._count = self._spans[-1]
        self._done = 0
        self._raw = bytearray()

    def add(self, piece: bytes) -> None:
        """What stands between two commas, or an end; with more of them inside."""
        found = _skeleton(piece)
        elements = int(np.count_nonzero(found == _NUMBER))
        if not elements:  # two commas, or an end without a number
            raise self.malformed()
        if self._done + elements > self._count:
            raise self._miscounted(f"more than {self._count}")
        expected = self._expected(elements)
        if not np.array_equal(found, expected):
            ended = len(self._dimensions) == 1 and np.array_equal(found, [*expected, _CLOSE])
            raise self._miscounted(str(self._done + elements)) if ended else self.malformed()
        try:
            self._raw += encoding.array_of(self._where, self._datatype, b"[" + _numbers(piece) + b"]").data.cast("B")
        except InvalidRequest as fault:
            raise InvalidRequest(_INDEX.sub(self._place, fault.message)) from None
        self._done += elements

    def _expected(self, elements: int) -> npt.NDArray[np.uint8]:
        """The skeleton of so many elements from here on, by the shape."""
        numbers = np.arange(self._done, self._done + elements)
        opened = sum((numbers % span == 0).astype(np.intp) for span in self._spans)
        closed = sum(((numbers + 1) % span == 0).astype(np.intp) for span in self._spans)
        ends = np.cumsum(opened + closed + 2)
        begins = ends - (opened + closed + 2)
        made = np.full(int(ends[-1]), _COMMA, np.uint8)
        for level in range(len(self._spans)):
            made[(begins + level)[opened > level]] = _OPEN
            made[(begins + opened + 1 + level)[closed > level]] = _CLOSE
        made[begins + opened] = _NUMBER
        return made[:-1]

    def finished(self) -> memoryview:
        assert self._done == self._count, "the last bracket closes after the last element"
        return memoryview(self._raw)

    def malformed(self) -> InvalidRequest:
        text = f"data is not written as shape {self._shape} takes it, after element {self._done}"
        return InvalidRequest(f"{self._where}: {text}")

    def _miscounted(self, have: str) -> InvalidRequest:
        text = f"data has {have} elements, shape {self._shape} takes {self._count} elements"
        return InvalidRequest(f"{self._where}: {text}")

    def _place(self, index: "re.Match[str]") -> str:
        at = np.unravel_index(self._done + int(index[1]), self._dimensions)
        return "$" + "".join(f"[{each}]" for each in at)


def _skeleton(piece: bytes) -> npt.NDArray[np.uint8]:
    """Brackets, commas, and a mark for each number."""
    kinds = _KINDS[np.frombuffer(piece, np.uint8)]
    inside = kinds == _NUMBER
    again = np.zeros_like(inside)
    again[1:] = inside[1:] & inside[:-1]
    skeleton: npt.NDArray[np.uint8] = kinds[(kinds != 0) & ~again]
    return skeleton


def _numbers(piece: bytes) -> bytes:
    return piece.translate(None, b"[]" + _BLANKS)
