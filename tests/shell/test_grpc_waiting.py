"""Calls without a key whose message does not come: they end in time, or when there are too many of them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from dormouse.errors import InvalidRequest, TooSlow
from dormouse.gateway.grpc_messages import HEALTH, INFERENCE, message
from dormouse.gateway.grpc_waiting import MOST_WAITING, Waiting
from tests.shell.running import running


async def nothing() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def one() -> AsyncIterator[bytes]:
    yield b"asked"


async def none() -> AsyncIterator[bytes]:
    silent: tuple[bytes, ...] = ()
    for wire in silent:
        yield wire


def test_a_message_that_does_not_come_is_too_slow() -> None:
    with pytest.raises(TooSlow, match=r"longer than 0.01 s to arrive"):
        asyncio.run(Waiting(limit_s=0.01).first_of(nothing()))


def test_a_call_that_ends_without_a_message_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no message"):
        asyncio.run(Waiting().first_of(none()))


def test_of_too_many_that_wait_the_longest_waiting_goes() -> None:
    async def wait() -> None:
        waiting = Waiting(limit_s=1_000, most=2)
        calls = [asyncio.create_task(waiting.first_of(nothing())) for _ in range(3)]
        with pytest.raises(TooSlow):
            await calls[0]
        assert await waiting.first_of(one()) == b"asked"
        with pytest.raises(TooSlow):
            await calls[1]
        assert not calls[2].done()
        calls[2].cancel()

    asyncio.run(wait())


@pytest.mark.parametrize("path", [f"/{INFERENCE}/ServerLive", f"/{HEALTH}/Check"])
def test_many_calls_without_a_message_leave_room_for_the_rest(path: str) -> None:
    ended, refused = threading.Event(), threading.Event()

    def unsaid() -> Iterator[bytes]:
        ended.wait()
        yield from ()

    with running() as server, grpc.insecure_channel(server.grpc) as channel:
        stalled = [channel.stream_unary(path).future(unsaid()) for _ in range(MOST_WAITING + 1)]
        for call in stalled:  # which of them comes first is not said
            call.add_done_callback(lambda _: refused.set())
        assert refused.wait(timeout=30)
        assert grpc.StatusCode.DEADLINE_EXCEEDED in {call.code() for call in stalled if call.done()}
        answer = channel.unary_unary(f"/{INFERENCE}/ServerLive")(b"", timeout=30)
        assert message("ServerLiveResponse").FromString(answer).live
        for call in stalled:
            call.cancel()
        ended.set()
