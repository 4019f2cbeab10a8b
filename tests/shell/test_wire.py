"""Frames: whole messages come out, however the bytes of a socket were cut on their way."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse import wire

MESSAGES = st.lists(st.builds(lambda n: wire.ReplyRead(tuple(range(n))), st.integers(0, 40)), max_size=8)


@given(MESSAGES, st.lists(st.integers(1, 60), min_size=1))
def test_frames_come_out_whole_however_they_are_cut(messages: list[wire.ReplyRead], cuts: list[int]) -> None:
    sent = b"".join(wire.frame(message) for message in messages)
    unread, found, at, number = bytearray(), [], 0, 0
    while at < len(sent):
        size = cuts[number % len(cuts)]
        unread += sent[at : at + size]
        at, number = at + size, number + 1
        found += [wire.decode_to_executor(body) for body in wire.whole_frames(unread)]
    assert found == messages
    assert not unread


def test_a_frame_that_has_not_all_come_stays() -> None:
    unread = bytearray(wire.frame(wire.ReplyRead((1,))) + wire.frame(wire.ReplyRead((2,)))[:-1])
    assert [wire.decode_to_executor(body) for body in wire.whole_frames(unread)] == [wire.ReplyRead((1,))]
    assert unread == wire.frame(wire.ReplyRead((2,)))[:-1]


def test_a_frame_longer_than_any_is_no_frame() -> None:
    with pytest.raises(msgspec.DecodeError, match="a frame of 4294967295 bytes"):
        list(wire.whole_frames(bytearray(b"\xff" * 8)))
