"""Tariffs: what a file may say, where it is wrong, and that the past stays as it was billed."""

from pathlib import Path

import pytest

from dormouse.billing.database import Database
from dormouse.billing.pricing import GIB, Tariff, Valid
from dormouse.billing.tariffs import (
    LATEST_NS,
    ensure_default,
    history,
    parse_moment,
    parse_tariff,
    read_tariff,
    set_tariff,
    tariff_lines,
)
from dormouse.errors import ConfigurationFault

NOW_NS = 1_800_000_000_000_000_000


def test_a_file_says_prices_exactly() -> None:
    written = parse_tariff('device_hour = "3.60"\nidle_percent = 12.5\ndevice_gib = 80\n', "t.toml")
    assert written.tariff == {"device_second_nanos": 1_000_000, "idle_ppm": 125_000, "device_bytes": 80 * GIB}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("device_second = 1\nidle_prozent = 10\n", r"t\.toml, line 2: idle_prozent = 10: there is no such key"),
        ("\n# a price\ndevice_second = -1\n", r"t\.toml, line 3: device_second = -1 is no amount"),
        ("device_second = true\n", r"line 1: device_second = True is no amount"),
        ("device_second = nan\n", r"line 1: device_second = nan is no amount"),
        ("device_second = 1001\n", r"line 1: device_second = 1001 is too much; the most is 1000"),
        (
            "device_second = 1\ndevice_hour = 1\n",
            r"line 2: device_hour = 1: device_second and device_hour say the same",
        ),
        ('currency = "US Dollar"\n', r"line 1: currency = 'US Dollar' is no currency"),
        ("device_gib = 0\n", r"line 1: device_gib = 0: a device has memory"),
        ('valid_from = "soon"\n', r"line 1: valid_from = 'soon' is no time"),
        ("valid_from = 2026-12-01\n", r"line 1: valid_from = .* is no time with a zone"),
        ("valid_from = 2500-01-01T00:00:00Z\n", r"line 1: valid_from = .* expected a time from 1970 to 2115"),
        ("valid_from = 0001-01-01T00:00:00+10:00\n", r"line 1: valid_from = .* expected a time from 1970 to 2115"),
        ("idle_percent = " + "[" * 5000, r"t\.toml: maximum recursion depth"),
        ("idle_percent = [10]\n", r"line 1: idle_percent = \[10\] is no amount"),
        ("[idle_percent]\nx = 1\n", r"line 1: idle_percent = .* is no amount"),
        ("device_second =\n", r"t\.toml: Invalid value \(at line 1, column 16\)"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationFault, match=complaint):
        parse_tariff(text, "t.toml")


def test_a_file_that_is_no_text_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_bytes(b"device_second = 1\n\xff\n")
    with pytest.raises(ConfigurationFault, match="line 2: this is no text"):
        read_tariff(tmp_path / "t.toml")


def test_the_default_holds_from_the_beginning_and_charges_a_tenth_for_host_memory(tmp_path: Path) -> None:
    database = Database(tmp_path)
    ensure_default(database, 64)
    ensure_default(database, 128)
    assert history(database) == [Valid(0, Tariff("USD", 1_000_000, 64, 100_000, 1_000_000))]


def test_what_a_file_leaves_out_stays_as_it_is(tmp_path: Path) -> None:
    database = Database(tmp_path)
    ensure_default(database, 64)
    set_tariff(database, parse_tariff("idle_percent = 5", ""), NOW_NS)
    assert history(database)[1] == Valid(NOW_NS, Tariff("USD", 1_000_000, 64, 50_000, 1_000_000))


def test_a_tariff_that_changes_nothing_is_not_written_again(tmp_path: Path) -> None:
    database = Database(tmp_path)
    ensure_default(database, 64)
    for later in range(3):
        set_tariff(database, parse_tariff("idle_percent = 5", ""), NOW_NS + later)
    assert [valid.from_ns for valid in history(database)] == [0, NOW_NS]


def test_the_past_is_not_billed_anew(tmp_path: Path) -> None:
    database = Database(tmp_path)
    ensure_default(database, 64)
    with pytest.raises(ConfigurationFault, match="is past, and what is past is billed as it was"):
        set_tariff(database, parse_tariff("idle_percent = 5\nvalid_from = 2026-12-01T00:00:00Z", ""), NOW_NS)
    assert len(history(database)) == 1


def test_a_tariff_may_be_set_for_a_moment_to_come(tmp_path: Path) -> None:
    database = Database(tmp_path)
    ensure_default(database, 64)
    set_tariff(database, parse_tariff("idle_percent = 5\nvalid_from = 2030-01-01T00:00:00+01:00", ""), NOW_NS)
    assert tariff_lines(history(database)[1])[0] == "from 2029-12-31T23:00:00Z:"


def test_one_ledger_has_one_currency(tmp_path: Path) -> None:
    database = Database(tmp_path)
    ensure_default(database, 64)
    with pytest.raises(ConfigurationFault, match="this ledger is in USD"):
        set_tariff(database, parse_tariff('currency = "EUR"', ""), NOW_NS)


def test_before_anything_was_served_a_tariff_must_say_what_a_device_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationFault, match="device_gib is missing"):
        set_tariff(Database(tmp_path), parse_tariff('currency = "EUR"', ""), NOW_NS)
    valid = set_tariff(Database(tmp_path), parse_tariff('currency = "EUR"\ndevice_gib = 1', ""), NOW_NS)
    assert valid.tariff == Tariff("EUR", 1_000_000, GIB, 100_000, 1_000_000)


@pytest.mark.parametrize("text", ["yesterday", "2026-13-01", ""])
def test_a_moment_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationFault, match="is no time"):
        parse_moment("since", text)


def test_moments_are_utc_unless_they_say_otherwise() -> None:
    assert parse_moment("since", "1970-01-02") == 86_400 * 10**9
    assert parse_moment("since", "1970-01-02T00:00:00+01:00") == 82_800 * 10**9


@pytest.mark.parametrize(
    ("text", "moment_ns"), [("9999-12-31", LATEST_NS), ("2300-01-01", LATEST_NS), ("0001-01-01T00:00:00+10:00", 0)]
)
def test_moments_that_no_ledger_reaches_are_the_nearest_that_one_could(text: str, moment_ns: int) -> None:
    assert parse_moment("until", text) == moment_ns
