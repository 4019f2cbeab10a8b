"""Pictures for those who watch: the whole first, then changes, a few times a second, as server-sent events.

Nothing is taken while nobody watches. A reader that does not keep up gets no backlog: what it has missed is dropped,
and a whole picture takes its place. So a watcher costs a fixed amount of memory, whatever it does.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable

import msgspec

from dormouse.watch.changes import between
from dormouse.watch.picture import Picture

TICK_S = 0.25
BACKLOG = 8
"""Frames that may wait for a reader."""
HEARTBEAT_TICKS = 40
"""So many without a change, and a comment is sent: both ends learn that the other is there."""
HEARTBEAT = b": nothing new\n\n"
GOODBYE = b"event: goodbye\ndata: {}\n\n"

_LOG = logging.getLogger("dormouse.watch")
_encoder = msgspec.json.Encoder()


def frame(event: str, value: object) -> bytes:
    """One server-sent event. JSON has no line breaks, so it is one line."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), _encoder.encode(value))


class _Watcher:
    """What waits for one reader."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._behind = True

    def offer(self, data: bytes) -> None:
        if self._behind:
            return
        if len(self._frames) == BACKLOG:
            self._frames.clear()
            self._behind = True
        else:
            self._frames.append(data)
        self._news.set()

    def wake(self) -> None:
        self._news.set()

    async def next(self, whole: Callable[[], bytes]) -> bytes | None:
        """The next frame, a whole picture where it has fallen behind; None: woken for nothing."""
        while not self._behind and not self._frames and not self._news.is_set():
            await self._news.wait()
        self._news.clear()
        if self._behind:
            self._behind = False
            return whole()
        return self._frames.popleft() if self._frames else None


class Feed:
    """Of one view of a node. ``ended`` says that the server stops: every stream then ends."""

    def __init__(self, take: Callable[[], Picture], ended: asyncio.Event, tick_s: float = TICK_S) -> None:
        self._take = take
        self._ended = ended
        self._tick_s = tick_s
        self._watchers: set[_Watcher] = set()
        self._last: Picture | None = None
        self._ticking: asyncio.Task[None] | None = None

    @property
    def watched(self) -> int:
        """By how many."""
        return len(self._watchers)

    @property
    def _ticks(self) -> bool:
        return self._ticking is not None

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Frames, until the server ends or whoever reads has enough."""
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            if self._ticking is None:
                self._last = self._take()
                self._ticking = asyncio.create_task(self._tick())
            while self._ticks:
                data = await watcher.next(self._whole)
                if data is not None:
                    yield data
            yield GOODBYE
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._ticking is not None:
                self._ticking.cancel()
                self._ticking = None

    def _whole(self) -> bytes:
        """As all others know it: changes are told from there."""
        assert self._last is not None, "somebody watches, so there is a picture"
        return frame("picture", self._last)

    async def _tick(self) -> None:
        try:
            await self._look_again_and_again()
        except Exception as fault:
            _LOG.error("no pictures any more for those who watch now", exc_info=fault)
        self._ticking = None
        for watcher in self._watchers:
            watcher.wake()

    async def _look_again_and_again(self) -> None:
        quiet = 0
        while not await self._ends_within_a_tick():
            quiet = 0 if self._look() else quiet + 1
            if quiet == HEARTBEAT_TICKS:
                quiet = 0
                self._offer(HEARTBEAT)

    async def _ends_within_a_tick(self) -> bool:
        try:
            async with asyncio.timeout(self._tick_s):
                return await self._ended.wait()
        except TimeoutError:
            return False

    def _look(self) -> bool:
        assert self._last is not None
        picture = self._take()
        changes = between(self._last, picture)
        if not changes:
            return False
        self._last = picture
        self._offer(frame("changes", changes))
        return True

    def _offer(self, data: bytes) -> None:
        for watcher in self._watchers:
            watcher.offer(data)
