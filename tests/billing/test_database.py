"""Entries come into SQLite once, whoever takes them in and whenever it is interrupted; and lives end when they end."""

import sqlite3
from pathlib import Path

import pytest

from dormouse.billing.database import Database
from dormouse.billing.entering import Entering
from dormouse.billing.records import DEPLOYED, HOST, Beat, Record, RequestVoided
from dormouse.billing.segments import file_of, numbers_in
from dormouse.billing.writer import LedgerWriter
from dormouse.errors import ConfigurationFault, StateNotKept
from tests.billing.books import BEGAN_NS, SECOND_NS, Books, answered, began, ended, known
from tests.node.nodes import full_disk


def numbers(books: Books) -> list[int]:
    return [int(str(row[0])) & 0xFFFFFFFF for row in books.rows("SELECT id FROM requests ORDER BY id")]


def test_what_was_taken_in_is_not_taken_in_again(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(), answered(1))
    books.database.take_in()
    Database(tmp_path).take_in()
    books.record(answered(2))
    assert numbers(books) == [1, 2]


def test_a_page_that_is_half_written_is_taken_in_when_it_is_whole(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(), answered(1))
    books.writer.enter([answered(2)])
    file = file_of(books.database.directory, numbers_in(books.database.directory)[-1])
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    books.database.take_in()
    assert numbers(books) == [1]
    file.write_bytes(whole)
    books.database.take_in()
    assert numbers(books) == [1, 2]


def test_entries_whose_transaction_was_interrupted_are_taken_in_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = Books(tmp_path)
    books.writer.enter([known(), answered(1), answered(2)])
    finish = Entering.finish

    def interrupted(entering: Entering) -> None:
        finish(entering)
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Entering, "finish", interrupted)
    with pytest.raises(StateNotKept, match="disk I/O error"):
        books.database.take_in()
    assert numbers(books) == []
    monkeypatch.setattr(Entering, "finish", finish)
    books.database.take_in()
    assert numbers(books) == [1, 2]


def test_segments_go_when_all_of_them_is_in_sqlite(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.writer.enter([known(), answered(1)])
    LedgerWriter(books.database.directory, books.life, "process").enter([answered(2)])
    books.database.take_in()
    assert numbers(books) == [1, 2]
    assert numbers_in(books.database.directory) == [2]


def test_a_full_disk_leaves_entries_in_their_segments(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.writer.enter([known(), *(answered(number) for number in range(1, 2000))])
    with full_disk(), pytest.raises(StateNotKept):
        books.database.take_in()
    books.database.take_in()
    assert len(numbers(books)) == 1999


def test_a_crash_ends_what_was_open_with_the_last_thing_recorded(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(), began(DEPLOYED, 0), began(HOST, 2), ended(HOST, 4), began(HOST, 6))
    books.record(Beat(BEGAN_NS + 10 * SECOND_NS))
    books.begin(BEGAN_NS + 100 * SECOND_NS)
    rows = books.rows("SELECT kind, ended_ns, why FROM intervals ORDER BY began_ns")
    times = [(kind, (int(str(at)) - BEGAN_NS) // SECOND_NS, why) for kind, at, why in rows]
    assert times == [(DEPLOYED, 10, "crashed"), (HOST, 4, ""), (HOST, 10, "crashed")]


def test_an_ordinary_end_ends_what_was_open_there(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(), began(HOST, 2), Beat(BEGAN_NS + 7 * SECOND_NS, last=True))
    books.begin(BEGAN_NS + 100 * SECOND_NS)
    assert books.rows("SELECT ended_ns, why FROM intervals") == [(BEGAN_NS + 7 * SECOND_NS, "stopped")]
    assert books.rows("SELECT ended FROM lives ORDER BY number") == [("stopped",), ("",)]


def test_time_goes_on_where_it_was_when_the_clock_was_set_back(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(Beat(BEGAN_NS + 50 * SECOND_NS))
    books.begin(BEGAN_NS - 1000 * SECOND_NS)
    assert books.began_ns == BEGAN_NS + 50 * SECOND_NS


def test_no_two_lives_have_the_same_number(tmp_path: Path) -> None:
    books = Books(tmp_path)
    seen = [books.life]
    for _ in range(3):
        books.begin()
        seen.append(books.life)
    assert seen == [1, 2, 3, 4]


def test_a_request_that_was_not_handed_out_after_all_is_not_charged(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(), answered(1), answered(2), RequestVoided(2, BEGAN_NS))
    statement = "SELECT text, in_time FROM requests JOIN names ON names.id = reason ORDER BY requests.id"
    assert books.rows(statement) == [("", 1), ("not_recorded", 0)]


def test_an_entry_that_comes_twice_is_refused_and_not_billed_twice(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(), answered(1))
    books.writer.enter([answered(1)])
    with pytest.raises(StateNotKept, match="UNIQUE"):
        books.database.take_in()
    assert numbers(books) == [1]


def test_pruning_forgets_what_ended_before_and_says_so(tmp_path: Path) -> None:
    books = Books(tmp_path)
    requests: list[Record] = [answered(number, at_s=number) for number in range(1, 11)]
    books.record(known(), began(HOST, 0), ended(HOST, 3), began(HOST, 4), *requests)
    assert books.database.prune(BEGAN_NS + 5 * SECOND_NS) == (4, 1)
    assert numbers(books) == [5, 6, 7, 8, 9, 10]
    assert books.rows("SELECT pruned_ns FROM progress") == [(BEGAN_NS + 5 * SECOND_NS,)]
    books.record(answered(11, at_s=11))
    assert len(numbers(books)) == 7


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"what is this" * 1000)
    with pytest.raises(
        ConfigurationFault, match=r"ledger\.sqlite cannot be used as the ledger: file is not a database"
    ):
        Database(tmp_path)


def test_a_ledger_of_another_version_is_left_alone(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.connection.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigurationFault, match="has schema 99, this version reads 1"):
        Database(tmp_path)
