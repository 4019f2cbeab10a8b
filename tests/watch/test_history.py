"""Points of histories: what a ledger has counted since the last one."""

from dormouse.core.ledger import Ledger
from dormouse.core.types import Path, Reason
from dormouse.watch.history import BUCKET_NS, POINTS, History
from dormouse.watch.picture import Point

MS = 1_000_000


def answered(ledger: Ledger, *latencies_ms: int, path: Path = Path.RESIDENT, in_time: bool = True) -> None:
    for latency_ms in latencies_ms:
        ledger.answered(path, latency_ms * MS, MS, in_time=in_time)


def test_a_point_is_of_what_has_come_since_the_last_one_by_whatever_path() -> None:
    history, ledger = History(), Ledger()
    answered(ledger, *[1000] * 50)
    history.take([("f", ledger)])
    answered(ledger, *[10] * 49)
    answered(ledger, 20, path=Path.HOST, in_time=False)
    history.take([("f", ledger)])
    first, second = history.of("f")
    assert first is not None and second is not None
    assert (first.answers, first.requests, first.in_time) == (50, 50, 50)
    assert (second.answers, second.requests, second.in_time) == (50, 50, 49)
    assert 10 <= second.p98_ms < 11, "the fiftieth is beyond the 98th percentile, what came before is not in it"


def test_a_function_that_nobody_asks_has_no_points_and_one_that_refuses_has() -> None:
    history, ledger = History(), Ledger()
    history.take([("f", ledger)])
    ledger.refused(Reason.TIMEOUT)
    history.take([("f", ledger)])
    assert history.of("f") == (None, Point(0, 0, 1, 0))
    assert history.of("unknown") == ()


def test_a_history_reaches_back_so_far_and_no_further() -> None:
    history, ledger = History(), Ledger()
    for number in range(POINTS + 5):
        answered(ledger, *[5] * (number + 1))
        history.take([("f", ledger)])
    points = history.of("f")
    assert len(points) == POINTS
    assert [point.requests for point in points if point is not None] == list(range(6, POINTS + 6))
    assert history.bucket == POINTS + 5


def test_one_that_comes_later_has_fewer_and_one_that_goes_is_forgotten() -> None:
    history, ledger = History(), Ledger()
    history.take([("old", ledger)])
    history.take([("old", ledger), ("new", ledger)])
    assert (len(history.of("old")), len(history.of("new"))) == (2, 1)
    history.take([("new", ledger)])
    assert history.of("old") == ()


def test_another_revision_under_the_name_begins_from_nothing() -> None:
    history, first, second = History(), Ledger(), Ledger()
    answered(first, *[5] * 10)
    history.take([("f", first)])
    answered(second, 7, 7)
    history.take([("f", second)])
    last = history.of("f")[-1]
    assert last is not None and (last.requests, last.answers) == (2, 2)


def test_a_rate_is_of_the_last_points_only() -> None:
    history, ledger = History(), Ledger()
    assert history.rate_per_s("f") == 0
    answered(ledger, *[5] * 1000)
    history.take([("f", ledger)])
    assert history.rate_per_s("f") == 1000 * 1e9 / BUCKET_NS
    for _ in range(2):
        answered(ledger, *[5] * 50)
        history.take([("f", ledger)])
    assert history.rate_per_s("f") == 50 * 1e9 / BUCKET_NS
