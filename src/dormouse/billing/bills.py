"""Bills: what a period cost, by whom or what, down to the request, from the ledger's records and the tariffs.

An answer costs its caller, at the tariff of the moment when it was given. Memory costs the owner of the function.
"""

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum

from msgspec import Struct

from dormouse.billing.database import Database, request_of
from dormouse.billing.pricing import REQUEST_NANOS, SECOND_NS, Held, Valid, held_nanos, spans
from dormouse.billing.records import CANCELLED, DEPLOYED, DEVICE, HOST, request_name
from dormouse.billing.tariffs import history
from dormouse.core.types import Bytes, Ns
from dormouse.errors import ConfigurationFault


class By(StrEnum):
    """What a line of a bill is."""

    TENANT = "tenant"
    FUNCTION = "function"
    PATH = "path"
    DAY = "day"


DAY_NS: Ns = 86_400 * SECOND_NS
MEMORY = "(memory)"
"""Where a bill by path puts what memory costs."""


class Question(Struct, frozen=True):
    """Which bill. A period is from its first moment to before its last."""

    since_ns: Ns = 0
    until_ns: Ns = 2**62
    tenant: str | None = None
    """None: all. Empty: the server's own."""
    function: str | None = None
    by: By = By.TENANT


class Line(Struct):
    """One row, and the sum of all. Money in billionths of the currency."""

    requests: int = 0
    """Answered."""
    in_time: int = 0
    refused: int = 0
    cancelled: int = 0
    device_ns: Ns = 0
    active_nanos: int = 0
    memory_nanos: int = 0
    early_nanos: int = 0

    @property
    def total_nanos(self) -> int:
        return self.active_nanos + self.memory_nanos


class Bill(Struct):
    """``functions_in_slo`` of ``functions`` that were deployed in the period, or asked."""

    question: Question
    currency: str
    upto_ns: Ns
    """All that happened before is in it."""
    pruned_ns: Ns
    """What happened before is forgotten."""
    functions: int
    functions_in_slo: int
    total: Line
    lines: dict[str, Line]

    @property
    def nanos_per_request_in_time(self) -> int | None:
        return self.total.total_nanos // self.total.in_time if self.total.in_time else None


def make_bill(database: Database, question: Question) -> Bill:
    """Raises ConfigurationFault where there is nothing to bill by."""
    tariffs = history(database)
    if not tariffs:
        raise ConfigurationFault(f"{database.file} has no tariff yet: nothing was ever served here")
    lines: defaultdict[str, Line] = defaultdict(Line)
    served: defaultdict[int, Line] = defaultdict(Line)
    """By function, for the sake of its SLO."""
    for key, function, line in _answers(database, question, tariffs):
        _add(lines[key], line)
        _add(served[function], line)
    for key, line in _memory(database, question, tariffs):
        _add(lines[key], line)
    total = Line()
    for line in lines.values():
        _add(total, line)
    functions, in_slo = _compliance(database, question, served)
    upto_ns = known_upto(database)
    pruned_ns = database.connection.execute("SELECT pruned_ns FROM progress").fetchone()[0]
    currency = tariffs[-1].tariff.currency
    return Bill(question, currency, upto_ns, pruned_ns, functions, in_slo, total, dict(sorted(lines.items())))


def known_upto(database: Database) -> Ns:
    """All that happened before is in the ledger."""
    upto_ns: Ns = database.connection.execute("SELECT COALESCE(MAX(last_ns), 0) FROM lives").fetchone()[0]
    return upto_ns


def _add(to: Line, line: Line) -> None:
    for field in Line.__struct_fields__:
        setattr(to, field, getattr(to, field) + getattr(line, field))


# ------------------------------------------------------------------ answers

_KEYS = {
    By.TENANT: "requests.tenant",
    By.FUNCTION: "function",
    By.PATH: "path",
    By.DAY: f"ended_ns / {DAY_NS}",
}


def _answers(database: Database, question: Question, tariffs: list[Valid]) -> Iterator[tuple[str, int, Line]]:
    """Every group's key, function and sums, within one tariff each."""
    names = dict(database.connection.execute("SELECT id, text FROM names"))
    functions = _function_names(database)
    cancelled = next((number for number, text in names.items() if text == CANCELLED), -1)
    where, parameters = _chosen(question)
    statement = f"""SELECT {_KEYS[question.by]}, function, COUNT(*) FILTER (WHERE reason = 0), SUM(in_time),
        COUNT(*) FILTER (WHERE reason NOT IN (0, :cancelled)), COUNT(*) FILTER (WHERE reason = :cancelled),
        SUM(device_ns), COALESCE(SUM({REQUEST_NANOS}) FILTER (WHERE reason = 0), 0)
        FROM requests WHERE ended_ns >= :since AND ended_ns < :until{where} GROUP BY 1, 2"""
    for from_ns, to_ns, tariff in spans(tariffs):
        period = {"since": max(question.since_ns, from_ns), "until": min(question.until_ns, to_ns)}
        prices = {"price": tariff.device_second_nanos, "cancelled": cancelled}
        for key, function, *sums in database.connection.execute(statement, {**parameters, **period, **prices}):
            yield _key_text(question.by, key, names, functions), function, Line(*sums)


def _function_names(database: Database) -> dict[int, str]:
    rows = database.connection.execute("SELECT id, name, revision FROM functions")
    return {number: f"{name}/{revision}" for number, name, revision in rows}


