"""The gate before both doors: a key makes a caller, and a caller may enter as often as its tenant may.

It remembers what each tenant has used; limits.py decides. Knows neither HTTP nor gRPC: a door finds the key, and says
when a request has ended.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from dormouse.core.types import Ns
from dormouse.errors import OverLimit, Unauthenticated
from dormouse.tenants import limits
from dormouse.tenants.callers import OPERATOR, Caller
from dormouse.tenants.keyring import Keyring
from dormouse.tenants.limits import Limits, Refusal, Usage

KEY_HEADERS = ("authorization", "x-api-key")
"""Where a key is looked for, in this order, over both doors."""
NEEDED = "a key is needed here; send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"

_BEARER = "bearer "


class Gate(Protocol):
    """Who enters has to leave."""

    def caller_of(self, headers: Mapping[str, str]) -> Caller:
        """Who asks; of ``headers`` those in KEY_HEADERS are read. Raises Unauthenticated."""

    def check(self, caller: Caller) -> None:
        """Refuse now what ``enter`` would refuse. Raises OverLimit."""

    def enter(self, caller: Caller) -> None:
        """Begin a request. Raises OverLimit."""

    def leave(self, caller: Caller) -> None:
        """End it."""

    def inside(self, caller: Caller) -> contextlib.AbstractContextManager[None]:
        """Enter, and leave in the end. Raises OverLimit."""

    def streaming(self, caller: Caller) -> contextlib.AbstractContextManager[None]:
        """Open a stream, and close it in the end; its requests enter one by one. Raises OverLimit."""


class OpenGate:
    """Everybody enters, and may do everything."""

    def caller_of(self, headers: Mapping[str, str]) -> Caller:
        del headers
        return OPERATOR

    def check(self, caller: Caller) -> None:
        pass

    def enter(self, caller: Caller) -> None:
        pass

    def leave(self, caller: Caller) -> None:
        pass

    @contextlib.contextmanager
    def inside(self, caller: Caller) -> Iterator[None]:
        del caller
        yield

    streaming = inside


class KeptGate:
    """``limits_of`` says what a tenant may."""

    def __init__(
        self, keyring: Keyring, limits_of: Callable[[str], Limits], clock: Callable[[], Ns] = time.monotonic_ns
    ) -> None:
        self._keyring = keyring
        self._limits_of = limits_of
        self._clock = clock
        self._requests: dict[str, Usage] = {}
        self._streams: dict[str, Usage] = {}

    def caller_of(self, headers: Mapping[str, str]) -> Caller:
        key = _key_in(headers)
        if key is None:
            raise Unauthenticated(NEEDED)
        caller = self._keyring.find(key.encode())
        if caller is None:
            raise Unauthenticated("the key is none of this server's, or was revoked")
        return caller

    def check(self, caller: Caller) -> None:
        usage = self._requests.get(caller.tenant)
        if usage is not None:
            refused = limits.refusal(self._limits_of(caller.tenant), usage, self._clock())
            if refused is not None:
                raise _over_limit(caller, refused)

    def enter(self, caller: Caller) -> None:
        self._enter(self._requests, caller, self._limits_of(caller.tenant))

    def leave(self, caller: Caller) -> None:
        self._requests[caller.tenant] = limits.left(self._requests[caller.tenant])

    @contextlib.contextmanager
    def inside(self, caller: Caller) -> Iterator[None]:
        self.enter(caller)
        try:
            yield
        finally:
            self.leave(caller)

    @contextlib.contextmanager
    def streaming(self, caller: Caller) -> Iterator[None]:
        """As many as requests, and counted apart: an idle stream takes no request's place."""
        self._enter(self._streams, caller, Limits(concurrency=self._limits_of(caller.tenant).concurrency))
        try:
            yield
        finally:
            self._streams[caller.tenant] = limits.left(self._streams[caller.tenant])

    def open(self, tenant: str) -> int:
        """How many requests of a tenant are open."""
        return self._requests.get(tenant, Usage()).open

    def _enter(self, used: dict[str, Usage], caller: Caller, allowed: Limits) -> None:
        usage = limits.entered(allowed, used.get(caller.tenant, Usage()), self._clock())
        if isinstance(usage, Refusal):
            raise _over_limit(caller, usage)
        used[caller.tenant] = usage


def _key_in(headers: Mapping[str, str]) -> str | None:
    authorization = headers.get("authorization", "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return headers.get("x-api-key")


def _over_limit(caller: Caller, refused: Refusal) -> OverLimit:
    return OverLimit(
        f"tenant {caller.tenant!r} asks too much: {refused.why}",
        retry_after_s=refused.retry_after_ns / limits.SECOND_NS,
    )
