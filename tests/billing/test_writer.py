"""The writer: what must not be handed out is known at once, and nothing that was noted is lost."""

from pathlib import Path

from dormouse.billing.bills import Question, items
from dormouse.billing.records import HOST, Beat
from dormouse.billing.writer import MOST_WAITING
from tests.billing.books import BEGAN_NS, Books, answered, began, known
from tests.node.nodes import full_disk


def test_an_answer_that_cannot_be_recorded_is_kept_as_one_that_was_not_given(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known())
    with full_disk():
        fault = books.writer.enter([answered(1), answered(2, reason="timeout")])
    assert fault is not None and fault.status == 507
    assert "File too large" in fault.message and "as soon as the disk has room" in fault.message
    assert books.writer.flush() is None
    books.record(answered(3))
    reasons = {item.request: (item.reason, item.nanos) for item in items(books.database, Question())}
    assert reasons == {"1-1": ("not_recorded", 0), "1-2": ("timeout", 0), "1-3": ("", 1_000)}


def test_what_happened_while_the_disk_was_full_is_recorded_in_order(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known())
    with full_disk():
        books.writer.note([began(HOST, 1)])
        for second in range(3):
            books.writer.beat(BEGAN_NS + second)
        assert books.writer.fault is not None
    assert books.writer.flush() is None
    books.database.take_in()
    assert books.rows("SELECT kind, ended_ns FROM intervals") == [(HOST, None)]


def test_many_records_that_nobody_waits_for_are_written_all_the_same(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.writer.note([Beat(BEGAN_NS)] * MOST_WAITING)
    assert books.writer.written_bytes > MOST_WAITING