def _chosen(question: Question) -> tuple[str, dict[str, object]]:
    """What the filters add to a condition on requests."""
    where, parameters = "", {}
    if question.tenant is not None:
        where += " AND requests.tenant = (SELECT id FROM names WHERE text = :tenant)"
        parameters["tenant"] = question.tenant
    if question.function is not None:
        where += " AND function IN (SELECT id FROM functions WHERE name = :name)"
        parameters["name"] = question.function
    return where, dict(parameters)


def _key_text(by: By, key: int, names: dict[int, str], functions: dict[int, str]) -> str:
    match by:
        case By.FUNCTION:
            return functions[key]
        case By.DAY:
            return _day_text(key)
        case _:
            return names[key]


def _day_text(day: int) -> str:
    return datetime.fromtimestamp(day * 86_400, UTC).strftime("%Y-%m-%d")


# ------------------------------------------------------------------ one by one


class Item(Struct, frozen=True):
    """One request. Durations in nanoseconds, times since 1970."""

    request: str
    tenant: str
    function: str
    arrived_ns: Ns
    ended_ns: Ns
    path: str
    queued_ns: Ns
    device_ns: Ns
    in_time: bool
    in_bytes: Bytes
    out_bytes: Bytes
    reason: str
    nanos: int


def items(database: Database, question: Question) -> Iterator[Item]:
    """Every request of the period, in the order in which they ended; together they cost what the bill says."""
    where, parameters = _chosen(question)
    statement = f"""SELECT requests.id, tenants.text, name || '/' || revision, ended_ns - latency_ns, ended_ns,
        paths.text, queued_ns, device_ns, in_time, in_bytes, out_bytes, reasons.text,
        CASE reason WHEN 0 THEN {REQUEST_NANOS} ELSE 0 END FROM requests
        JOIN functions ON functions.id = function JOIN names AS tenants ON tenants.id = requests.tenant
        JOIN names AS paths ON paths.id = path JOIN names AS reasons ON reasons.id = reason
        WHERE ended_ns >= :since AND ended_ns < :until{where} ORDER BY ended_ns, requests.id"""
    for from_ns, to_ns, tariff in spans(history(database)):
        period = {"since": max(question.since_ns, from_ns), "until": min(question.until_ns, to_ns)}
        rows = database.connection.execute(statement, {**parameters, **period, "price": tariff.device_second_nanos})
        for key, *row in rows:
            row[7] = bool(row[7])  # SQLite has no such type
            yield Item(request_name(*request_of(key)), *row)


# ------------------------------------------------------------------ memory


def _memory(database: Database, question: Question, tariffs: list[Valid]) -> Iterator[tuple[str, Line]]:
    """What functions cost by lying in memory, and what they would have cost if they had been bound to a device."""
    statement = """SELECT kind, name, revision, owner, pinned, intervals.size_bytes, intervals.began_ns,
        COALESCE(ended_ns, lives.last_ns) FROM intervals JOIN functions ON functions.id = function
        JOIN lives ON lives.number = life WHERE (ended_ns IS NULL OR ended_ns > ?) AND intervals.began_ns < ?"""
    for row in database.connection.execute(statement, (question.since_ns, question.until_ns)):
        kind, name, revision, owner, pinned, size_bytes, began_ns, ended_ns = row
        if question.tenant not in (None, owner) or question.function not in (None, name):
            continue
        held = Held(size_bytes, began_ns, ended_ns)
        for day, period in _pieces(question, held):
            key = {By.TENANT: owner, By.FUNCTION: f"{name}/{revision}", By.DAY: day, By.PATH: MEMORY}[question.by]
            yield key, _held_line(kind, pinned, held, tariffs, period)


def _held_line(kind: str, pinned: int, held: Held, tariffs: list[Valid], period: tuple[Ns, Ns]) -> Line:
    if kind == DEPLOYED:
        return Line(early_nanos=held_nanos(held, tariffs, "", period))
    if kind == HOST:
        return Line(memory_nanos=held_nanos(held, tariffs, "idle_ppm", period))
    if kind == DEVICE and pinned:
        return Line(memory_nanos=held_nanos(held, tariffs, "pinned_ppm", period))
    return Line()


def _pieces(question: Question, held: Held) -> Iterator[tuple[str, tuple[Ns, Ns]]]:
    """The interval's part of the period, cut at midnights where days are asked for."""
    since_ns, until_ns = max(question.since_ns, held.began_ns), min(question.until_ns, held.ended_ns)
    while since_ns < until_ns:
        end_ns = min(until_ns, (since_ns // DAY_NS + 1) * DAY_NS) if question.by is By.DAY else until_ns
        yield _day_text(since_ns // DAY_NS), (since_ns, end_ns)
        since_ns = end_ns


# ------------------------------------------------------------------ SLOs


def _compliance(database: Database, question: Question, served: dict[int, Line]) -> tuple[int, int]:
    """How many functions there were, and how many kept their promise. Requests that callers gave up do not count."""
    statement = """SELECT id, name, owner, share_ppm, EXISTS (SELECT * FROM intervals WHERE function = functions.id AND
        kind = 'deployed' AND (ended_ns IS NULL OR ended_ns > ?) AND began_ns < ?) FROM functions"""
    known = in_slo = 0
    for number, name, owner, share_ppm, present in database.connection.execute(
        statement, (question.since_ns, question.until_ns)
    ):
        line = served.get(number)
        chosen = question.tenant in (None, owner) and question.function in (None, name)
        if line is None and not (present and chosen):
            continue
        known += 1
        ended = 0 if line is None else line.requests + line.refused
        in_slo += line is None or line.in_time * 1_000_000 >= ended * share_ppm
    return known, in_slo
