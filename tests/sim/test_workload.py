"""Streams of requests: in order, as many as asked for, of the shape that was asked for, the same for the same seed."""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable

import pytest

from dormouse import workload
from dormouse.workload import MINUTE_NS, SECOND_NS, Arrivals, Window

HOUR_NS = 60 * MINUTE_NS
RATES = [0.5, 1.5, 0.0, 2.0]

STREAMS: dict[str, Callable[[int], Arrivals]] = {
    "poisson": lambda seed: workload.poisson(RATES, HOUR_NS, seed),
    "gamma": lambda seed: workload.gamma(RATES, 3.0, HOUR_NS, seed),
    "bursts": lambda seed: workload.bursts(RATES, HOUR_NS, seed, factor=10, share=0.1, mean_burst_ns=2 * SECOND_NS),
    "windows": lambda seed: workload.windows(
        [[Window(rate, 0.7, weibull=False)] * 6 for rate in RATES], 600 * SECOND_NS, HOUR_NS, seed
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_in_order_and_of_the_rate_it_was_asked_for(name: str) -> None:
    stream = list(STREAMS[name](3))
    assert [at for at, _ in stream] == sorted(at for at, _ in stream)
    assert all(0 <= at <= HOUR_NS for at, _ in stream)
    counts = Counter(number for _, number in stream)
    assert counts[2] == 0
    assert len(stream) == pytest.approx(4 * 3600, rel=0.1)
    if name != "bursts":
        assert counts[0] == pytest.approx(0.5 * 3600, rel=0.2)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_a_function_of_its_seed(name: str) -> None:
    assert list(itertools.islice(STREAMS[name](3), 500)) == list(itertools.islice(STREAMS[name](3), 500))
    assert list(itertools.islice(STREAMS[name](3), 500)) != list(itertools.islice(STREAMS[name](4), 500))


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_gaps_vary_as_much_as_they_should(cv: float) -> None:
    times = [at for at, _ in workload.gamma([10.0], cv, HOUR_NS, 1)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1)


def test_calls_per_minute_come_in_their_minutes_and_shares() -> None:
    counts = [[300, 0, 30], [100, 0, 90]]
    stream = list(workload.per_minute(counts, 7))
    minutes = Counter(at // MINUTE_NS for at, _ in stream)
    assert minutes[1] == 0
    assert minutes[0] == pytest.approx(400, rel=0.1)
    assert minutes[2] == pytest.approx(120, rel=0.15)
    first = Counter(number for at, number in stream if at < MINUTE_NS)
    assert first[0] / first[1] == pytest.approx(3, rel=0.3)
    assert all(at % 1_000_000 == 0 for at, _ in stream), "gaps are whole milliseconds"


def test_weibull_and_gamma_windows_change_their_rate() -> None:
    windows = [Window(1.0, 0.6, weibull=True), Window(10.0, 0.6, weibull=True), Window(0.0, 1.0, weibull=False)]
    stream = list(workload.windows([windows], 600 * SECOND_NS, 30 * MINUTE_NS, 2))
    found = Counter(at // (600 * SECOND_NS) for at, _ in stream)
    assert found[1] == pytest.approx(6000, rel=0.15)
    assert found[0] == pytest.approx(600, rel=0.3)
    assert found[2] <= 1


def test_bursts_are_busier_than_the_quiet_between_them() -> None:
    stream = list(STREAMS["bursts"](3))
    per_second = Counter(at // SECOND_NS for at, _ in stream)
    seconds = sorted(per_second[second] for second in range(3600))
    assert seconds[-36] > 4 * statistics.mean(seconds), "one second in a hundred is far busier than the mean"


def test_skewed_rates_sum_up_and_are_dealt_by_seed() -> None:
    rates = workload.skewed(100, 50.0, 1.0, 1)
    assert sum(rates) == pytest.approx(50.0)
    assert max(rates) / min(rates) == pytest.approx(100)
    assert rates != workload.skewed(100, 50.0, 1.0, 2)


def test_timers_ask_once_a_period_and_the_others_at_random() -> None:
    timers = workload.Timers(30.0, 60.0, 0.1)
    stream = list(workload.timers_among_others(10, 1.0, 1.0, HOUR_NS, 5, share=0.5, timers=timers))
    assert [at for at, _ in stream] == sorted(at for at, _ in stream)
    steady = 0
    for number in range(10):
        times = [at for at, asked in stream if asked == number]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        steady += statistics.stdev(gaps) < 0.2 * statistics.mean(gaps)
    assert steady == 5


def test_a_timer_keeps_its_period() -> None:
    times = [at for at, _ in workload.periodic([0.0, 10.0], 0.2, HOUR_NS, 1)]
    assert len(times) == pytest.approx(360, abs=1)
    assert all(abs((at - times[0] + 5 * SECOND_NS) % (10 * SECOND_NS) - 5 * SECOND_NS) <= 4 * SECOND_NS for at in times)
