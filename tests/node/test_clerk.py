"""The process that works on the ledger's SQLite: what it does, and what becomes of entries when it does not."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dormouse.billing.bills import By, Question, make_bill
from dormouse.billing.clerk import BillSince, Done, NotDone, TakeIn, decode_answer, encode
from dormouse.billing.records import Beat
from dormouse.control.clerk import Clerk
from dormouse.errors import StateNotKept
from tests.billing.books import BEGAN_NS, SECOND_NS, Books, answered, known
from tests.node.nodes import run


def numbers(books: Books) -> list[object]:
    return [number for (number,) in books.rows("SELECT id & 0xffff FROM requests ORDER BY id")]


def test_it_takes_entries_in_and_makes_the_bill_that_anybody_else_would(tmp_path: Path) -> None:
    books = Books(tmp_path)

    async def work() -> None:
        clerk = Clerk(tmp_path)
        books.writer.enter([known(), answered(1), answered(2), Beat(BEGAN_NS + 9 * SECOND_NS)])
        await clerk.take_in()
        assert numbers(books) == [1, 2]
        books.writer.enter([answered(3), Beat(BEGAN_NS + 10 * SECOND_NS)])
        bill = await clerk.bill_since(BEGAN_NS)
        question = Question(BEGAN_NS, BEGAN_NS + 10 * SECOND_NS, by=By.FUNCTION)
        assert bill == make_bill(books.database, question)
        assert bill.total.requests == 3
        await clerk.close()

    run(work())


def test_those_who_ask_at_the_same_time_get_an_answer_each(tmp_path: Path) -> None:
    books = Books(tmp_path)

    async def work() -> None:
        clerk = Clerk(tmp_path)
        books.writer.enter([known(), answered(1), Beat(BEGAN_NS + 9 * SECOND_NS)])
        whole, nothing, _ = await asyncio.gather(
            clerk.bill_since(BEGAN_NS), clerk.bill_since(BEGAN_NS + 9 * SECOND_NS), clerk.take_in()
        )
        assert (whole.total.requests, nothing.total.requests) == (1, 0)
        await clerk.close()

    run(work())


def test_when_it_dies_nothing_is_lost_and_it_is_started_again(tmp_path: Path) -> None:
    books = Books(tmp_path)

    async def work() -> None:
        clerk = Clerk(tmp_path)
        await clerk.take_in()
        assert clerk.pid is not None
        os.kill(clerk.pid, signal.SIGKILL)
        books.writer.enter([known(), answered(1)])
        with pytest.raises(StateNotKept, match="has ended"):
            await clerk.take_in()
        assert numbers(books) == []
        await clerk.take_in()
        assert numbers(books) == [1]
        await clerk.close()

    run(work())


def test_a_ledger_that_cannot_be_opened_is_said_and_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    books = Books(tmp_path)
    books.writer.enter([known(), answered(1)])
    database, elsewhere = tmp_path / "ledger.sqlite", tmp_path / "elsewhere.sqlite"

    async def work() -> None:
        clerk = Clerk(tmp_path)
        database.rename(elsewhere)
        database.mkdir()
        with pytest.raises(StateNotKept, match=r"ledger\.sqlite cannot be used as the ledger"):
            await clerk.take_in()
        database.rmdir()
        elsewhere.rename(database)
        await clerk.take_in()
        assert numbers(books) == [1]
        await clerk.close()

    run(work())
    assert capfd.readouterr().err == ""


def test_an_answer_that_nobody_waited_for_is_not_the_next_one_s(tmp_path: Path) -> None:
    books = Books(tmp_path)

    async def work() -> None:
        clerk = Clerk(tmp_path)
        await clerk.take_in()
        books.writer.enter([known(), answered(1), Beat(BEGAN_NS + 9 * SECOND_NS)])
        asked = asyncio.create_task(clerk.take_in())
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert (await clerk.bill_since(BEGAN_NS)).total.requests == 1
        await clerk.close()

    run(work())


def test_it_is_gone_when_it_has_been_closed(tmp_path: Path) -> None:
    Books(tmp_path)

    async def work() -> int | None:
        clerk = Clerk(tmp_path)
        await clerk.take_in()
        pid = clerk.pid
        await clerk.close()
        assert clerk.pid is None
        return pid

    pid = run(work())
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def started(state_dir: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "dormouse.billing.clerk", str(state_dir)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_it_ends_when_its_server_is_no_more(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.writer.enter([known(), answered(1)])
    clerk = started(tmp_path)
    said, complaints = clerk.communicate(encode(TakeIn()) + b"\n", timeout=60)  # and its input ends
    assert decode_answer(said) == Done()
    assert (clerk.returncode, complaints) == (0, b"")
    assert numbers(books) == [1]


def test_it_does_not_complain_when_nobody_reads_its_answer(tmp_path: Path) -> None:
    Books(tmp_path)
    clerk = started(tmp_path)
    assert clerk.stdin is not None and clerk.stdout is not None and clerk.stderr is not None
    clerk.stdout.close()
    clerk.stdin.write(encode(TakeIn()) + b"\n")
    clerk.stdin.close()
    assert clerk.wait(60) == 0
    assert clerk.stderr.read() == b""
    clerk.stderr.close()


def test_what_cannot_be_done_is_said_and_can_be_asked_again(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.writer.enter([known(), answered(1)])
    books.writer.enter([answered(1)])
    clerk = started(tmp_path)
    said, complaints = clerk.communicate((encode(TakeIn()) + b"\n") + encode(BillSince(0)) + b"\n", timeout=60)
    refusals = [decode_answer(line) for line in said.splitlines()]
    assert all(isinstance(refusal, NotDone) and "UNIQUE" in refusal.message for refusal in refusals)
    assert (len(refusals), complaints) == (2, b"")
