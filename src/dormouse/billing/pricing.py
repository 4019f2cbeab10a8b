"""What things cost. Pure, and integers only: money is counted in nanos, billionths of the tariff's currency.

Rounding is down, always, and in two places only: each request by itself, and each interval by itself. What an interval
costs up to a moment is a function of that moment, and a part of it costs the difference: so parts add up to the whole
exactly, wherever it is cut by days, periods and tariffs.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from dormouse.core.types import Bytes, Ns

SECOND_NS: Ns = 1_000_000_000
PPM = 1_000_000
NANOS = 1_000_000_000
GIB: Bytes = 1024**3


class Tariff(Struct, frozen=True, forbid_unknown_fields=True):
    """Prices from one moment on."""

    currency: str
    device_second_nanos: int
    """One second of a whole device, computing."""
    device_bytes: Bytes
    """The memory of that device."""
    idle_ppm: int
    """A byte in host memory costs so much of what a byte of the device costs."""
    pinned_ppm: int
    """The same for a byte of a device that a pin keeps."""


class Valid(Struct, frozen=True):
    """A tariff and when it begins; it holds until the next one does."""

    from_ns: Ns
    tariff: Tariff


DEFAULT_CURRENCY = "USD"
DEFAULT_DEVICE_SECOND_NANOS = 1_000_000
"""0.001 a second, 3.60 an hour."""
DEFAULT_IDLE_PPM = 100_000
"""A tenth, as in the published pilot (Torpor, ATC'25)."""
DEFAULT_PINNED_PPM = 1_000_000
LARGEST_NANOS = 10**12
"""A thousand units a second: so what SQLite computes of a request stays within 64 bits."""


def request_nanos(device_ns: Ns, device_second_nanos: int) -> int:
    """What an answer costs whose part of a device's time is this. ``REQUEST_NANOS`` says the same in SQL."""
    return device_ns * device_second_nanos // SECOND_NS


REQUEST_NANOS = """(device_ns / 1000000000 * :price
    + device_ns % 1000000000 / 1000000 * :price / 1000
    + (device_ns % 1000000000 / 1000000 * :price % 1000 * 1000000 + device_ns % 1000000 * :price) / 1000000000)"""
"""Seconds, then milliseconds, then what is left of them: no product is larger than 2**63."""


def memory_nanos(size_bytes: Bytes, duration_ns: Ns, tariff: Tariff, share_ppm: int) -> int:
    """What it costs to hold so many bytes so long, at a share of what the device's memory costs."""
    numerator = size_bytes * duration_ns * tariff.device_second_nanos * share_ppm
    return numerator // (tariff.device_bytes * SECOND_NS * PPM)


class Held(Struct, frozen=True):
    """An interval in which a function takes memory."""

    size_bytes: Bytes
    began_ns: Ns
    ended_ns: Ns


def held_nanos(held: Held, tariffs: Sequence[Valid], kind_ppm: str, period: tuple[Ns, Ns]) -> int:
    """What an interval costs within a period. ``kind_ppm`` names the tariff's share; empty: all of the price."""
    since_ns, until_ns = max(period[0], held.began_ns), min(period[1], held.ended_ns)
    total = 0
    for from_ns, to_ns, tariff in spans(tariffs):
        first, begin, end = max(held.began_ns, from_ns), max(since_ns, from_ns), min(until_ns, to_ns)
        if begin < end:
            share_ppm: int = getattr(tariff, kind_ppm) if kind_ppm else PPM
            upto = memory_nanos(held.size_bytes, end - first, tariff, share_ppm)
            total += upto - memory_nanos(held.size_bytes, begin - first, tariff, share_ppm)
    return total


FOREVER_NS: Ns = 2**62


def spans(tariffs: Sequence[Valid]) -> Iterator[tuple[Ns, Ns, Tariff]]:
    """From when until when each one holds. The first also holds for all that was before it."""
    for place, valid in enumerate(tariffs):
        last = place + 1 == len(tariffs)
        yield valid.from_ns if place else 0, FOREVER_NS if last else tariffs[place + 1].from_ns, valid.tariff


def shown(nanos: int) -> str:
    """An amount for people, exactly."""
    return f"{nanos // NANOS}.{nanos % NANOS:09d}"
