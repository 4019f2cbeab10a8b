"""A picture of a node as text for a terminal. Pure: what it is given, it lays out."""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dormouse.cli.tables import size
from dormouse.watch.picture import Device, Load, Picture, Place, Point, Waiting, Watched

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_green")
PATHS = {"resident": "green", "peer": "cyan", "host": "blue", "disk": "yellow", "build": "magenta"}
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 20
MOST_WAITING = 6
_THERE = ("resident", "running")
BAR = 40


class Sort(StrEnum):
    """What functions are sorted by."""

    TROUBLE = "trouble"
    NAME = "name"
    REQUESTS = "requests"
    P98 = "p98"
    WAITING = "waiting"
    IMAGE = "image"
    EVICTED = "evicted"
    COST = "cost"


_KEYS: Mapping[Sort, Callable[[Watched], Any]] = {
    Sort.TROUBLE: lambda row: (row.compliant, -row.queued, -row.requests_per_s, -row.requests),
    Sort.NAME: lambda row: row.name,
    Sort.REQUESTS: lambda row: -row.requests_per_s,
    Sort.P98: lambda row: -row.p98_ms,
    Sort.WAITING: lambda row: -row.queued,
    Sort.IMAGE: lambda row: -row.image_bytes,
    Sort.EVICTED: lambda row: -row.evictions,
    Sort.COST: lambda row: -(row.cost_nanos or 0),
}


def in_order(rows: Sequence[Watched], sort: Sort) -> list[Watched]:
    """Equal ones by name."""
    return sorted(sorted(rows, key=lambda row: row.name), key=_KEYS[sort])


def screen(picture: Picture, sort: Sort = Sort.TROUBLE, height: int | None = None, notice: str = "") -> RenderableType:
    """All of it, in at most so many lines: functions give way."""
    above: list[RenderableType] = [_headline(picture, notice)]
    above += [line for device in picture.devices for line in _device(device, picture)]
    above += [_load(load, picture.at_ms) for load in picture.loads if load.to == "host"]
    above += _queue(picture)
    if not picture.functions:
        return Group(*above, Text("no functions yet; deploy one: dormouse deploy path/to/model", "yellow"))
    rows = in_order(list(picture.functions.values()), sort)
    room = len(rows) if height is None else max(1, height - len(above) - 3)
    shown, hidden = rows[:room], len(rows) - room
    parts = [*above, Text(""), _functions(shown, picture, sort)]
    return Group(*parts, Text(f"and {hidden} more", "dim")) if hidden > 0 else Group(*parts)


def _headline(picture: Picture, notice: str) -> Text:
    totals = picture.totals
    line = Text()
    line.append(f"{totals.compliant} of {totals.functions} functions inside their SLO", "bold")
    line.append(f"  {totals.requests_per_s:g} requests/s  {totals.queued} waiting")
    if picture.host is not None:
        line.append(f"  host {size(picture.host.used_bytes)} of {size(picture.host.capacity_bytes)}")
    if totals.nanos_per_request_in_time is not None:
        line.append(f"  {_money(totals.nanos_per_request_in_time)} {picture.currency} a request in time")
    if notice:
        line.append(f"  {notice}", "bold red")
    return line


def _device(device: Device, picture: Picture) -> list[Text]:
    """Its memory as a bar, and what is on its way to it."""
    line = Text(f"{device.executor:<8} ", "bold")
    restarts = f", {device.restarts} restarts" if device.restarts else ""
    if not device.here:
        return [line.append(f"is gone, a new process is starting{restarts}", "red")]
    line.append_text(_bar(device.places, device.capacity_bytes))
    taken = device.capacity_bytes - device.free_bytes
    line.append(f" {size(taken)} of {size(device.capacity_bytes)}, {len(device.places)} functions{restarts}")
    if device.executing is not None:
        together = f" x{device.together}" if device.together > 1 else ""
        line.append(f"  ▶ {device.executing}{together}", "bold")
    if device.lent_to is not None:
        line.append(f"  link lent to {device.lent_to}", "dim")
    return [line, *(_load(load, picture.at_ms) for load in picture.loads if load.to == device.executor)]


