"""A process that works on the ledger's SQLite for a server, whose interpreter has requests to see to.

    python -m dormouse.billing.clerk STATE_DIR

One question a line of its standard input, one answer a line of its output; it ends when its input does, so it never
outlives its server by more than the work at hand.
"""

import os
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dormouse.billing.bills import Bill, By, Question, known_upto, make_bill
from dormouse.billing.database import Database
from dormouse.core.types import Ns
from dormouse.errors import ConfigurationFault, DormouseError

NICENESS = 5
"""Requests go first where processors are scarce."""


class TakeIn(msgspec.Struct, frozen=True, tag=True):
    """Take what is in the segments now into SQLite."""


class BillSince(msgspec.Struct, frozen=True, tag=True):
    """That too, and then: what has every function cost since?"""

    since_ns: Ns


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is in SQLite. ``bill`` ends at the moment before which nothing is missing."""

    bill: Bill | None = None


class NotDone(msgspec.Struct, frozen=True, tag=True):
    """For the time being; nothing is lost."""

    message: str


encode = msgspec.json.encode
decode_question = msgspec.json.Decoder(TakeIn | BillSince).decode
decode_answer = msgspec.json.Decoder(Done | NotDone).decode


def answered(database: Database, question: TakeIn | BillSince) -> Done | NotDone:
    """Do what is asked."""
    try:
        database.take_in()
        if isinstance(question, TakeIn):
            return Done()
        until_ns = max(question.since_ns, known_upto(database))
        return Done(make_bill(database, Question(question.since_ns, until_ns, by=By.FUNCTION)))
    except (DormouseError, OSError, sqlite3.Error) as fault:
        return NotDone(str(fault))


def answers(state_dir: Path, questions: Iterable[bytes]) -> Iterator[bytes]:
    """One for each. A ledger that cannot be opened is tried again with the next question."""
    database: Database | None = None
    try:
        for question in questions:
            try:
                database = database or Database(state_dir)
                answer = answered(database, decode_question(question))
            except ConfigurationFault as fault:
                answer = NotDone(fault.message)
            yield encode(answer) + b"\n"
    finally:
        if database is not None:
            database.close()


def main() -> None:
    """Until standard input ends."""
    os.nice(NICENESS)
    try:
        for answer in answers(Path(sys.argv[1]), sys.stdin.buffer):
            sys.stdout.buffer.write(answer)
            sys.stdout.buffer.flush()
    except BrokenPipeError:  # nobody is there any more to be told
        sys.stdout = None


if __name__ == "__main__":
    main()
