"""The host tier: images of sleeping functions in the arena, and their way from disk and back.

Obeys ``read``, ``drop`` and ``delete``; whether an image may be dropped is not decided here. What is asked of one
function happens in the order asked; the same thing asked again while it is going on is done once. Different
functions do not wait for each other, but for memory that a drop is about to free.
"""

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import msgspec

from dormouse.core.types import Bytes, FunctionId
from dormouse.errors import DormouseError, HostMemoryFull, RefusedSource
from dormouse.store.arena import SEGMENT_BYTES, Arena
from dormouse.store.index import DATA_FILE, INDEX_FILE, PAGE_BYTES, ImageIndex
from dormouse.store.reading import check_size, read_pages
from dormouse.store.writeback import settle, write_state
from dormouse.wire import Extent

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

_PIECE_BYTES: Bytes = 32 * 1024 * 1024
"""What one thread reads of an image before it looks for other work."""


@dataclass(frozen=True, slots=True)
class _Image:
    directory: Path
    index: ImageIndex
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """The last thing asked of a function, while it is going on."""

    kind: str
    task: "asyncio.Task[None]"


class HostStore:
    """Made inside a running event loop, and called from it. ``grown(offset, bytes)`` is called there too, before
    the read that needed the memory ends."""

    def __init__(
        self,
        budget_bytes: Bytes,
        grown: Callable[[Bytes, Bytes], None],
        *,
        threads: int = 4,
        segment_bytes: Bytes = SEGMENT_BYTES,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._grown = grown
        self.arena = Arena(budget_bytes, self._report_growth, segment_bytes=segment_bytes, threads=threads)
        self._threads = ThreadPoolExecutor(threads, "host-store")
        self._images: dict[FunctionId, _Image] = {}
        self._steps: dict[FunctionId, _Step] = {}
        self._write_backs: set[asyncio.Future[None]] = set()

    async def read(self, function: FunctionId, directory: Path) -> None:
        """Bring an image into memory and check every page; one that is not durable is then in memory alone. Raises
        RefusedSource or HostMemoryFull and holds nothing."""
        await self._in_turn(function, "read", lambda: self._read(function, directory))

    async def drop(self, function: FunctionId) -> None:
        """Free an image's pages; changed runtime state goes to disk first, if the image is there. Dropping what is not
        there is fine.

        Raises DormouseError if the state could not be written; the pages are free all the same.
        """
        await self._in_turn(function, "drop", lambda: self._drop(function))

    async def delete(self, function: FunctionId, directory: Path) -> None:
        """Free an image's pages and remove it from disk; its runtime state is not kept."""
        await self._in_turn(function, "delete", lambda: self._delete(function, directory))

    def extents(self, function: FunctionId) -> tuple[Extent, ...]:
        """Where an image that has been read lies in the arena."""
        return self._images[function].extents

    def holds(self, function: FunctionId) -> bool:
        return function in self._images

    async def close(self) -> None:
        """Write runtime state home and give the memory back. Raises the first write-back that failed."""
        functions = list({*self._images, *self._steps})
        outcomes = await asyncio.gather(*(self.drop(function) for function in functions), return_exceptions=True)
        self._threads.shutdown()
        self.arena.close()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    # -------------------------------------------------------------- one thing after another for each function

    async def _in_turn(self, function: FunctionId, kind: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        last = self._steps.get(function)
        if last is None or last.kind != kind:
            task = self._loop.create_task(_after(last, work))
            last = self._steps[function] = _Step(kind, task)
            task.add_done_callback(lambda done: self._forget_step(function, done))
        # Whoever asked may go away; the work is not undone half-way.
        await asyncio.shield(last.task)

    def _forget_step(self, function: FunctionId, done: "asyncio.Task[None]") -> None:
        if self._steps[function].task is done:
            del self._steps[function]
        if not done.cancelled():
            done.exception()  # whoever waited has been told; if nobody did, nobody needs to be

    # -------------------------------------------------------------- reading

    async def _read(self, function: FunctionId, directory: Path) -> None:
        if function in self._images:
            return
        index = await self._in_thread(_opened, directory)
        extents = await self._allocate(len(index.page_crc32) * PAGE_BYTES)
        pieces = [self._in_thread(self._read_piece, directory, index, *piece) for piece in _pieces(extents)]
        outcomes = await asyncio.gather(*pieces, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                self.arena.free(extents)
                raise outcome
        if not index.durable:
            await self._in_thread((directory / DATA_FILE).unlink)
        # Where each tensor lies is the executors' business, and they read it for themselves.
        self._images[function] = _Image(directory, msgspec.structs.replace(index, tensors=()), extents)

    def _read_piece(self, directory: Path, index: ImageIndex, first_page: int, extent: Extent) -> None:
        with self.arena.view(extent) as memory:
            read_pages(directory, index, first_page, memory)

    async def _allocate(self, size_bytes: Bytes) -> tuple[Extent, ...]:
        while True:
            try:
                return await self._in_thread(self.arena.allocate, size_bytes)
            except HostMemoryFull:
                if not self._write_backs:
                    raise
            await asyncio.wait(self._write_backs, return_when=asyncio.FIRST_COMPLETED)

    # -------------------------------------------------------------- dropping

    async def _drop(self, function: FunctionId) -> None:
        image = self._images.pop(function, None)
        if image is None:
            return
        if image.index.state_bytes == 0 or not image.index.durable:
            self.arena.free(image.extents)
            return
        write_back = self._in_thread(self._write_back, function, image)
        self._write_backs.add(write_back)
        try:
            await write_back
        finally:
            self._write_backs.discard(write_back)

    def _write_back(self, function: FunctionId, image: _Image) -> None:
        first = image.index.weight_bytes // PAGE_BYTES
        pages = [self.arena.view(page) for page in _single_pages(image.extents)]
        try:
            write_state(image.directory, image.index, pages[first:])
        except (OSError, DormouseError) as fault:
            message = f"{function}: its runtime state could not be kept in {image.directory}, the one before stays"
            raise DormouseError(f"{message}: {fault}") from None
        finally:
            for page in pages:
                page.release()
            self.arena.free(image.extents)

    async def _delete(self, function: FunctionId, directory: Path) -> None:
        image = self._images.pop(function, None)
        if image is not None:
            self.arena.free(image.extents)
        await self._in_thread(_remove, directory)

    # -------------------------------------------------------------- threads

    def _in_thread(self, work: Callable[[*Arguments], Result], *arguments: *Arguments) -> "asyncio.Future[Result]":
        return self._loop.run_in_executor(self._threads, work, *arguments)

    def _report_growth(self, offset: Bytes, size_bytes: Bytes) -> None:
        # Queued before the end of the allocation is, so the loop sees the segment first.
        self._loop.call_soon_threadsafe(self._grown, offset, size_bytes)


async def _after(last: _Step | None, work: Callable[[], Coroutine[None, None, None]]) -> None:
    if last is not None:
        await asyncio.wait([last.task])
    await work()


def _opened(directory: Path) -> ImageIndex:
    try:
        index = settle(directory)
    except OSError as fault:
        raise RefusedSource(f"{directory}: a state that was being kept cannot be settled: {fault.strerror}") from None
    check_size(directory, index)
    return index


def _remove(directory: Path) -> None:
    """The index goes first: what a crash leaves of the directory is no image."""
    try:
        (directory / INDEX_FILE).unlink(missing_ok=True)
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError as fault:
        raise DormouseError(f"{directory} cannot be removed: {fault.strerror}; remove it by hand") from None


def _pieces(extents: tuple[Extent, ...]) -> Iterator[tuple[int, Extent]]:
    """``(first page, memory)`` of parts that are read by one thread each."""
    page = 0
    for extent in extents:
        for done in range(0, extent.size_bytes, _PIECE_BYTES):
            size_bytes = min(_PIECE_BYTES, extent.size_bytes - done)
            yield page, Extent(extent.offset + done, size_bytes)
            page += size_bytes // PAGE_BYTES


def _single_pages(extents: tuple[Extent, ...]) -> Iterator[Extent]:
    for extent in extents:
        for done in range(0, extent.size_bytes, PAGE_BYTES):
            yield Extent(extent.offset + done, PAGE_BYTES)