def _bar(places: Sequence[Place], capacity_bytes: int) -> Text:
    """One cell for every fortieth of the memory; a function that is smaller than half a cell is not seen."""
    bar, filled, taken = Text(), 0, 0
    for place in places:
        taken += place.bytes
        cells = round(taken * BAR / max(1, capacity_bytes)) - filled
        bar.append(("█" if place.state in _THERE else "░") * cells, _colour(place.function))
        filled += cells
    return bar.append("·" * (BAR - filled), "dim")


def _colour(name: str) -> str:
    """Always the same one for the same name."""
    return COLOURS[sum(name.encode()) % len(COLOURS)]


def _load(load: Load, now_ms: float) -> Text:
    passed_ms = now_ms - load.started_ms
    share = min(max(passed_ms / max(load.expected_ms, 0.1), 0), 0.99)
    way = f"from {load.source}" if load.source else ("from disk" if load.to == "host" else "from host memory")
    helped = f" and over {', '.join(load.helpers)}" if load.helpers else ""
    left = load.expected_ms - passed_ms
    when = f"{left:.0f} ms left" if left > 0 else f"{-left:.0f} ms longer than expected"
    text = f"  ↳ {load.function} {way}{helped} to {load.to}, {size(load.bytes)}, about {share:.0%}, {when}"
    return Text(text, "cyan")


def _queue(picture: Picture) -> list[RenderableType]:
    lines: list[RenderableType] = [_waiting(each, picture.at_ms) for each in picture.queue[:MOST_WAITING]]
    more = len(picture.queue) - MOST_WAITING
    return [*lines, Text(f"  and {more} more functions wait", "dim")] if more > 0 else lines


def _waiting(waiting: Waiting, now_ms: float) -> Text:
    line = Text("waiting  ", "yellow")
    line.append(f"{waiting.function} x{waiting.requests}, {max(0.0, now_ms - waiting.since_ms):.0f} ms", "bold")
    return line.append(f"  {waiting.why}")


def _functions(rows: Sequence[Watched], picture: Picture, sort: Sort) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", caption=None)
    table.add_column("NAME", no_wrap=True, overflow="ellipsis")
    for heading in ("TIER", "PATHS", "P98 AGAINST SLO", "SLO"):
        table.add_column(heading, no_wrap=True)
    numbers = ("P98 ms", "REQUESTS/s", "WAITING", "IMAGE", "EVICTED", *(["COST"] if picture.currency else []))
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    for column in table.columns:
        if str(column.header).lower().split()[0].split("/")[0] == sort.value:
            column.header = f"{column.header} ↓"
    for row in rows:
        table.add_row(*_cells(row, picture))
    return table


def _cells(row: Watched, picture: Picture) -> list[RenderableType]:
    cost = [_money(row.cost_nanos or 0)] if picture.currency else []
    return [
        Text(row.name),
        Text(row.tier if row.state == "READY" else row.state.lower(), "" if row.on else "dim"),
        _shares(row.paths),
        sparks(picture.histories.get(row.name, ()), row.deadline_ms),
        Text("") if not row.requests else Text("inside", "green") if row.compliant else Text("outside", "bold red"),
        f"{row.p98_ms:.1f}" if row.p98_ms else "",
        f"{row.requests_per_s:.1f}",
        str(row.queued or ""),
        size(row.image_bytes),
        str(row.evictions or ""),
        *cost,
    ]


def _shares(paths: Mapping[str, int]) -> Text:
    """Ten cells."""
    total, bar, filled, taken = sum(paths.values()), Text(), 0, 0
    for path, colour in PATHS.items():
        taken += paths.get(path, 0)
        cells = round(10 * taken / total) - filled if total else 0
        bar.append("■" * cells, colour)
        filled += cells
    return bar


def sparks(points: Sequence[Point | None], deadline_ms: float) -> Text:
    """P98 against the deadline, which is half the height; red above it."""
    line = Text()
    for point in points[-SPARK_WIDTH:]:
        if point is None or not point.requests:
            line.append(" ")
            continue
        share = point.p98_ms / (2 * deadline_ms) if point.answers else 1.0
        line.append(SPARKS[min(int(share * len(SPARKS)), len(SPARKS) - 1)], "red" if share > 0.5 else "green")
    return line


def _money(nanos: int) -> str:
    """With as many digits as say something."""
    amount = nanos / 1e9
    digits = 2 if amount >= 1 or not nanos else 1 - math.floor(math.log10(amount))
    return f"{amount:.{digits}f}"
