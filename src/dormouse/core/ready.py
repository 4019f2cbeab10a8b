"""A queue of functions by urgency. Knows keys, not why they are what they are."""

from heapq import heapify, heappop, heappush
from typing import TypeAlias

from dormouse.core.types import FunctionId

Key: TypeAlias = tuple[int, int, int]
"""What a queueing policy orders by; the smallest goes first."""

LAST: Key = (2**62, 2**62, 2**62)
"""Work that nobody waits for: after everything else."""


class ReadyQueue:
    """Functions by key, smallest first. Every operation is O(log n); stale heap entries are skipped, then swept."""

    __slots__ = ("_heap", "keys")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, FunctionId]] = []
        self.keys: dict[FunctionId, Key] = {}
        """Who waits; to be read by anybody, since the empty case must cost nothing."""

    def put(self, function: FunctionId, key: Key) -> None:
        self.keys[function] = key
        heappush(self._heap, (key, function))
        if len(self._heap) > 2 * len(self.keys) + 64:
            self._heap = [(key, function) for function, key in self.keys.items()]
            heapify(self._heap)

    def discard(self, function: FunctionId) -> None:
        self.keys.pop(function, None)

    def first(self) -> FunctionId | None:
        """The most urgent function, or None when nobody waits here."""
        heap, keys = self._heap, self.keys
        while heap:
            key, function = heap[0]
            if keys.get(function) == key:
                return function
            heappop(heap)
        return None

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, function: FunctionId) -> bool:
        return function in self.keys
