"""Long work on the event loop, in pieces: after each the loop is let go, so that nobody waits longer than for one.

Whoever has pieces to make takes turns with all others, so that many at once cost the rest no more than one. Knows not
what the pieces are.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator
from itertools import islice
from typing import TypeVar
from weakref import WeakKeyDictionary

Piece = TypeVar("Piece")
Result = TypeVar("Result")

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def paced(pieces: Iterator[Piece]) -> AsyncGenerator[Piece, None]:
    """The pieces, each made when it is asked for, and when the loop has been round since the last one of anybody."""
    while True:
        async with _turn():
            await asyncio.sleep(0)
            made = list(islice(pieces, 1))
        if not made:
            return
        yield made[0]


async def all_of(pieces: Iterator[Piece]) -> list[Piece]:
    """The same together, for what must be whole before it is of use."""
    return [piece async for piece in paced(pieces)]


async def result_of(steps: Generator[None, None, Result]) -> Result:
    """What a generator returns that pauses after each piece."""
    while True:
        async with _turn():
            await asyncio.sleep(0)
            try:
                next(steps)
            except StopIteration as end:
                result: Result = end.value
                return result


def _turn() -> asyncio.Lock:
    return _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
