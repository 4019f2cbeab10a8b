"""Tariffs: the file that people write, and the history of those that have been set. Never changes what is past."""

import re
import time
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dormouse.billing.database import Database
from dormouse.billing.pricing import (
    DEFAULT_CURRENCY,
    DEFAULT_DEVICE_SECOND_NANOS,
    DEFAULT_IDLE_PPM,
    DEFAULT_PINNED_PPM,
    GIB,
    LARGEST_NANOS,
    NANOS,
    PPM,
    Tariff,
    Valid,
    shown,
)
from dormouse.core.types import Bytes, Ns
from dormouse.errors import ConfigurationFault

KEYS = ("currency", "device_second", "device_hour", "device_gib", "idle_percent", "pinned_percent", "valid_from")
LATEST_NS: Ns = 2**62
"""In 2116: times beyond are taken as this one, as SQLite has no room for those after 2262."""
_AMOUNT = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")


class Written(Struct, frozen=True):
    """A tariff as a file says it. What it leaves out stays as it is."""

    tariff: dict[str, Any]
    valid_from_ns: Ns | None
    """None: from now on."""


def parse_tariff(text: str, origin: str) -> Written:
    """Raises ConfigurationFault naming origin and line."""
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as fault:
        raise ConfigurationFault(f"{origin}: {fault}") from None
    given: dict[str, Any] = {}
    valid_from_ns = None
    for key, value in values.items():
        where = f"{origin}, line {_line_of(text, key)}: {key} = {value!r}"
        if key not in KEYS:
            raise ConfigurationFault(f"{where}: there is no such key; expected {', '.join(KEYS)}")
        if key == "valid_from":
            valid_from_ns = _moment(where, value)
        else:
            field, convert = _FIELDS[key]
            if field in given:
                raise ConfigurationFault(f"{where}: device_second and device_hour say the same; give one of them")
            given[field] = convert(where, value)
    return Written(given, valid_from_ns)


def read_tariff(file: Path) -> Written:
    """Raises ConfigurationFault."""
    try:
        return parse_tariff(file.read_text(), str(file))
    except OSError as fault:
        raise ConfigurationFault(f"tariff {file} cannot be read: {fault.strerror}") from None
    except UnicodeDecodeError as fault:
        line = fault.object[: fault.start].count(b"\n") + 1
        raise ConfigurationFault(f"{file}, line {line}: this is no text in UTF-8") from None


def _line_of(text: str, key: str) -> int:
    written = re.compile(rf"\s*[\[\"']*{re.escape(key)}[\]\"']*\s*(=|\.|\]|$)")
    return next((number for number, line in enumerate(text.splitlines(), 1) if written.match(line)), 1)


def _moment(where: str, value: object) -> Ns:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ConfigurationFault(f"{where} is no time; write one like 2026-12-01T00:00:00Z") from None
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ConfigurationFault(f"{where} is no time with a zone; write one like 2026-12-01T00:00:00Z")
    moment = moment_ns(value)
    if not 0 <= moment <= LATEST_NS:
        raise ConfigurationFault(f"{where} cannot be used; expected a time from 1970 to 2115")
    return moment


