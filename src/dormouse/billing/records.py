"""What the ledger records, as it is written: facts with a time, and no price.

Times are nanoseconds since 1970 by the clock of one life of the server, which never runs backwards, not even from one
life to the next. A function is named as the core names it, ``name/revision``.
"""

import msgspec
from msgspec import Struct

from dormouse.core.types import Bytes, FunctionId, Ns

CANCELLED = "cancelled"
NOT_RECORDED = "not_recorded"
"""Reason of a request that was refused because its answer could not have been billed."""

DEPLOYED, HOST, DEVICE = "deployed", "host", "device"
"""What a function can be for a while: known to callers, in host memory, in a device's memory."""


class RequestEnded(Struct, frozen=True, array_like=True, tag="r"):
    """One request, however it ended."""

    number: int
    """Within this life of the server."""
    function: FunctionId
    tenant: str
    """Who asked, and pays."""
    at_ns: Ns
    """When it was answered or refused. It arrived ``latency_ns`` before."""
    latency_ns: Ns
    queued_ns: Ns
    device_ns: Ns
    """Its own part of the device's time."""
    path: str
    in_time: bool
    in_bytes: Bytes
    out_bytes: Bytes
    reason: str = ""
    """Why there was no answer. Empty: it was answered, and is charged."""


class RequestVoided(Struct, frozen=True, array_like=True, tag="v"):
    """An entry that was written, but whose answer was not handed out after all."""

    number: int
    at_ns: Ns


class FunctionKnown(Struct, frozen=True, array_like=True, tag="f"):
    """What bills need to know of a revision."""

    function: FunctionId
    owner: str
    at_ns: Ns
    image_bytes: Bytes
    device_bytes: Bytes
    """Whole chunks: what it takes of a device."""
    deadline_ns: Ns
    share_ppm: int
    pinned: bool
    """It never leaves the device that it has reached."""


class Began(Struct, frozen=True, array_like=True, tag="b"):
    """From now on the function takes ``size_bytes`` of ``place``; ended by Ended or by the end of this life."""

    kind: str
    function: FunctionId
    place: str
    at_ns: Ns
    size_bytes: Bytes
    how: str
    """Which path or occasion brought it there."""


class Ended(Struct, frozen=True, array_like=True, tag="e"):
    kind: str
    function: FunctionId
    place: str
    at_ns: Ns
    why: str


class Loaded(Struct, frozen=True, array_like=True, tag="l"):
    function: FunctionId
    place: str
    at_ns: Ns
    path: str
    size_bytes: Bytes
    load_ns: Ns


class Displaced(Struct, frozen=True, array_like=True, tag="d"):
    """The function had to leave a device."""

    function: FunctionId
    place: str
    at_ns: Ns
    cause: str
    """The function that came in its place. Empty: nobody, it was unloaded or removed."""


class Unbilled(Struct, frozen=True, array_like=True, tag="u"):
    """Device time that went into answers nobody waited for any more."""

    function: FunctionId
    place: str
    at_ns: Ns
    device_ns: Ns


class AdmissionRefused(Struct, frozen=True, array_like=True, tag="a"):
    """A deploy found no room."""

    function: FunctionId
    at_ns: Ns
    reason: str


class Beat(Struct, frozen=True, array_like=True, tag="t"):
    """Up to here everything is recorded. ``last``: the server ended as it should."""

    at_ns: Ns
    last: bool = False


Record = (
    RequestEnded
    | RequestVoided
    | FunctionKnown
    | Began
    | Ended
    | Loaded
    | Displaced
    | Unbilled
    | AdmissionRefused
    | Beat
)


class Page(Struct, frozen=True, array_like=True):
    """What is written at once, and so is there as a whole or not at all."""

    life: int
    records: list[Record]


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Page] = msgspec.msgpack.Decoder(Page)


def encoded(life: int, records: list[Record]) -> bytes:
    return _encoder.encode(Page(life, records))


def decoded(page: bytes) -> Page:
    return _decoder.decode(page)


def request_name(life: int, number: int) -> str:
    """A request's name, which no other request of this state directory ever has."""
    return f"{life}-{number}"
