"""Which pages of the arena are free, and which of them an image gets.

Pure bookkeeping of page numbers. A request is never refused while enough pages are free, however scattered they
are; it gets one run where one is long enough, else as few runs as can be. A run never crosses a segment, because a
device registers host memory segment by segment, and one copy must not touch two registrations.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

Run = tuple[int, int]
"""First page, and how many."""


class FreePages:
    """Starts empty; ``add`` puts new or used pages in, ``take`` hands pages out."""

    def __init__(self, segment_pages: int) -> None:
        assert segment_pages > 0, segment_pages
        self._segment_pages = segment_pages
        self._runs: list[Run] = []
        self.count = 0

    def runs(self) -> tuple[Run, ...]:
        """The free runs in ascending order; neighbours in one segment are one run."""
        return tuple(self._runs)

    def add(self, first: int, count: int) -> None:
        """Pages that are not in the book now."""
        for start, length in self._within_segments(first, count):
            self._insert(start, length)
            self.count += length

    def take(self, count: int) -> list[Run]:
        """``count`` pages, which must be there."""
        assert 0 < count <= self.count, (count, self.count)
        taken = []
        while count:
            run = self._best(count)
            self._runs.remove(run)
            first, length = run
            if length > count:
                insort(self._runs, (first + count, length - count))
                length = count
            taken.append((first, length))
            self.count -= length
            count -= length
        return taken

    def _best(self, count: int) -> Run:
        """The shortest run that holds ``count`` pages; where none does, the longest."""
        fitting = min((run for run in self._runs if run[1] >= count), key=lambda run: run[1], default=None)
        return fitting or max(self._runs, key=lambda run: run[1])

    def _insert(self, first: int, count: int) -> None:
        place = bisect_left(self._runs, (first, 0))
        after = self._runs[place] if place < len(self._runs) else None
        before = self._runs[place - 1] if place else None
        assert before is None or before[0] + before[1] <= first, f"page {first} was free already"
        assert after is None or first + count <= after[0], f"page {after} was free already"
        if after and after[0] == first + count and self._one_segment(first, after[0]):
            del self._runs[place]
            count += after[1]
        if before and before[0] + before[1] == first and self._one_segment(before[0], first):
            del self._runs[place - 1]
            first, count = before[0], before[1] + count
        insort(self._runs, (first, count))

    def _one_segment(self, page: int, other: int) -> bool:
        return page // self._segment_pages == other // self._segment_pages

    def _within_segments(self, first: int, count: int) -> Iterator[Run]:
        while count:
            length = min(count, self._segment_pages - first % self._segment_pages)
            yield first, length
            first, count = first + length, count - length
