"""A ledger for tests: what happened is said in a line each, at times that are told."""

from pathlib import Path

from dormouse.billing.database import Database
from dormouse.billing.pricing import Tariff
from dormouse.billing.records import Began, Ended, FunctionKnown, Record, RequestEnded
from dormouse.billing.tariffs import Written, set_tariff
from dormouse.billing.writer import LedgerWriter
from dormouse.core.types import FunctionId, Ns

BEGAN_NS: Ns = 1_700_000_000_000_000_000
SECOND_NS: Ns = 1_000_000_000
F = FunctionId("f/1")
TARIFF = Tariff("USD", 1_000_000, 1_000, 100_000, 1_000_000)
"""A device of 1,000 bytes for 0.001 a second; a tenth of that for host memory."""


class Books:
    """One life after another over one state directory."""

    def __init__(self, state_dir: Path, tariff: Tariff = TARIFF) -> None:
        self.state_dir = state_dir
        self.database = Database(state_dir)
        set_tariff(self.database, written(tariff, 0), now_ns=0)
        self.begin()

    def begin(self, now_ns: Ns = BEGAN_NS) -> None:
        """As a start after a crash."""
        self.life, self.began_ns, segment = self.database.begin_life(now_ns)
        self.writer = LedgerWriter(self.database.directory, self.life, "process", after=segment)

    def record(self, *records: Record) -> None:
        assert self.writer.enter(records) is None
        self.database.take_in()

    def rows(self, statement: str) -> list[tuple[object, ...]]:
        return self.database.connection.execute(statement).fetchall()


def written(tariff: Tariff, from_ns: Ns | None) -> Written:
    fields = {name: getattr(tariff, name) for name in Tariff.__struct_fields__}
    return Written(fields, from_ns)


def known(function: FunctionId = F, owner: str = "", size_bytes: int = 500, *, pinned: bool = False) -> FunctionKnown:
    return FunctionKnown(function, owner, BEGAN_NS, size_bytes, size_bytes, SECOND_NS, 980_000, pinned)


def answered(  # what a test says of a request, and nothing else
    number: int,
    function: FunctionId = F,
    tenant: str = "",
    at_s: int = 1,
    device_ns: Ns = 1_000_000,
    *,
    in_time: bool = True,
    path: str = "resident",
    reason: str = "",
) -> RequestEnded:
    at_ns = BEGAN_NS + at_s * SECOND_NS
    late = in_time and not reason
    return RequestEnded(number, function, tenant, at_ns, 5_000_000, 1_000_000, device_ns, path, late, 32, 64, reason)


def began(kind: str, at_s: int, function: FunctionId = F, size_bytes: int = 500, place: str = "") -> Began:
    return Began(kind, function, place, BEGAN_NS + at_s * SECOND_NS, size_bytes, "")


def ended(kind: str, at_s: int, function: FunctionId = F, place: str = "") -> Ended:
    return Ended(kind, function, place, BEGAN_NS + at_s * SECOND_NS, "")
