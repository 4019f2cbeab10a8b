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
            if called.cancelled():
                self._forget(whose, called)
            else:  # it was called and has gone in the same moment
                self._pass_on()
            raise

    def _forget(self, whose: str, called: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(whose)
        if queue is not None and called in queue:
            queue.remove(called)
            if not queue:
                del self._waiting[whose]

    def _pass_on(self) -> None:
        while self._waiting:
            whose, queue = next(iter(self._waiting.items()))
            called = queue.popleft()
            if queue:
                self._waiting.move_to_end(whose, last=not called.done())  # behind the others, once it was its turn
            else:
                del self._waiting[whose]
            if not called.done():  # else it is about to go
                called.set_result(None)
                return
        self._free += 1