def parse_moment(key: str, text: str) -> Ns:
    """A time from the command line: a date, or a date and a time; in UTC unless it says otherwise."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationFault(f"{key} = {text!r} is no time; write 2026-12-01 or 2026-12-01T08:00:00Z") from None
    since_ns = moment_ns(moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC))
    return min(max(since_ns, 0), LATEST_NS)


def moment_ns(moment: datetime) -> Ns:
    """Since 1970, exactly to the microsecond."""
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1000


def _exact(where: str, value: object, unit: int, most: int) -> int:
    """A decimal number in whole parts of which ``unit`` make one, rounded down."""
    text = value if isinstance(value, str) else repr(value)
    if isinstance(value, bool) or _AMOUNT.fullmatch(text) is None:
        raise ConfigurationFault(f'{where} is no amount; write a number like "0.0012", with up to 12 places')
    parts = int(Decimal(text) * unit)
    if parts > most:
        raise ConfigurationFault(f"{where} is too much; the most is {most // unit}")
    return parts


def _currency(where: str, value: object) -> str:
    if not isinstance(value, str) or re.fullmatch(r"[A-Za-z]{1,12}", value) is None:
        raise ConfigurationFault(f"{where} is no currency; write a word like USD or EUR")
    return value


def _memory(where: str, value: object) -> Bytes:
    size_bytes = _exact(where, value, GIB, 2**20 * GIB)
    if size_bytes < 1:
        raise ConfigurationFault(f"{where}: a device has memory; write how many GiB")
    return size_bytes


_FIELDS: dict[str, tuple[str, Callable[[str, object], Any]]] = {
    "currency": ("currency", _currency),
    "device_second": ("device_second_nanos", lambda where, value: _exact(where, value, NANOS, LARGEST_NANOS)),
    "device_hour": (
        "device_second_nanos",
        lambda where, value: _exact(where, value, NANOS, 3600 * LARGEST_NANOS) // 3600,
    ),
    "device_gib": ("device_bytes", _memory),
    "idle_percent": ("idle_ppm", lambda where, value: _exact(where, value, PPM // 100, 1000 * PPM)),
    "pinned_percent": ("pinned_ppm", lambda where, value: _exact(where, value, PPM // 100, 1000 * PPM)),
}


# ------------------------------------------------------------------ history


def history(database: Database) -> list[Valid]:
    """Every tariff there has been and will be, oldest first."""
    rows = database.connection.execute("SELECT valid_from_ns, tariff FROM tariffs ORDER BY valid_from_ns")
    return [Valid(from_ns, msgspec.json.decode(text, type=Tariff)) for from_ns, text in rows]


def ensure_default(database: Database, device_bytes: Bytes) -> None:
    """The default holds from the beginning, where nobody has set anything yet. Raises StateNotKept."""
    if history(database):
        return
    tariff = Tariff(DEFAULT_CURRENCY, DEFAULT_DEVICE_SECOND_NANOS, device_bytes, DEFAULT_IDLE_PPM, DEFAULT_PINNED_PPM)
    _add(database, 0, 0, tariff)


def set_tariff(database: Database, written: Written, now_ns: Ns | None = None) -> Valid:
    """Let a tariff hold from now on, or from a moment to come. One that changes nothing is not written down again.

    Raises ConfigurationFault for a moment that is past, and for what cannot follow on the one before.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    from_ns = now_ns if written.valid_from_ns is None else written.valid_from_ns
    before = [valid for valid in history(database) if valid.from_ns <= from_ns]
    tariff = _following(written, before[-1].tariff if before else None)
    if before and before[-1].tariff == tariff:
        return before[-1]
    if from_ns < now_ns:
        raise ConfigurationFault(
            f"valid_from = {time_text(from_ns)} is past, and what is past is billed as it was; give a later one"
        )
    _add(database, from_ns, now_ns, tariff)
    return Valid(from_ns, tariff)


def _following(written: Written, before: Tariff | None) -> Tariff:
    if before is None:
        if "device_bytes" not in written.tariff:
            raise ConfigurationFault("device_gib is missing: nothing was ever served here that would tell it")
        before = Tariff(
            written.tariff.get("currency", DEFAULT_CURRENCY),
            DEFAULT_DEVICE_SECOND_NANOS,
            written.tariff["device_bytes"],
            DEFAULT_IDLE_PPM,
            DEFAULT_PINNED_PPM,
        )
    if written.tariff.get("currency", before.currency) != before.currency:
        raise ConfigurationFault(
            f"currency = {written.tariff['currency']!r}: this ledger is in {before.currency}, and sums of two "
            "currencies mean nothing"
        )
    return msgspec.structs.replace(before, **written.tariff)


def _add(database: Database, from_ns: Ns, now_ns: Ns, tariff: Tariff) -> None:
    row = (from_ns, now_ns, msgspec.json.encode(tariff).decode())
    with database.transaction() as connection:
        connection.execute("INSERT OR REPLACE INTO tariffs VALUES (?, ?, ?)", row)


def time_text(moment_ns: Ns) -> str:
    """A time for people, to the second and in UTC."""
    if moment_ns == 0:
        return "the beginning"
    return datetime.fromtimestamp(moment_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def tariff_lines(valid: Valid) -> list[str]:
    """A tariff for people."""
    tariff = valid.tariff
    price = tariff.device_second_nanos
    return [
        f"from {time_text(valid.from_ns)}:",
        f"  a device, computing   {shown(price)} {tariff.currency} a second ({shown(price * 3600)} an hour)",
        f"  its memory            {tariff.device_bytes / GIB:.3f} GiB",
        f"  host memory           {tariff.idle_ppm / 10_000:g} % of the same bytes of a device",
        f"  pinned to a device    {tariff.pinned_ppm / 10_000:g} %",
    ]
