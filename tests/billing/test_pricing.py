"""Prices: the same in Python and in SQL, never rounded up, and the parts add up to the whole."""

import itertools
import sqlite3

from hypothesis import given
from hypothesis import strategies as st

from dormouse.billing.pricing import (
    FOREVER_NS,
    LARGEST_NANOS,
    PPM,
    REQUEST_NANOS,
    SECOND_NS,
    Held,
    Tariff,
    Valid,
    held_nanos,
    memory_nanos,
    request_nanos,
    shown,
    spans,
)

PRICES = st.integers(0, LARGEST_NANOS)
MOMENTS = st.integers(0, 10**15)
TARIFFS = st.builds(
    Tariff,
    st.just("USD"),
    PRICES,
    st.integers(1, 2**40),
    st.integers(0, 10 * PPM),
    st.integers(0, 10 * PPM),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Valid]:
    moments = sorted(draw(st.sets(MOMENTS, max_size=4)))
    return [Valid(moment, draw(TARIFFS)) for moment in [0, *(moment for moment in moments if moment)]]


HELD = st.builds(
    lambda size, begin, length: Held(size, begin, begin + length),
    st.integers(0, 2**45),
    MOMENTS,
    st.integers(0, 10**15),
)


@given(st.integers(0, 10**6 * SECOND_NS), PRICES)
def test_sql_says_what_python_says(device_ns: int, price: int) -> None:
    (nanos,) = (
        sqlite3.connect(":memory:")
        .execute(f"SELECT {REQUEST_NANOS} FROM (SELECT :ns AS device_ns)", {"ns": device_ns, "price": price})
        .fetchone()
    )
    assert nanos == request_nanos(device_ns, price)


@given(st.integers(0, 10**15), PRICES)
def test_a_request_is_never_rounded_up_and_by_less_than_a_nano_down(device_ns: int, price: int) -> None:
    nanos = request_nanos(device_ns, price)
    assert nanos * SECOND_NS <= device_ns * price < (nanos + 1) * SECOND_NS


@given(HELD, histories(), st.lists(MOMENTS, min_size=3, max_size=6))
def test_periods_that_follow_on_each_other_cost_what_the_whole_does(
    held: Held, tariffs: list[Valid], moments: list[int]
) -> None:
    cuts = sorted(moments)
    parts = [held_nanos(held, tariffs, "idle_ppm", period) for period in itertools.pairwise(cuts)]
    assert sum(parts) == held_nanos(held, tariffs, "idle_ppm", (cuts[0], cuts[-1]))


@given(HELD, histories(), MOMENTS)
def test_an_interval_that_goes_on_never_changes_what_it_has_cost_so_far(
    held: Held, tariffs: list[Valid], until: int
) -> None:
    longer = Held(held.size_bytes, held.began_ns, held.ended_ns + 12_345_678_901)
    period = (0, min(until, held.ended_ns))
    assert held_nanos(held, tariffs, "idle_ppm", period) == held_nanos(longer, tariffs, "idle_ppm", period)


def test_a_tariff_that_changes_within_an_interval_splits_it() -> None:
    cheap, dear = Tariff("USD", 1_000, 100, PPM // 10, PPM), Tariff("USD", 5_000, 100, PPM // 10, PPM)
    tariffs = [Valid(0, cheap), Valid(10 * SECOND_NS, dear)]
    held = Held(100, 4 * SECOND_NS, 12 * SECOND_NS)
    assert held_nanos(held, tariffs, "idle_ppm", (0, FOREVER_NS)) == 6 * 100 + 2 * 500


def test_the_first_tariff_holds_for_what_was_before_it() -> None:
    tariff = Tariff("USD", 1_000, 100, PPM // 10, PPM)
    assert list(spans([Valid(50, tariff), Valid(70, tariff)])) == [(0, 70, tariff), (70, FOREVER_NS, tariff)]


def test_memory_of_a_whole_device_costs_what_the_device_does() -> None:
    assert memory_nanos(100, SECOND_NS, Tariff("USD", 777, 100, 0, 0), PPM) == 777


def test_amounts_are_shown_exactly() -> None:
    assert shown(1_234_000_000_001) == "1234.000000001"
