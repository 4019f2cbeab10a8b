"""``dormouse simulate`` and ``dormouse replay``: the real core in a world of its own, or over a recorded history."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dormouse.cli.tables import size
from dormouse.core.scheduler import Scheduler
from dormouse.core.types import Ns
from dormouse.errors import ConfigurationFault
from dormouse.journal import encode_commands, read_journal
from dormouse.sim import scenario as scenarios
from dormouse.sim.capacity import largest_compliant
from dormouse.sim.faults import inject
from dormouse.sim.outcome import Outcome, outcome_of
from dormouse.sim.plot import plot
from dormouse.sim.world import World

FAILED = 1
_SECOND_NS: Ns = 1_000_000_000


def simulate(
    scenario: Annotated[Path, typer.Argument(help="A scenario file (TOML); docs/simulator.md says what it holds.")],
    json: Annotated[Path | None, typer.Option(help="Write the outcome here as JSON.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw latency by path here (PNG).")] = None,
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Find the largest number of functions that are all compliant.")
    ] = False,
) -> None:
    """Run a scenario: the real decisions, over simulated devices."""
    read = scenarios.read(scenario)
    if find_capacity:
        found = largest_compliant(read, scenario.parent, tried=lambda count, ok: typer.echo(_tried(count, ok)))
        typer.echo(f"all compliant up to {found} functions")
        if json is not None:
            json.write_bytes(msgspec.json.encode({"functions": found}) + b"\n")
        return
    outcome, world = run(read, scenario.parent, shown=True)
    Console().print(_table(outcome))
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome)) + b"\n")
    if plot_file is not None:
        plot(world, plot_file)


def run(read: scenarios.Scenario, directory: Path, *, shown: bool) -> tuple[Outcome, World]:
    """One scenario to its end."""
    world = scenarios.world_of(read)
    duration_ns = round(read.workload.duration_s * _SECOND_NS)
    inject(world, read.faults, duration_ns, read.seed)
    arrivals = scenarios.arrivals_of(read, directory)
    began_s, began_ns = time.perf_counter(), world.now
    world.run(_with_progress(arrivals, duration_ns) if shown else arrivals)
    return outcome_of(world.core.state, world.now - began_ns, time.perf_counter() - began_s), world


def _with_progress(arrivals: Iterator[tuple[Ns, int]], duration_ns: Ns) -> Iterator[tuple[Ns, int]]:
    columns = (TextColumn("simulating"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("", total=duration_ns)
        for number, arrival in enumerate(arrivals):
            if number % 1000 == 0:
                progress.update(task, completed=arrival[0])
            yield arrival


def _tried(count: int, compliant: int) -> str:
    return f"{count} functions: {compliant} compliant"


def _table(outcome: Outcome) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("functions compliant", f"{outcome.compliant} of {outcome.functions}")
    table.add_row("requests in time", f"{outcome.in_time} of {outcome.requests}, {outcome.refused} refused")
    for path, row in outcome.paths.items():
        told = f"{row.share:.1%}, P50 {row.p50_ms:.2f} ms, P98 {row.p98_ms:.2f} ms"
        table.add_row(f"path {path}", told)
    table.add_row("evictions", f"{outcome.evictions}")
    table.add_row("bytes moved", size(outcome.moved_bytes))
    if outcome.read_bytes:
        table.add_row("bytes read from disk", size(outcome.read_bytes))
        if outcome.promotions:
            table.add_row("read ahead", f"{outcome.promotions}, {outcome.promotions_unused} of them in vain")
    table.add_row("served worst", f"{outcome.worst_function} ({outcome.worst_share:.1%} in time)")
    table.add_row("simulated", f"{outcome.simulated_s:.1f} s in {outcome.wall_s:.1f} s")
    return table


def replay(journal: Annotated[Path, typer.Argument(help="Recorded by `dormouse serve --journal FILE`.")]) -> None:
    """Give the core a recorded history again and compare what it commands, byte for byte."""
    if not journal.is_file():
        raise ConfigurationFault(f"journal {journal} is not there")
    record = read_journal(journal)
    core = Scheduler(record.settings)
    events = 0
    for entry in record.entries:
        commands = core.handle(entry.now, entry.event)
        events += 1
        if encode_commands(commands) != encode_commands(entry.commands):
            typer.echo(f"event {events} ({type(entry.event).__name__}) brought forth other commands than recorded:")
            typer.echo(f"  recorded {entry.commands}\n  now      {commands}")
            raise typer.Exit(FAILED)
    typer.echo(f"{events} events replayed, every command the same")
    if record.cut_off:
        typer.echo(f"the journal was cut off after event {events}")
