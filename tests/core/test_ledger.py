"""Accounts: histograms within a bucket of the truth, compliance as defined."""

from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.ledger import Histogram, Ledger
from dormouse.core.types import Path, Reason, Slo


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=50), st.integers(1, 1_000_000))
def test_a_percentile_is_at_most_a_sixteenth_above_the_exact_one(durations: list[int], share_ppm: int) -> None:
    histogram = Histogram()
    for duration in durations:
        histogram.add(duration)
    exact = sorted(durations)[-(-len(durations) * share_ppm // 1_000_000) - 1]
    assert exact <= histogram.percentile(share_ppm) <= exact + exact // 16
    assert histogram.total_ns == sum(durations)


def test_an_empty_histogram_has_no_percentile() -> None:
    assert Histogram().percentile(500_000) == 0


def test_a_function_is_compliant_while_the_promised_share_is_in_time() -> None:
    ledger, slo = Ledger(), Slo(deadline_ns=10, share_ppm=980_000)
    assert ledger.compliant(slo), "nobody has asked yet"
    for _ in range(49):
        ledger.answered(Path.HOST, 5, 1, in_time=True)
    ledger.answered(Path.HOST, 15, 1, in_time=False)
    assert ledger.compliant(slo), "49 of 50 are 98 %"
    ledger.refused(Reason.TIMEOUT)
    assert not ledger.compliant(slo), "a refusal is a miss"
    assert (ledger.requests, ledger.refusals[Reason.TIMEOUT]) == (51, 1)


def test_the_mean_device_time_counts_answers_only() -> None:
    ledger = Ledger()
    assert ledger.mean_device_ns() == 0
    ledger.answered(Path.HOST, 5, 10, in_time=True)
    ledger.answered(Path.RESIDENT, 5, 20, in_time=True)
    ledger.refused(Reason.QUEUE_FULL)
    assert ledger.mean_device_ns() == 15


def test_loads_and_evictions_are_counted_by_bytes_and_time() -> None:
    ledger = Ledger()
    ledger.loaded(Path.HOST, 100)
    ledger.evicted(7)
    assert (ledger.loads[Path.HOST], ledger.loaded_bytes, ledger.evictions, ledger.resident_ns) == (1, 100, 1, 7)


def test_a_percentile_passes_over_the_buckets_below_it() -> None:
    histogram = Histogram()
    for duration in (1, 2, 3, 30):
        histogram.add(duration)
    assert (histogram.percentile(250_000), histogram.percentile(1_000_000)) == (1, 30)


@given(st.lists(st.integers(0, 2**50)), st.lists(st.integers(0, 2**50)))
def test_merged_histograms_are_those_of_all_durations(one: list[int], other: list[int]) -> None:
    together, apart, more = Histogram(), Histogram(), Histogram()
    for duration in one + other:
        together.add(duration)
    for duration in one:
        apart.add(duration)
    for duration in other:
        more.add(duration)
    apart.merge(more)
    assert (apart.buckets, apart.count, apart.total_ns) == (together.buckets, together.count, together.total_ns)


def test_refusals_say_how_long_their_requests_had_waited() -> None:
    ledger = Ledger()
    ledger.refused(Reason.TIMEOUT, 40)
    ledger.refused(Reason.QUEUE_FULL)
    assert (ledger.refused_ns, ledger.refusals.total()) == (40, 2)


def test_merged_ledgers_are_one_of_all_that_was_booked() -> None:
    one, other, both = Ledger(), Ledger(), Ledger()
    for ledger in (one, both):
        ledger.answered(Path.HOST, 5, 1, in_time=True)
        ledger.loaded(Path.HOST, 100)
        ledger.last_answer_ns = 7
    for ledger in (other, both):
        ledger.answered(Path.HOST, 9, 2, in_time=False)
        ledger.answered(Path.RESIDENT, 3, 2, in_time=True)
        ledger.refused(Reason.TIMEOUT, 4, "globex")
        ledger.evicted(50)
        ledger.read(11)
        ledger.last_answer_ns = 9
    one.merge(Ledger())
    assert one.last_answer_ns == 7
    one.merge(other)
    for name in ("in_time", "missed", "loads", "refusals", "evictions", "resident_ns", "device_ns", "read_bytes"):
        assert getattr(one, name) == getattr(both, name), name
    assert one.guests["globex"] == both.guests["globex"]
    assert (one.refused_ns, one.loaded_bytes, one.last_answer_ns) == (4, 100, 9)
    assert {path: h.buckets for path, h in one.latency.items()} == {p: h.buckets for p, h in both.latency.items()}
