"""When is which function asked: drawn from a rate and a seed, or read from a trace. Pure but for the trace's file."""

import csv
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Literal

from msgspec import Struct

from dormouse import traces, workload
from dormouse.core.types import Ns
from dormouse.errors import ConfigurationFault
from dormouse.workload import SECOND_NS, Arrivals

Process = Literal["poisson", "constant", "gamma"]


class Plan(Struct, frozen=True):
    """``arrivals`` are nanoseconds from the start and the number of the function, ascending."""

    functions: tuple[str, ...]
    arrivals: list[tuple[Ns, int]]
    duration_ns: Ns

    @property
    def rate(self) -> float:
        """Requests a second, on average."""
        return len(self.arrivals) * SECOND_NS / self.duration_ns


def drawn(
    functions: Sequence[str],
    rate: float,
    duration_s: float,
    seed: int,
    *,
    process: Process = "poisson",
    cv: float = 2.0,
) -> Plan:
    """``rate`` requests a second over all functions, each asked as often as the others."""
    duration_ns = round(duration_s * SECOND_NS)
    even = [rate / len(functions)] * len(functions)
    arrivals: Arrivals
    match process:
        case "poisson":
            arrivals = workload.poisson(even, duration_ns, seed)
        case "gamma":
            arrivals = workload.gamma(even, cv, duration_ns, seed)
        case "constant":
            arrivals = _constant(len(functions), rate, duration_ns)
    return _plan(functions, list(arrivals), duration_ns)


def _constant(functions: int, rate: float, duration_ns: Ns) -> Iterator[tuple[Ns, int]]:
    count = round(rate * duration_ns / SECOND_NS)
    return ((round(number * SECOND_NS / rate), number % functions) for number in range(count))


def traced(
    file: Path, functions: Sequence[str], seed: int, rate: float | None = None, duration_s: float | None = None
) -> Plan:
    """What a trace holds, stretched or squeezed to ``rate`` and cut at ``duration_s``.

    ``.npy``: calls a minute, a row a function, dealt to the functions given. ``.csv``: a column ``at_s`` of moments and
    perhaps ``function``; or ``minute`` and a column of calls for each function. Raises ConfigurationFault.
    """
    names, arrivals, duration_ns = _read(file, functions, seed)
    if rate is not None and arrivals:
        factor = len(arrivals) * SECOND_NS / duration_ns / rate
        arrivals = [(round(at_ns * factor), number) for at_ns, number in arrivals]
        duration_ns = round(duration_ns * factor)
    if duration_s is not None:
        duration_ns = min(duration_ns, round(duration_s * SECOND_NS))
        arrivals = list(takewhile(lambda arrival: arrival[0] <= duration_ns, arrivals))
    return _plan(names, arrivals, duration_ns, str(file))


def _plan(functions: Sequence[str], arrivals: list[tuple[Ns, int]], duration_ns: Ns, origin: str = "the plan") -> Plan:
    if not arrivals:
        raise ConfigurationFault(f"{origin} has no request in it; give a higher --rate or a longer --duration")
    return Plan(tuple(functions), arrivals, max(duration_ns, 1))


def _read(file: Path, functions: Sequence[str], seed: int) -> tuple[Sequence[str], list[tuple[Ns, int]], Ns]:
    if file.suffix == ".npy":
        counts = traces.calls_per_minute(file)
        needed = _dealt(counts, functions, file)
        return functions, list(workload.per_minute(needed, seed)), len(counts[0]) * workload.MINUTE_NS
    with traces.opened(file) as text:
        columns = next(csv.reader(text), [])
    if "at_s" in columns:
        return _moments(file, functions, "function" in columns)
    if "minute" in columns:
        return _minutes(file, [column for column in columns if column != "minute"], seed)
    raise ConfigurationFault(f"trace {file} line 1: there is no column 'at_s' and none 'minute'")


def _dealt(counts: Sequence[Sequence[int]], functions: Sequence[str], file: Path) -> list[list[int]]:
    """Rows of a trace dealt to functions in turn: where it has more, they share."""
    if not functions:
        raise ConfigurationFault(f"trace {file} names no functions; give --function")
    dealt = [[0] * len(counts[0]) for _ in functions]
    for number, row in enumerate(counts):
        mine = dealt[number % len(functions)]
        for minute, calls in enumerate(row):
            mine[minute] += calls
    return dealt


def _moments(file: Path, functions: Sequence[str], named: bool) -> tuple[Sequence[str], list[tuple[Ns, int]], Ns]:
    if not named and not functions:
        raise ConfigurationFault(f"trace {file} names no functions; give --function")
    numbers = {name: number for number, name in enumerate(functions)}
    arrivals: list[tuple[Ns, int]] = []
    with traces.opened(file) as text:
        for line, row in traces.rows(file, text, ("at_s", "function") if named else ("at_s",)):
            at_s = _number(file, line, row["at_s"])
            number = numbers.setdefault(row["function"], len(numbers)) if named else len(arrivals) % len(functions)
            arrivals.append((round(at_s * SECOND_NS), number))
    arrivals.sort()
    return tuple(numbers), arrivals, arrivals[-1][0] if arrivals else 1


def _minutes(file: Path, names: Sequence[str], seed: int) -> tuple[Sequence[str], list[tuple[Ns, int]], Ns]:
    counts: list[list[int]] = [[] for _ in names]
    with traces.opened(file) as text:
        for line, row in traces.rows(file, text, ("minute", *names)):
            for mine, name in zip(counts, names, strict=True):
                mine.append(round(_number(file, line, row[name])))
    if not names or not counts[0]:
        raise ConfigurationFault(f"trace {file} has no calls in it")
    return names, list(workload.per_minute(counts, seed)), len(counts[0]) * workload.MINUTE_NS


def _number(file: Path, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= traces.MOST_A_MINUTE:
        raise ConfigurationFault(
            f"trace {file} line {line}: {text[:40]!r} is no number from 0 to {traces.MOST_A_MINUTE}"
        )
    return value
