"""A stream of chunks as one answer. Knows no protocol."""

from collections.abc import AsyncGenerator

from dormouse.submit import Chunk


async def last_of(chunks: AsyncGenerator[Chunk, None]) -> Chunk:
    """A client that does not stream gets the last chunk, which is the whole of a model that does not stream."""
    last = None
    async for chunk in chunks:
        last = chunk
    assert last is not None, "an answer without a chunk"
    return last
