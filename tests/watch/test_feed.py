"""The feed: a picture, its changes, an end; and readers that are slow."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
from msgspec.structs import replace

from dormouse.watch.feed import BACKLOG, GOODBYE, HEARTBEAT, HEARTBEAT_TICKS, Feed
from dormouse.watch.picture import Picture, Totals, Watched

ROW = Watched("f", "1", "", False, "READY", "host", "none", 10, 0, 100.0, 98.0)
TICK_S = 0.001


class Node:
    """Each picture differs from the last in one number, if ``busy``."""

    def __init__(self, *, busy: bool = True) -> None:
        self.busy = busy
        self.taken = 0
        self.breaks = False

    def picture(self) -> Picture:
        if self.breaks:
            raise ZeroDivisionError("a fault of ours")
        self.taken += 1
        row = replace(ROW, requests=self.taken if self.busy else 0)
        return Picture(self.taken, 5000, 1, {"f": row}, {}, Totals())


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(limited())


def told(data: bytes) -> tuple[str, dict[str, Any]]:
    """Event and value of one frame."""
    event, _, rest = data.decode().partition("\n")
    assert rest.startswith("data: ") and rest.endswith("\n\n")
    return event.removeprefix("event: "), msgspec.json.decode(rest.removeprefix("data: "))


def requests_in(data: bytes) -> int:
    number: int = told(data)[1]["functions"]["f"]["requests"]
    return number


def test_a_picture_comes_first_and_then_what_changes() -> None:
    async def scenario() -> None:
        frames = Feed(Node().picture, asyncio.Event(), TICK_S).watch()
        first, second, third = [await anext(frames) for _ in range(3)]
        assert [told(each)[0] for each in (first, second, third)] == ["picture", "changes", "changes"]
        assert requests_in(third) == requests_in(second) + 1 == requests_in(first) + 2
        await frames.aclose()

    run(scenario())


def test_who_comes_later_is_told_the_same_from_then_on() -> None:
    async def scenario() -> None:
        feed = Feed(Node().picture, asyncio.Event(), TICK_S)
        early = feed.watch()
        await anext(early)
        await anext(early)
        late = feed.watch()
        event, value = told(await anext(late))
        assert event == "picture"
        assert requests_in(await anext(late)) == value["functions"]["f"]["requests"] + 1
        assert feed.watched == 2
        await early.aclose()
        await late.aclose()

    run(scenario())


def test_nothing_is_taken_while_nobody_watches() -> None:
    async def scenario() -> None:
        node = Node()
        feed = Feed(node.picture, asyncio.Event(), TICK_S)
        frames = feed.watch()
        await anext(frames)
        await anext(frames)
        await frames.aclose()
        assert feed.watched == 0
        assert all("_tick" not in repr(task) or task.cancelling() for task in asyncio.all_tasks())
        again = feed.watch()
        assert told(await anext(again))[0] == "picture"
        await again.aclose()

    run(scenario())


def test_a_slow_reader_has_no_backlog_and_is_given_a_whole_picture_instead() -> None:
    async def scenario() -> None:
        feed = Feed(Node().picture, asyncio.Event(), TICK_S)
        slow, fast = feed.watch(), feed.watch()
        await anext(slow)
        for _ in range(3 * BACKLOG):
            newest = await anext(fast)
        (watcher,) = [each for each in feed._watchers if each._behind]
        assert len(watcher._frames) == 0
        event, value = told(await anext(slow))
        assert event == "picture"
        assert value["functions"]["f"]["requests"] >= requests_in(newest)
        assert told(await anext(slow))[0] == "changes"
        await slow.aclose()
        await fast.aclose()

    run(scenario())


def test_where_nothing_changes_a_comment_says_that_it_lives() -> None:
    async def scenario() -> None:
        node = Node(busy=False)
        frames = Feed(node.picture, asyncio.Event(), TICK_S).watch()
        await anext(frames)
        assert await anext(frames) == HEARTBEAT
        assert node.taken > HEARTBEAT_TICKS
        await frames.aclose()

    run(scenario())


def test_all_are_told_when_the_server_stops() -> None:
    async def scenario() -> None:
        ended = asyncio.Event()
        feed = Feed(Node(busy=False).picture, ended, 60)
        watching = [feed.watch(), feed.watch()]
        for frames in watching:
            await anext(frames)
        waiting = [asyncio.ensure_future(anext(frames)) for frames in watching]
        ended.set()
        assert await asyncio.gather(*waiting) == [GOODBYE, GOODBYE]
        for frames in watching:
            assert [each async for each in frames] == []
        assert feed.watched == 0

    run(scenario())


def test_a_fault_of_ours_ends_the_streams_and_the_next_begins_anew() -> None:
    async def scenario() -> None:
        node = Node()
        feed = Feed(node.picture, asyncio.Event(), TICK_S)
        frames = feed.watch()
        await anext(frames)
        node.breaks = True
        rest = [each async for each in frames]
        assert rest[-1] == GOODBYE
        node.breaks = False
        again = feed.watch()
        assert told(await anext(again))[0] == "picture"
        assert told(await anext(again))[0] == "changes"
        await again.aclose()

    run(scenario())
