"""The outcome of a run as one HTML page: tables, and pictures drawn in it. It fetches nothing and runs no script."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from dormouse.load.outcome import MS_NS, OK, Latency, Outcome, Sent

WIDTH, HEIGHT, MARGIN = 760, 260, 48
COLOURS = ("#2a78b8", "#d9772b", "#3a9a5b", "#b8406a", "#7a5cc0", "#777777")
STEPS = 60
"""Points of a curve, and moments of a course."""

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .2rem .8rem; text-align: right; }
th:first-child, td:first-child { text-align: left; } tr + tr { border-top: 1px solid #8884; }
svg { width: 100%; height: auto; } text { fill: currentColor; font-size: 12px; } .grid { stroke: #8885; }
.bad { color: #c0392b; font-weight: bold; }
"""

Points = Sequence[tuple[float, float]]


def page(outcome: Outcome, sent: Sequence[Sent], title: str) -> str:
    """The whole page."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>",
        '<meta name=viewport content="width=device-width">',
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{line}</p>" for line in _summary(outcome)),
        "<h2>Latency by path</h2><p>Milliseconds from the moment at which the plan had a request sent.</p>",
        _table(("path", "answers", "P50", "P95", "P98", "P99", "max"), _latency_rows(outcome)),
        _distribution(sent),
        "<h2>Course</h2><p>P50 and P98 of the requests due at a time.</p>",
        _course(sent),
        "<h2>Functions</h2>",
        _table(("function", "requests", "SLO", "in time", "inside", "P50", "P98", "max"), _function_rows(outcome)),
        "<h2>Failures</h2>",
        _table(("status", "requests"), [(status, str(n)) for status, n in outcome.errors.items()] or [("none", "0")]),
    ]
    return "\n".join(parts) + "\n</html>\n"


def _summary(outcome: Outcome) -> Iterator[str]:
    yield (
        f"{outcome.answered} of {outcome.planned} requests answered in {outcome.duration_s:.1f} s: "
        f"{outcome.offered_per_s:.1f}/s sent, {outcome.answered_per_s:.1f}/s answered; "
        f"{outcome.compliant} of {len(outcome.functions)} functions inside their SLO."
    )
    if outcome.interrupted:
        yield '<span class="bad">The run was interrupted.</span>'
    told = outcome.generator
    kept = f"The generator sent {told.late} requests late; half within {told.late_p50_ms:.1f} ms, 99 % within "
    kept += f"{told.late_p99_ms:.1f} ms, all within {told.late_max_ms:.1f} ms, over {told.connections} connections."
    yield kept if told.valid else f'{kept} <span class="bad">It could not keep up: the figures are not valid.</span>'


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in line)}</tr>" for line in lines)
    return f"<table><tr>{head}</tr>{body}</table>"


def _latency_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    rows = {**outcome.paths, **({} if outcome.latency is None else {"all": outcome.latency})}
    return [(path, str(each.count), *_numbers(each)) for path, each in rows.items()]


def _numbers(each: Latency) -> tuple[str, ...]:
    return tuple(f"{value:.1f}" for value in (each.p50_ms, each.p95_ms, each.p98_ms, each.p99_ms, each.max_ms))


def _function_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    return [
        (
            each.name,
            str(each.requests),
            f"{each.percentile:g} % in {each.deadline_ms:g} ms",
            f"{each.in_time / each.requests:.2%}" if each.requests else "",
            "yes" if each.compliant else "no",
            *(
                ("", "", "")
                if each.latency is None
                else (f"{each.latency.p50_ms:.1f}", f"{each.latency.p98_ms:.1f}", f"{each.latency.max_ms:.1f}")
            ),
        )
        for each in outcome.functions
    ]


# ------------------------------------------------------------------ pictures


def by_path(sent: Sequence[Sent]) -> dict[str, list[float]]:
    """Latencies in milliseconds, ascending."""
    found: dict[str, list[float]] = {}
    for each in sent:
        if each.status == OK:
            found.setdefault(each.path or "unknown", []).append(each.took_ns / MS_NS)
    return {path: sorted(values) for path, values in sorted(found.items())}


def _distribution(sent: Sequence[Sent]) -> str:
    """Share of answers by latency, a line a path; latency is on a logarithmic scale."""
    lines = {}
    for path, values in by_path(sent).items():
        ranks = sorted({round(step * (len(values) - 1) / STEPS) for step in range(STEPS + 1)})
        lines[f"{path} ({len(values)})"] = [
            (math.log10(max(values[rank], 0.01)), (rank + 1) / len(values)) for rank in ranks
        ]
    every = [x for points in lines.values() for x, _ in points]
    if not every:
        return ""
    low, high = math.floor(min(every)), math.ceil(max(every)) + (min(every) == max(every))
    ticks = [(power, f"{10.0**power:g} ms") for power in range(low, high + 1)]
    return _chart(lines, (low, max(high, low + 1)), (0.0, 1.0), ticks, [(0.0, "0"), (0.5, "50 %"), (0.98, "98 %")])


def _course(sent: Sequence[Sent]) -> str:
    answered = [each for each in sent if each.status == OK]
    if not answered:
        return ""
    end_s = max(each.due_ns for each in answered) / 1e9 or 1.0
    slots: dict[int, list[float]] = {}
    for each in answered:
        slots.setdefault(min(STEPS - 1, int(each.due_ns / 1e9 / end_s * STEPS)), []).append(each.took_ns / MS_NS)
    lines = {
        name: [(slot * end_s / STEPS, _rank(sorted(values), share)) for slot, values in sorted(slots.items())]
        for name, share in (("P50", 0.5), ("P98", 0.98))
    }
    top = max(y for points in lines.values() for _, y in points) * 1.1
    ticks = [(part * end_s / 4, f"{part * end_s / 4:.3g} s") for part in range(5)]
    return _chart(
        lines, (0.0, end_s), (0.0, top), ticks, [(part * top / 3, f"{part * top / 3:.3g} ms") for part in range(4)]
    )


def _rank(values: Sequence[float], share: float) -> float:
    return values[max(0, math.ceil(share * len(values)) - 1)]


def _chart(
    lines: Mapping[str, Points],
    across: tuple[float, float],
    up: tuple[float, float],
    ticks: Iterable[tuple[float, str]],
    levels: Iterable[tuple[float, str]],
) -> str:
    def x(value: float) -> float:
        return MARGIN + (value - across[0]) / (across[1] - across[0]) * (WIDTH - 2 * MARGIN)

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (value - up[0]) / (up[1] - up[0]) * (HEIGHT - 2 * MARGIN)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value, text in ticks:
        parts.append(
            f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{MARGIN}" y2="{HEIGHT - MARGIN}"/>'
        )
        parts.append(f'<text x="{x(value):.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{escape(text)}</text>')
    for value, text in levels:
        parts.append(
            f'<line class="grid" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(f'<text x="{MARGIN - 4}" y="{y(value) + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        parts.append(f'<text x="{MARGIN + 130 * number}" y="20" style="fill:{colour}">{escape(name)}</text>')
    return "".join(parts) + "</svg>"
