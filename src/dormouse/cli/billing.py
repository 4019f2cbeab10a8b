"""``dormouse bill``, ``tariff`` and ``ledger``: read and set in a state directory, whether its server runs or not."""

import csv
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dormouse.billing.bills import Bill, By, Item, Line, Question, items, make_bill
from dormouse.billing.copied import CopiedLedger
from dormouse.billing.database import Database
from dormouse.billing.pricing import shown
from dormouse.billing.tariffs import history, parse_moment, read_tariff, set_tariff, tariff_lines, time_text
from dormouse.cli.start import HOME
from dormouse.errors import ConfigurationFault, DormouseError, StateNotKept

StateDir = Annotated[
    Path, typer.Option("--state-dir", help="Of the server. [default: ~/.dormouse]", show_default=False)
]


class What(StrEnum):
    TENANT = "tenant"
    FUNCTION = "function"
    PATH = "path"
    DAY = "day"
    REQUEST = "request"


class Format(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"


tariff_app = typer.Typer(help="What things cost.", no_args_is_help=True)
ledger_app = typer.Typer(help="The records that bills are made from.", no_args_is_help=True)


@contextmanager
def _ledger(state_dir: Path, *, must_exist: bool = True, only_read: bool = False) -> Iterator[Database]:
    """With all that has been recorded so far. ``only_read``: one that cannot be written will do."""
    if must_exist and not (state_dir / "ledger.sqlite").is_file():
        raise ConfigurationFault(f"state_dir = {str(state_dir)!r} has no ledger; nothing was ever served there")
    database = _opened(state_dir, only_read=only_read)
    try:
        yield database
    except sqlite3.Error as fault:
        raise DormouseError(f"{database.file} cannot be read: {fault}") from None
    finally:
        database.close()


def _opened(state_dir: Path, *, only_read: bool) -> Database:
    try:
        return _taken_in(Database(state_dir))
    except (ConfigurationFault, StateNotKept) as fault:
        if not only_read:
            raise
        copy = _taken_in(CopiedLedger(state_dir))
        typer.echo(f"warning: read in memory, since nothing can be written: {fault.message}", err=True)
        return copy


def _taken_in(database: Database) -> Database:
    try:
        database.take_in()
    except BaseException:
        database.close()
        raise
    return database


def bill(
    *,
    tenant: Annotated[
        str | None, typer.Option(help="What this tenant pays. '': the server's own. [default: all]")
    ] = None,
    function: Annotated[str | None, typer.Option(help="One function only, all its versions.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="From then on, as 2026-12-01 (UTC).")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before then.")] = None,
    by: Annotated[What, typer.Option(help="What a line is.")] = What.TENANT,
    form: Annotated[Format, typer.Option("--format", help="How it is printed.")] = Format.TABLE,
    state_dir: StateDir = HOME,
) -> None:
    """What a period cost, and whom. Money in csv and json is in billionths (nanos) of the currency."""
    question = Question(tenant=tenant, function=function, by=By.TENANT if by is What.REQUEST else By(by.value))
    if since is not None:
        question = msgspec.structs.replace(question, since_ns=parse_moment("since", since))
    if until is not None:
        question = msgspec.structs.replace(question, until_ns=parse_moment("until", until))
    with _ledger(state_dir, only_read=True) as database:
        made = make_bill(database, question)
        each = items(database, question) if by is What.REQUEST else None
        match form:
            case Format.JSON:
                _print_json(made, each)
            case Format.CSV:
                _print_csv(made, each)
            case Format.TABLE:
                _print_table(made, each)


def _print_json(made: Bill, each: Iterable[Item] | None) -> None:
    answer: dict[str, Any] = {
        **bill_facts(made),
        "lines": [{made.question.by: key, **_numbers(line)} for key, line in made.lines.items()],
    }
    if each is not None:
        answer["requests"] = [msgspec.to_builtins(item) for item in each]
    typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())


def bill_facts(made: Bill) -> dict[str, Any]:
    """All but the lines, for programs."""
    return {
        "currency": made.currency,
        "since_ns": made.question.since_ns,
        "until_ns": min(made.question.until_ns, made.upto_ns),
        "pruned_ns": made.pruned_ns,
        "functions": made.functions,
        "functions_in_slo": made.functions_in_slo,
        "nanos_per_request_in_time": made.nanos_per_request_in_time,
        "total": _numbers(made.total),
    }


