"""Histograms as Prometheus gets them: exact at every edge, whatever was counted."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.ledger import Histogram, bucket_of, lower_edge
from dormouse.metrics.edges import EDGES, SECONDS, counted, cumulated

AT_AN_EDGE = st.builds(lambda edge, beside: edge + beside, st.sampled_from(EDGES), st.integers(-1, 1))
DURATIONS = st.lists(st.one_of(AT_AN_EDGE, st.integers(0, 2**50)), max_size=60)


def histogram_of(durations: list[int]) -> Histogram:
    histogram = Histogram()
    for duration in durations:
        histogram.add(duration)
    return histogram


@given(DURATIONS)
def test_what_is_counted_at_an_edge_is_exactly_what_was_not_longer(durations: list[int]) -> None:
    counts = cumulated(histogram_of(durations))
    assert counts[:-1] == [sum(duration <= edge for duration in durations) for edge in EDGES]
    assert counts[-1] == len(durations)


@given(DURATIONS, DURATIONS)
def test_what_others_had_is_taken_out_exactly(own: list[int], others: list[int]) -> None:
    everybodys, theirs = histogram_of(own + others), histogram_of(others)
    assert cumulated(everybodys, theirs) == cumulated(histogram_of(own))


def test_every_edge_ends_a_bucket_of_the_core() -> None:
    for edge in EDGES:
        assert lower_edge(bucket_of(edge + 1)) == edge + 1
        assert bucket_of(edge) < bucket_of(edge + 1)


def test_an_edge_is_written_in_seconds_to_the_last_nanosecond() -> None:
    assert [Fraction(text) * 10**9 for text in SECONDS[:-1]] == list(EDGES)
    assert SECONDS[-1] == "+Inf"


def test_what_is_longer_than_every_edge_is_in_the_last_bucket() -> None:
    assert counted(histogram_of([2**50]))[-1] == 1
