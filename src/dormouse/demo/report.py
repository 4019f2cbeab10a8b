"""From the records of a run to its figures, and to the table that people read. Pure."""

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table

from dormouse.demo.messages import Asked, Paced, Phase, Verdict

PATHS = ("resident", "host", "disk", "build")
COMPLIANT_SHARE = 0.98
"""A function is inside its SLO if this share of its requests was answered, rightly, by its deadline."""
SHOWN_COMPLAINTS = 5


class PathFigures(Struct, frozen=True):
    """Latencies as the client sees them."""

    requests: int
    p50_ms: float
    p98_ms: float


class Figures(Struct, frozen=True):
    """What is written with ``--json``. ``requests`` and ``paths`` are of the load and of each function's first request;
    calibration is counted apart. Wrong and failed answers count wherever they come; lost ones are failed."""

    functions: int
    models: int
    total_bytes: int
    device_bytes: int
    requests: int
    answers_wrong: int
    answers_failed: int
    functions_compliant: int
    paths: dict[str, PathFigures]
    answers_lost: int
    functions_asked: int
    evictions: int
    calibration_requests: int
    seconds: float
    rate_per_s: float
    deadline_ms: dict[str, float]
    versions: dict[str, str]
    device: str
    date: str

    @property
    def all_right(self) -> bool:
        return self.answers_wrong == self.answers_failed == 0


class Setting(Struct, frozen=True):
    """What is known of a run besides its records."""

    model_of: dict[str, str]
    """Model by function."""
    total_bytes: int
    device_bytes: int
    evictions: int
    seconds: float
    versions: dict[str, str]
    device: str
    date: str


def figures(asked: Sequence[Asked], paced: Paced, setting: Setting) -> Figures:
    """Count and measure."""
    counted = [one for one in asked if one.phase is not Phase.CALIBRATION]
    verdicts = [one.verdict for one in asked]
    lost = verdicts.count(Verdict.LOST)
    in_time = _in_time([one for one in asked if one.phase is Phase.LOAD], paced, setting.model_of)
    return Figures(
        functions=len(setting.model_of),
        models=len(set(setting.model_of.values())),
        total_bytes=setting.total_bytes,
        device_bytes=setting.device_bytes,
        requests=len(counted),
        answers_wrong=verdicts.count(Verdict.WRONG),
        answers_failed=verdicts.count(Verdict.FAILED) + lost,
        functions_compliant=sum(compliant(in_time.get(name, ())) for name in setting.model_of),
        paths={path: _path([one for one in counted if one.path == path]) for path in PATHS},
        answers_lost=lost,
        functions_asked=len(in_time),
        evictions=setting.evictions,
        calibration_requests=len(asked) - len(counted),
        seconds=setting.seconds,
        rate_per_s=paced.rate_per_s,
        deadline_ms=paced.deadline_ms,
        versions=setting.versions,
        device=setting.device,
        date=setting.date,
    )


def _in_time(load: Sequence[Asked], paced: Paced, model_of: Mapping[str, str]) -> dict[str, list[bool]]:
    """By function, whether each request was answered rightly and by its deadline."""
    outcomes: dict[str, list[bool]] = {}
    for one in load:
        soon = one.latency_ms <= paced.deadline_ms[model_of[one.function]]
        outcomes.setdefault(one.function, []).append(soon and one.verdict is Verdict.RIGHT)
    return outcomes


def compliant(in_time: Sequence[bool]) -> bool:
    """Whether the promised share was in time; a function that was never asked has kept its promise."""
    return sum(in_time) >= COMPLIANT_SHARE * len(in_time)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed; 0 when there are none."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else 0.0


def _path(asked: Sequence[Asked]) -> PathFigures:
    latencies = [one.latency_ms for one in asked]
    return PathFigures(len(asked), percentile(latencies, 0.5), percentile(latencies, 0.98))


def complaints(asked: Sequence[Asked]) -> list[str]:
    """The first answers that were not right, a line each."""
    bad = [one for one in asked if one.verdict is not Verdict.RIGHT]
    return [f"{one.function}: {one.verdict} ({one.path or 'no path'}): {one.detail}" for one in bad[:SHOWN_COMPLAINTS]]


def rendered(found: Figures, paced: Paced) -> RenderableType:
    """The table and the lines below it."""
    return Group(_paths_table(found), "", _models_table(paced), "", *_lines(found))


def _paths_table(found: Figures) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("PATH")
    for heading in ("REQUESTS", "SHARE", "P50 ms", "P98 ms"):
        table.add_column(heading, justify="right")
    for path, row in found.paths.items():
        share = f"{row.requests / max(found.requests, 1):.0%}"
        times = (f"{row.p50_ms:.0f}", f"{row.p98_ms:.0f}") if row.requests else ("-", "-")
        table.add_row(path, str(row.requests), share, *times)
    return table


def _models_table(paced: Paced) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("MODEL")
    for heading in ("RESIDENT ms", "FROM HOST ms", "DEADLINE ms"):
        table.add_column(heading, justify="right")
    for model, deadline_ms in paced.deadline_ms.items():
        times = (f"{found[model]:.0f}" if model in found else "-" for found in (paced.resident_ms, paced.host_ms))
        table.add_row(f"{model} (one at a time)", *times, f"{deadline_ms:.0f}")
    return table


def _lines(found: Figures) -> list[str]:
    ratio = found.total_bytes / found.device_bytes
    checked = found.requests + found.calibration_requests
    wrong, failed = found.answers_wrong, found.answers_failed
    verdict = (
        f"[green]all {checked} answers were right[/green]"
        if found.all_right
        else f"[red]of {checked} answers {wrong} were wrong, {failed} failed or were lost[/red]"
    )
    return [
        f"{found.functions} functions of {found.models} models, {found.total_bytes / 1e6:.0f} MB, on a device of "
        f"{found.device_bytes / 1e6:.0f} MB: {ratio:.1f} times its memory; {found.evictions} evictions",
        f"{found.functions_compliant} of {found.functions} functions inside their SLO "
        f"({COMPLIANT_SHARE:.0%} by the deadline)",
        verdict,
    ]
