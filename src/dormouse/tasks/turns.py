"""A few places, and who gets the next: those who wait take turns, however many places each of them wants."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Of one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, whose: str) -> AsyncIterator[None]:
        """Inside, one place is taken."""
        await self._take(whose)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, whose: str) -> None:
        if self._free:
            self._free -= 1
            return
        called = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(whose, deque()).append(called)
        try:
            await called
        except asyncio.CancelledError:
            if not called.cancelled():  # it was called and has gone in the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            whose, queue = self._waiting.popitem(last=False)
            called = queue.popleft()
            if queue:
                self._waiting[whose] = queue  # behind the others
            if not called.done():  # else it has gone
                called.set_result(None)
                return
        self._free += 1
