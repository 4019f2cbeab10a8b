"""The book of physical chunks: which are free, and which runs of them are neighbours.

Knows chunk numbers only; what a chunk is, and how it is mapped, is the device's business.
"""

from collections.abc import Iterable, Iterator

from dormouse.core.types import Bytes
from dormouse.errors import OutOfChunks


class ChunkPool:
    """Equal chunks ``0 .. count - 1``; the lowest free ones are taken first, so that neighbours stay together."""

    def __init__(self, count: int, chunk_bytes: Bytes) -> None:
        assert count > 0 and chunk_bytes > 0, (count, chunk_bytes)
        self.count = count
        self.chunk_bytes = chunk_bytes
        self._free = list(range(count))

    @property
    def capacity_bytes(self) -> Bytes:
        return self.count * self.chunk_bytes

    @property
    def free_bytes(self) -> Bytes:
        return len(self._free) * self.chunk_bytes

    @property
    def used_bytes(self) -> Bytes:
        return self.capacity_bytes - self.free_bytes

    def chunks_for(self, size_bytes: Bytes) -> int:
        """How many chunks hold ``size_bytes``."""
        return -(-size_bytes // self.chunk_bytes)

    def take(self, count: int) -> list[int]:
        """``count`` free chunks in ascending order. Raises OutOfChunks and takes none if there are fewer."""
        if count > len(self._free):
            wanted, free = count * self.chunk_bytes, self.free_bytes
            raise OutOfChunks("map", "OUT_OF_CHUNKS", f"{wanted} bytes asked for, {free} of {self.capacity_bytes} free")
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, chunks: Iterable[int]) -> None:
        """Chunks that ``take`` gave out."""
        self._free = sorted([*self._free, *chunks])
        assert len(self._free) <= self.count, "a chunk was given back twice"


def runs(chunks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """``(first, count)`` of each stretch of neighbouring chunks, in the order given."""
    first, count = -1, 0
    for chunk in chunks:
        if count and chunk == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = chunk, 1
    if count:
        yield first, count
