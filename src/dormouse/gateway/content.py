"""Bodies on their way in and out: the size limit, Content-Encoding and Accept-Encoding. Knows no protocol.

Only answers to inference are ever compressed, and only when the client names one coding and no other, as V2 clients
do when told to. A list such as ``gzip, deflate, br`` is what HTTP libraries send unasked: compressing for it would
cost milliseconds that nobody wanted, and some V2 clients cannot read what they thereby asked for.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request

from dormouse.core.types import Bytes
from dormouse.errors import InvalidRequest, TooLarge

_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""zlib's name for each container. HTTP's ``deflate`` means the zlib container."""
_FAST = 1
_WORTH_A_THREAD_BYTES: Bytes = 64 * 1024


async def read_body(request: Request, limit_bytes: Bytes) -> bytearray:
    """The request's body, decompressed. Raises TooLarge, having read no further than the limit."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    unpacked = _unpacker(request.headers.get("content-encoding", ""), limit_bytes)
    body = bytearray()
    received = 0
    async for piece in request.stream():
        received += len(piece)
        if received > limit_bytes:
            raise _too_large(limit_bytes)
        body += piece if unpacked is None else unpacked.feed(piece)
    if unpacked is not None:
        unpacked.finish()
    return body


def _too_large(limit_bytes: Bytes) -> TooLarge:
    return TooLarge(f"the body is larger than {limit_bytes} bytes, the limit of this server (--body-limit-bytes)")


def _unpacker(content_encoding: str, limit_bytes: Bytes) -> "_Unpacker | None":
    coding = content_encoding.strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in _WINDOW:
        raise InvalidRequest(f"Content-Encoding {coding[:80]!r} is not supported; send gzip, deflate or none")
    return _Unpacker(coding, limit_bytes)


class _Unpacker:
    """Decompresses piece by piece, and stops at the limit: a small body can unpack to a thousand times its size."""

    def __init__(self, coding: str, limit_bytes: Bytes) -> None:
        self._coding = coding
        self._limit_bytes = limit_bytes
        self._room_bytes = limit_bytes
        self._stream = zlib.decompressobj(_WINDOW[coding])
        self._begun = False

    def feed(self, packed: bytes) -> bytes:
        out = bytearray()
        while packed:
            if self._stream.eof:  # gzip allows several members one after the other
                self._stream = zlib.decompressobj(_WINDOW[self._coding])
            out += self._unpack(packed)
            packed = self._stream.unused_data or self._stream.unconsumed_tail
        return bytes(out)

    def _unpack(self, packed: bytes) -> bytes:
        try:
            out = self._stream.decompress(packed, self._room_bytes + 1)
        except zlib.error as fault:
            raise InvalidRequest(f"the body is no valid {self._coding}: {fault}") from None
        self._room_bytes -= len(out)
        if self._room_bytes < 0:
            raise _too_large(self._limit_bytes)
        self._begun = True
        return out

    def finish(self) -> None:
        if self._begun and not self._stream.eof:
            raise InvalidRequest(f"the body is no valid {self._coding}: it ends too early")


def chosen_coding(accept_encoding: str) -> str | None:
    """The coding to answer with, or None for the plain body."""
    weights = dict(_weighed(part) for part in accept_encoding.lower().split(",") if part.strip())
    wanted = [coding for coding, weight in weights.items() if weight > 0 and coding != "identity"]
    if len(wanted) == 1 and wanted[0] in _WINDOW:
        return wanted[0]
    if weights.get("identity", weights.get("*", 1.0)) > 0:
        return None
    ours = [coding for coding in _WINDOW if weights.get(coding, weights.get("*", 0.0)) > 0]
    return max(ours, key=lambda coding: weights.get(coding, 0.0), default=None)


def _weighed(part: str) -> tuple[str, float]:
    coding, _, parameter = part.partition(";")
    name, _, value = parameter.partition("=")
    try:
        return coding.strip(), float(value) if name.strip() == "q" else 1.0
    except ValueError:
        return coding.strip(), 1.0


async def compressed(coding: str, parts: Sequence[bytes | memoryview]) -> bytes:
    """The parts as one compressed body; large ones are packed beside the event loop."""
    if sum(len(part) for part in parts) < _WORTH_A_THREAD_BYTES:
        return _compress(coding, parts)
    return await asyncio.to_thread(_compress, coding, parts)


async def compressed_pieces(coding: str, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same of a body that is made piece by piece."""
    stream = _packer(coding)
    async with aclosing(pieces):
        async for piece in pieces:
            if packed := await asyncio.to_thread(stream.compress, piece):
                yield packed
    yield stream.flush()


def _compress(coding: str, parts: Sequence[bytes | memoryview]) -> bytes:
    stream = _packer(coding)
    return b"".join([*(stream.compress(part) for part in parts), stream.flush()])


def _packer(coding: str) -> "zlib._Compress":
    return zlib.compressobj(_FAST, zlib.DEFLATED, _WINDOW[coding])
