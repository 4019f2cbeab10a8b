"""``dormouse bill``, ``tariff`` and ``ledger``: what they print, and their exit status."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dormouse.billing.records import DEPLOYED, HOST, Beat
from dormouse.cli.commands import app
from tests.billing.books import BEGAN_NS, SECOND_NS, Books, answered, began, known
from tests.node.nodes import full_disk


@pytest.fixture
def books(tmp_path: Path) -> Books:
    """Two answers, one of them late, and a hundred seconds of memory."""
    books = Books(tmp_path)
    books.record(known(owner="owner"), began(DEPLOYED, 0, size_bytes=500), began(HOST, 0, size_bytes=500))
    books.record(answered(1, tenant="acme"), answered(2, tenant="acme", in_time=False, at_s=2))
    books.record(Beat(BEGAN_NS + 100 * SECOND_NS))
    return books


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def test_a_bill_says_who_pays_what_and_what_it_comes_to(books: Books) -> None:
    status, said = run("bill", "--state-dir", str(books.state_dir))
    lines = [line.split() for line in said.splitlines()]
    assert status == 0
    assert ["acme", "2", "1", "0", "0", "0.002", "0.000002000", "0.000000000", "0.000002000", "0.000000000"] in lines
    assert ["owner", "0", "0", "0", "0", "0.000", "0.000000000", "0.005000000", "0.005000000", "0.050000000"] in lines
    assert "0 of 1 functions inside their SLO" in said
    assert "USD 0.005002000 in all; 0.005002000 for each request in time" in said
    assert "bound to devices from deploy to removal the same functions would have cost 0.050000000" in said
    assert "before 2023-11-14T22:15:00Z is in it" in said


def test_a_bill_needs_no_room_and_changes_nothing_then(books: Books) -> None:
    assert books.writer.enter([answered(3, tenant="acme", at_s=3), Beat(BEGAN_NS + 200 * SECOND_NS)]) is None
    before = contents(books.state_dir)
    asked = ("--state-dir", str(books.state_dir))
    with full_disk():
        result = CliRunner().invoke(app, ["bill", *asked, "--format", "json"])
        shown = run("tariff", "show", *asked)
        pruned = run("ledger", "prune", "--before", "2030-01-01", *asked)
    assert contents(books.state_dir) == before
    assert result.exit_code == 0
    assert json.loads(result.stdout)["total"]["requests"] == 3, "with what only segments have"
    assert re.fullmatch(
        r"warning: read in memory, since nothing can be written: [^\n]*ledger.sqlite [^\n]*\n", result.stderr
    )
    assert shown[0] == 0 and "USD" in shown[1]
    assert pruned[0] == 1 and "cannot be" in pruned[1]


def contents(directory: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in directory.rglob("*") if file.is_file() and file.suffix != ".sqlite-shm"}


def test_a_bill_for_programs_is_in_whole_numbers(books: Books) -> None:
    status, said = run("bill", "--state-dir", str(books.state_dir), "--by", "path", "--format", "json")
    bill = json.loads(said)
    assert status == 0
    assert bill["total"]["total_nanos"] == 5_002_000
    assert [(line["path"], line["total_nanos"]) for line in bill["lines"]] == [
        ("(memory)", 5_000_000),
        ("resident", 2_000),
    ]


def test_a_bill_goes_down_to_the_request(books: Books) -> None:
    status, said = run("bill", "--state-dir", str(books.state_dir), "--by", "request", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(said)))
    assert status == 0
    assert [(row["request"], row["tenant"], row["in_time"], row["nanos"]) for row in rows] == [
        ("1-1", "acme", "True", "1000"),
        ("1-2", "acme", "False", "1000"),
    ]
    status, table = run("bill", "--state-dir", str(books.state_dir), "--by", "request")
    assert status == 0 and "1-2" in table and "USD 0.005002000 in all" in table


def test_a_bill_is_for_the_period_that_was_asked_for(books: Books) -> None:
    where = ("--state-dir", str(books.state_dir), "--format", "json")
    until = ("--until", "2023-11-14T22:13:22Z")
    bills = [json.loads(run("bill", *where, *period)[1]) for period in ((), until, ("--since", until[1]))]
    whole, before, after = (bill["total"]["total_nanos"] for bill in bills)
    assert whole == before + after and before > 0 and after > 0


def test_a_period_that_was_pruned_is_marked(books: Books) -> None:
    where = ("--state-dir", str(books.state_dir))
    status, said = run("ledger", "prune", *where, "--before", "2023-11-14T22:13:22Z")
    assert (status, said) == (0, "forgot 1 requests and 0 intervals that ended before 2023-11-14T22:13:22Z\n")
    assert "warning: requests that ended before 2023-11-14T22:13:22Z were pruned" in run("bill", *where)[1]


def test_a_tariff_is_set_from_now_on_and_shown_with_those_before(books: Books) -> None:
    file = books.state_dir / "new.toml"
    file.write_text('device_second = "0.002"\n')
    where = ("--state-dir", str(books.state_dir))
    before = run("bill", *where)
    status, said = run("tariff", "set", str(file), *where)
    assert status == 0 and "0.002000000 USD a second" in said
    assert [line for line in run("tariff", "show", *where)[1].splitlines() if "a second" in line] == [
        "  a device, computing   0.001000000 USD a second (3.600000000 an hour)",
        "  a device, computing   0.002000000 USD a second (7.200000000 an hour)",
    ]
    assert run("bill", *where) == before


def test_a_bad_tariff_is_refused_with_file_and_line(books: Books) -> None:
    file = books.state_dir / "bad.toml"
    file.write_text('currency = "USD"\ndevice_second = "a lot"\n')
    status, said = run("tariff", "set", str(file), "--state-dir", str(books.state_dir))
    assert status == 2
    assert f"{file}, line 2: device_second = 'a lot' is no amount" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("bill", "--since", "yesterday"), "since = 'yesterday' is no time"),
        (("ledger", "prune", "--before", "soon"), "before = 'soon' is no time"),
    ],
)
def test_what_is_no_time_is_bad_input(books: Books, arguments: tuple[str, ...], complaint: str) -> None:
    status, said = run(*arguments, "--state-dir", str(books.state_dir))
    assert status == 2 and complaint in said


def test_where_nothing_was_served_there_is_no_bill(tmp_path: Path) -> None:
    status, said = run("bill", "--state-dir", str(tmp_path))
    assert status == 2 and "has no ledger; nothing was ever served there" in said