def _numbers(line: Line) -> dict[str, int]:
    return {**msgspec.to_builtins(line), "total_nanos": line.total_nanos}


def _print_csv(made: Bill, each: Iterable[Item] | None) -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    if each is None:
        out.writerow([made.question.by, *_numbers(made.total)])
        for key, line in made.lines.items():
            out.writerow([key, *_numbers(line).values()])
    else:
        out.writerow(Item.__struct_fields__)
        for item in each:
            out.writerow(msgspec.structs.astuple(item))


def _print_table(made: Bill, each: Iterable[Item] | None) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=250)
    console.print(_table(made) if each is None else _item_table(each), markup=False)
    for line in headlines(made):
        typer.echo(line)


def _table(made: Bill) -> Table:
    names = ("ANSWERED", "IN TIME", "REFUSED", "GIVEN UP", "DEVICE s", "ACTIVE", "MEMORY", "TOTAL", "BOUND EARLY")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(made.question.by.upper(), overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for key, line in (*made.lines.items(), ("total", made.total)):
        counts = (line.requests, line.in_time, line.refused, line.cancelled)
        money = (line.active_nanos, line.memory_nanos, line.total_nanos, line.early_nanos)
        table.add_row(key or "(server)", *map(str, counts), f"{line.device_ns / 1e9:.3f}", *map(shown, money))
    return table


def _item_table(each: Iterable[Item]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("REQUEST", "TENANT", "FUNCTION", "ENDED", "PATH", "QUEUED ms", "DEVICE ms", "IN TIME", "COST"):
        table.add_column(name, justify="right" if name in ("QUEUED ms", "DEVICE ms", "COST") else "left", no_wrap=True)
    for item in each:
        times = (f"{item.queued_ns / 1e6:.3f}", f"{item.device_ns / 1e6:.3f}")
        ended = "yes" if item.in_time else item.reason or "no"
        who = (item.request, item.tenant or "(server)", item.function, time_text(item.ended_ns))
        table.add_row(*who, item.path, *times, ended, shown(item.nanos))
    return table


def headlines(made: Bill) -> list[str]:
    """What a bill comes to, in a few lines."""
    each = made.nanos_per_request_in_time
    lines = [
        f"{made.functions_in_slo} of {made.functions} functions inside their SLO",
        f"{made.currency} {shown(made.total.total_nanos)} in all; "
        + ("no request was in time" if each is None else f"{shown(each)} for each request in time"),
        f"bound to devices from deploy to removal the same functions would have cost {shown(made.total.early_nanos)}",
        f"all that happened before {time_text(made.upto_ns)} is in it",
    ]
    if made.question.since_ns < made.pruned_ns:
        lines.append(f"warning: requests that ended before {time_text(made.pruned_ns)} were pruned and are missing")
    return lines


@tariff_app.command("show")
def show(state_dir: StateDir = HOME) -> None:
    """All tariffs there have been, oldest first, and those to come."""
    with _ledger(state_dir, only_read=True) as database:
        for valid in history(database):
            for line in tariff_lines(valid):
                typer.echo(line)


@tariff_app.command("set")
def set_(
    file: Annotated[Path, typer.Argument(help="In TOML; what it leaves out stays as it is.")],
    state_dir: StateDir = HOME,
) -> None:
    """Let other prices hold from now on, or from the file's valid_from. What is past is never billed anew."""
    written = read_tariff(file)
    with _ledger(state_dir, must_exist=False) as database:
        for line in tariff_lines(set_tariff(database, written)):
            typer.echo(line)


@ledger_app.command("prune")
def prune(
    before: Annotated[str, typer.Option(metavar="TIME", help="Forget what ended before, as 2026-12-01 (UTC).")],
    state_dir: StateDir = HOME,
) -> None:
    """Forget old records. Bills of that time can not be made any more."""
    before_ns = parse_moment("before", before)
    with _ledger(state_dir) as database:
        requests, intervals = database.prune(before_ns)
    typer.echo(f"forgot {requests} requests and {intervals} intervals that ended before {time_text(before_ns)}")
