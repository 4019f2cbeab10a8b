"""``dormouse load``: put load on functions and say how they bore it; with a name alone, admit one to host memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dormouse.cli.client import DEFAULT_SERVER, Server
from dormouse.errors import ConfigurationFault
from dormouse.load.outcome import Latency, Outcome, Sent
from dormouse.load.picture import draw
from dormouse.load.plan import Plan, Process, drawn, traced
from dormouse.load.report import page
from dormouse.load.run import Order, carry_out
from dormouse.load.target import Protocol, Sizes

NOT_VALID = 1
REPORTS = (".html", ".png")
RATE, DURATION_S = 10.0, 10.0
MOST_REQUESTS = 20_000_000


def load(
    name: Annotated[
        str | None, typer.Argument(help="Take this function into host memory, and do nothing else.")
    ] = None,
    *,
    url: Annotated[
        str, typer.Option("--url", "--server", envvar="DORMOUSE_SERVER", help="Address of the server.")
    ] = DEFAULT_SERVER,
    function: Annotated[str, typer.Option(metavar="NAME[,NAME...]", help="Functions to ask, in equal shares.")] = "",
    trace: Annotated[
        Path | None, typer.Option(help="When to ask: .npy or .csv; docs/load.md says what it holds.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second over all functions. [default: 10]")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds. [default: 10, or the trace's]")] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, constant or gamma.")] = "poisson",
    cv: Annotated[float, typer.Option(help="Coefficient of variation of gamma's gaps.")] = 2.0,
    protocol: Annotated[str, typer.Option(help="v2 or openai (embeddings).")] = "v2",
    input_file: Annotated[Path | None, typer.Option("--input", help="A request in JSON, or a list of them.")] = None,
    rows: Annotated[int, typer.Option(help="What a free first dimension becomes.")] = 1,
    free: Annotated[int, typer.Option(help="What other free dimensions become.")] = 16,
    words: Annotated[int, typer.Option(help="Words of a text.")] = 8,
    seed: Annotated[int, typer.Option(help="The same seed asks the same at the same times.")] = 42,
    slo_ms: Annotated[float | None, typer.Option(help="Deadline in place of the functions' own.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which an answer is not waited for.")] = 60.0,
    connections: Annotated[int, typer.Option(help="At most so many at once.")] = 1024,
    key: Annotated[str, typer.Option(envvar="DORMOUSE_KEY", help="API key.")] = "",
    ca: Annotated[
        Path | None, typer.Option(envvar="DORMOUSE_CA", help="Certificate in PEM to trust, for https.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report here: .html or .png.")] = None,
) -> None:
    """Put load on functions, in open loop: requests are sent when the plan says so, and their latency counts from then.

    Exit status 1 if the generator itself could not keep up, so that the figures say nothing of the server.
    """
    if name is not None:
        _admit(name, Server(url, key, ca), also=bool(function or trace))
        return
    names = tuple(dict.fromkeys(filter(None, (each.strip() for each in function.split(",")))))
    if report is not None and report.suffix not in REPORTS:
        raise ConfigurationFault(f"--report {report}: expected a name that ends in {' or '.join(REPORTS)}")
    sizes = Sizes(*(_counted(option, n) for option, n in (("--rows", rows), ("--free", free), ("--words", words))))
    order = Order(
        url=url,
        protocol=_protocol(protocol),
        key=key or None,
        ca=ca,
        sizes=sizes,
        seed=seed,
        input=input_file,
        slo_ms=None if slo_ms is None else _positive("--slo-ms", slo_ms),
        connections=_counted("--connections", connections),
        timeout_s=_positive("--timeout", timeout),
    )
    process, cv = _process(arrivals), _positive("--cv", cv)
    plan = _plan(names, trace, rate, duration, seed=seed, process=process, cv=cv)
    outcome, sent = _shown(order, plan)
    _tell(outcome)
    _write(outcome, sent, json, report, url)
    if not outcome.generator.valid:
        raise typer.Exit(NOT_VALID)


def _admit(name: str, server: Server, *, also: bool) -> None:
    if also:
        raise ConfigurationFault(f"{name!r} beside --function or --trace: a name alone is taken into host memory")
    with server as remote:
        remote.load(name)
    typer.echo(f"loaded {name}")


def _plan(
    names: Sequence[str],
    trace: Path | None,
    rate: float | None,
    duration: float | None,
    *,
    seed: int,
    process: Process,
    cv: float,
) -> Plan:
    rate = None if rate is None else _positive("--rate", rate)
    duration = None if duration is None else _positive("--duration", duration)
    if trace is not None:
        return traced(trace, names, seed, rate, duration)
    if not names:
        raise ConfigurationFault("nothing to ask: give --function, or --trace, or the name of a function to load")
    rate, duration = rate or RATE, duration or DURATION_S
    if rate * duration > MOST_REQUESTS:
        raise ConfigurationFault(f"--rate {rate:g} for {duration:g} s is more than {MOST_REQUESTS} requests")
    return drawn(names, rate, duration, seed, process=process, cv=cv)


def _positive(option: str, value: float) -> float:
    if not 0 < value < 1e9:
        raise ConfigurationFault(f"{option} {value:g} cannot be used; expected more than 0")
    return value


def _counted(option: str, value: int) -> int:
    if not 1 <= value <= 100_000:
        raise ConfigurationFault(f"{option} {value} cannot be used; expected 1 to 100000")
    return value


def _protocol(text: str) -> Protocol:
    for known in get_args(Protocol):
        if text == known:
            chosen: Protocol = known
            return chosen
    raise ConfigurationFault(f"--protocol {text!r} cannot be used; expected {' or '.join(get_args(Protocol))}")


def _process(text: str) -> Process:
    for known in get_args(Process):
        if text == known:
            chosen: Process = known
            return chosen
    raise ConfigurationFault(f"--arrivals {text!r} cannot be used; expected one of {', '.join(get_args(Process))}")


def _shown(order: Order, plan: Plan) -> tuple[Outcome, list[Sent]]:
    """With a bar that fills, where somebody looks."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{plan.rate:.0f} requests/s", total=len(plan.arrivals))
        return carry_out(order, plan, lambda ended: progress.update(bar, completed=ended))


