"""How much a tenant may ask: decided from what is allowed, what was asked before, and the time. Pure.

A rate is a bucket of ``burst`` tokens that fills at ``rate``. It is kept as one number, the time at which it will be
full again, so that nothing is rounded and nothing has to be filled.
"""

import math

from msgspec import Struct

from dormouse.core.types import Ns

SECOND_NS: Ns = 1_000_000_000
CROWDED_NS: Ns = SECOND_NS
"""When to come again if too many requests are open: nobody knows when one of them will end."""
LARGEST_RATE = 1e6
LARGEST_COUNT = 10**6
SLOWEST_RATE = 1e-6


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """None: no limit."""

    rate: float | None = None
    """Requests a second, in the long run."""
    burst: int | None = None
    """So many at once, after a pause. None: what comes in a second, at least one."""
    concurrency: int | None = None
    """Requests open at once."""


class Usage(Struct, frozen=True):
    """What a tenant has used."""

    full_ns: Ns = 0
    """When its bucket is full again; past: it is."""
    open: int = 0


class Refusal(Struct, frozen=True):
    """Why not, and when it may be tried again."""

    why: str
    retry_after_ns: Ns


NO_LIMITS = Limits()


def complaint(limits: Limits) -> tuple[str, str] | None:
    """The first value that makes no sense, by name, and what would."""
    rules = (
        ("rate", limits.rate, SLOWEST_RATE, LARGEST_RATE, "requests a second"),
        ("burst", limits.burst, 1, LARGEST_COUNT, "requests"),
        ("concurrency", limits.concurrency, 1, LARGEST_COUNT, "requests open at once"),
    )
    for name, value, least, most, unit in rules:
        if value is not None and not least <= value <= most:  # which is so for what is not a number, too
            return name, f"{least:g} to {most:g} {unit}"
    return ("burst", "a rate beside it") if limits.burst is not None and limits.rate is None else None


def refusal(limits: Limits, usage: Usage, now_ns: Ns) -> Refusal | None:
    """Why a request that came now would be refused, if it would."""
    if limits.concurrency is not None and usage.open >= limits.concurrency:
        return Refusal(f"{usage.open} requests are open, the limit is {limits.concurrency}", CROWDED_NS)
    if limits.rate is not None:
        early_ns = usage.full_ns - _slack_ns(limits, limits.rate) - now_ns
        if early_ns > 0:
            return Refusal(f"the limit is {limits.rate:g} requests a second", early_ns)
    return None


def entered(limits: Limits, usage: Usage, now_ns: Ns) -> Usage | Refusal:
    """What is used after a request that comes now; who is refused has used nothing."""
    refused = refusal(limits, usage, now_ns)
    if refused is not None:
        return refused
    full_ns = usage.full_ns
    if limits.rate is not None:
        full_ns = max(full_ns, now_ns) + interval_ns(limits.rate)
    return Usage(full_ns, usage.open + 1)


def left(usage: Usage) -> Usage:
    """What is used after a request has ended."""
    assert usage.open > 0, "a request that never came has ended"
    return Usage(usage.full_ns, usage.open - 1)


def interval_ns(rate: float) -> Ns:
    """How long a token takes to come."""
    return max(1, round(SECOND_NS / rate))


def burst_of(limits: Limits) -> int:
    """How many tokens the bucket holds."""
    return limits.burst or max(1, math.ceil(limits.rate or 1))


def _slack_ns(limits: Limits, rate: float) -> Ns:
    """How far in the future the bucket may be full and still have a token."""
    return (burst_of(limits) - 1) * interval_ns(rate)
