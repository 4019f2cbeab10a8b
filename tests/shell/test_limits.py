"""What a tenant may ask: the rules hold for every history of requests, made up by hypothesis."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.tenants.limits import (
    CROWDED_NS,
    LARGEST_RATE,
    NO_LIMITS,
    SLOWEST_RATE,
    Limits,
    Refusal,
    Usage,
    burst_of,
    complaint,
    entered,
    interval_ns,
    left,
    refusal,
)

rates = st.floats(SLOWEST_RATE, LARGEST_RATE) | st.sampled_from([0.5, 1.0, 3.0, 50.0])
bursts = st.none() | st.integers(1, 20)
pauses = st.lists(st.integers(0, 3 * 10**9) | st.integers(0, 1000), min_size=1, max_size=60)


@given(rates, bursts, pauses)
def test_no_stretch_of_time_has_more_requests_than_burst_and_rate_allow(
    rate: float, burst: int | None, pauses: list[int]
) -> None:
    limits, usage, now, came = Limits(rate, burst), Usage(), 0, []
    for pause in pauses:
        now += pause
        after = entered(limits, usage, now)
        if isinstance(after, Usage):
            usage = left(after)
            came.append(now)
    for first, start in enumerate(came):
        for count, end in enumerate(came[first:], 1):
            assert count <= burst_of(limits) + (end - start) // interval_ns(rate)


@given(rates, bursts, pauses)
def test_who_comes_when_told_to_is_let_in(rate: float, burst: int | None, pauses: list[int]) -> None:
    limits, usage, now = Limits(rate, burst), Usage(), 0
    for pause in pauses:
        now += pause
        after = entered(limits, usage, now)
        if isinstance(after, Refusal):
            assert after.retry_after_ns > 0
            early = entered(limits, usage, now + after.retry_after_ns - 1)
            assert isinstance(early, Refusal), "it was told to wait for longer than it had to"
            now += after.retry_after_ns
            after = entered(limits, usage, now)
        assert isinstance(after, Usage)
        usage = left(after)


@given(rates, bursts, st.integers(1, 200))
def test_who_keeps_the_pace_is_never_refused(rate: float, burst: int | None, requests: int) -> None:
    limits, usage = Limits(rate, burst), Usage()
    for number in range(requests):
        after = entered(limits, usage, number * interval_ns(rate))
        assert isinstance(after, Usage)
        usage = left(after)


@given(rates, st.integers(1, 20))
def test_after_a_pause_a_whole_burst_is_let_in_and_no_more(rate: float, burst: int) -> None:
    limits, usage, now = Limits(rate, burst), Usage(), 10**18
    for _ in range(burst):
        after = entered(limits, usage, now)
        assert isinstance(after, Usage)
        usage = left(after)
    assert isinstance(entered(limits, usage, now), Refusal)


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=80))
def test_never_more_are_open_than_may_be(most: int, comings_and_goings: list[bool]) -> None:
    limits, usage, open_ones = Limits(concurrency=most), Usage(), 0
    for comes in comings_and_goings:
        if comes:
            after = entered(limits, usage, 0)
            assert isinstance(after, Usage) == (open_ones < most)
            if isinstance(after, Usage):
                usage, open_ones = after, open_ones + 1
            else:
                assert after.retry_after_ns == CROWDED_NS
        elif open_ones:
            usage, open_ones = left(usage), open_ones - 1
        assert usage.open == open_ones <= most


limits_of_all_kinds = st.builds(Limits, rates, bursts, st.none() | st.integers(1, 3))
usages = st.builds(Usage, st.integers(0, 10**10), st.integers(0, 3))


@given(limits_of_all_kinds, usages, st.integers(0, 10**10))
def test_a_look_says_what_entering_would(limits: Limits, usage: Usage, now: int) -> None:
    seen, after = refusal(limits, usage, now), entered(limits, usage, now)
    assert after == seen if isinstance(after, Refusal) else seen is None


def test_a_request_refused_for_the_crowd_has_used_no_token() -> None:
    limits = Limits(rate=1, burst=2, concurrency=1)
    usage = entered(limits, Usage(), 0)
    assert isinstance(usage, Usage)
    for _ in range(10):
        assert isinstance(entered(limits, usage, 0), Refusal)
    assert isinstance(entered(limits, left(usage), 0), Usage)


def test_without_limits_anything_goes() -> None:
    usage: Usage | Refusal = Usage()
    for count in range(1, 1000):
        assert isinstance(usage, Usage)
        usage = entered(NO_LIMITS, usage, 0)
        assert usage == Usage(0, count)


@pytest.mark.parametrize(("rate", "burst"), [(0.1, 1), (1.0, 1), (2.5, 3), (50.0, 50)])
def test_a_burst_that_is_not_said_is_what_comes_in_a_second(rate: float, burst: int) -> None:
    assert burst_of(Limits(rate)) == burst


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (Limits(rate=0), "rate"),
        (Limits(rate=-1), "rate"),
        (Limits(rate=float("nan")), "rate"),
        (Limits(rate=float("inf")), "rate"),
        (Limits(rate=1, burst=0), "burst"),
        (Limits(burst=5), "burst"),
        (Limits(concurrency=0), "concurrency"),
        (Limits(concurrency=10**7), "concurrency"),
    ],
)
def test_limits_that_make_no_sense_are_named(limits: Limits, name: str) -> None:
    found = complaint(limits)
    assert found is not None
    assert found[0] == name


def test_limits_that_make_sense_are_fine() -> None:
    assert complaint(NO_LIMITS) is None
    assert complaint(Limits(0.5, 3, 1)) is None