def _write(outcome: Outcome, sent: Sequence[Sent], json: Path | None, report: Path | None, url: str) -> None:
    try:
        if json is not None:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome)) + b"\n")
        if report is not None and report.suffix == ".html":
            report.write_text(page(outcome, sent, f"Load on {url}"))
    except OSError as fault:
        raise ConfigurationFault(f"{fault.filename} cannot be written: {fault.strerror}") from None
    if report is not None and report.suffix == ".png":
        draw(sent, report)


# ------------------------------------------------------------------ what is told


def _tell(outcome: Outcome) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=250)
    console.print(_paths(outcome))
    console.print(_functions(outcome))
    for line in _lines(outcome):
        typer.echo(line)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=bool(place))
    return table


def _paths(outcome: Outcome) -> Table:
    table = _table("PATH", "ANSWERS", "P50 ms", "P95 ms", "P98 ms", "P99 ms", "MAX ms")
    rows = {**outcome.paths, **({} if outcome.latency is None else {"all": outcome.latency})}
    for path, each in rows.items():
        table.add_row(path, str(each.count), *_milliseconds(each))
    return table


def _milliseconds(each: Latency) -> list[str]:
    return [f"{value:.1f}" for value in (each.p50_ms, each.p95_ms, each.p98_ms, each.p99_ms, each.max_ms)]


def _functions(outcome: Outcome) -> Table:
    table = _table("FUNCTION", "REQUESTS", "SLO", "IN TIME", "IN SLO")
    for each in outcome.functions:
        share = f"{each.in_time / each.requests:.2%}" if each.requests else ""
        slo = f"{each.percentile:g} % in {each.deadline_ms:g} ms"
        table.add_row(each.name, str(each.requests), slo, share, "yes" if each.compliant else "[red]no[/red]")
    return table


def _lines(outcome: Outcome) -> list[str]:
    lines = [
        f"{outcome.answered} of {outcome.planned} requests answered in {outcome.duration_s:.1f} s: "
        f"{outcome.offered_per_s:.1f}/s sent, {outcome.answered_per_s:.1f}/s answered",
    ]
    if outcome.errors:
        lines.append("failed: " + ", ".join(f"{status} {count}" for status, count in outcome.errors.items()))
    if outcome.interrupted:
        lines.append("interrupted: these are the figures up to then")
    told = outcome.generator
    lines.append(
        f"sent late: {told.late}; 99 % within {told.late_p99_ms:.1f} ms of the plan, "
        f"all within {told.late_max_ms:.1f} ms"
    )
    if not told.valid:
        lines.append("NOT VALID: the generator itself could not keep up; lower --rate, or run it on another machine")
    return lines
