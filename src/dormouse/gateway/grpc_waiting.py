"""Calls that need no key and whose message has not come: how long they may wait for it, and how many may.

Anybody can begin such calls, and each counts among all calls of the server; so there are few, and the one that has
waited longest makes room. Who sends call and message together, as clients do, hardly waits. Knows no call.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator

from dormouse.errors import InvalidRequest, TooSlow

MESSAGE_S = 20.0
MOST_WAITING = 256


class Waiting:
    """Of one server."""

    def __init__(self, limit_s: float = MESSAGE_S, most: int = MOST_WAITING) -> None:
        self._limit_s = limit_s
        self._most = most
        self._limits: OrderedDict[asyncio.Timeout, None] = OrderedDict()
        """Of those that wait, the one that has waited longest first."""

    async def first_of(self, wires: AsyncIterator[bytes]) -> bytes:
        """The message of a call. Raises TooSlow, InvalidRequest."""
        limit = asyncio.timeout(self._limit_s)
        try:
            async with limit:
                self._begin(limit)
                async for wire in wires:
                    return wire
        except TimeoutError:
            raise self._late() from None
        finally:
            self._limits.pop(limit, None)
        raise InvalidRequest("the call has no message")

    def _begin(self, limit: asyncio.Timeout) -> None:
        self._limits[limit] = None
        if len(self._limits) > self._most:
            longest, _ = self._limits.popitem(last=False)
            longest.reschedule(asyncio.get_running_loop().time())

    def _late(self) -> TooSlow:
        return TooSlow(
            f"the message took longer than {self._limit_s:g} s to arrive, or too many calls waited for theirs"
        )
