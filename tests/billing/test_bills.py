"""Bills: however a period is looked at, it costs the same, and nobody pays for what is not theirs."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.billing.bills import Bill, By, Question, items, make_bill
from dormouse.billing.database import Database
from dormouse.billing.pricing import FOREVER_NS, Tariff
from dormouse.billing.records import CANCELLED, DEPLOYED, DEVICE, HOST, Beat, Record
from dormouse.billing.tariffs import set_tariff
from dormouse.core.types import FunctionId
from dormouse.errors import ConfigurationFault
from tests.billing.books import BEGAN_NS, SECOND_NS, TARIFF, Books, F, answered, began, ended, known, written

G = FunctionId("g/1")
DAY_S = 86_400


def of(books: Books, **chosen: object) -> Bill:
    return make_bill(books.database, Question(**chosen))  # type: ignore[arg-type]


def test_an_answer_costs_its_caller_the_device_s_time(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(owner="owner"), answered(1, tenant="caller", device_ns=500_000_000))
    bill = of(books)
    assert {name: line.total_nanos for name, line in bill.lines.items()} == {"caller": 500_000}


def test_what_was_not_answered_costs_nothing_and_is_counted(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(), answered(1), answered(2, reason="timeout"), answered(3, reason=CANCELLED))
    total = of(books).total
    assert (total.requests, total.refused, total.cancelled, total.active_nanos) == (1, 1, 1, 1_000)


def test_host_memory_costs_the_owner_a_tenth_of_a_device_s(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(owner="owner"), began(HOST, 0, size_bytes=500), ended(HOST, 60))
    assert of(books).lines["owner"].memory_nanos == 60 * 1_000_000 * 500 // 1_000 // 10


def test_a_device_s_memory_costs_nothing_unless_a_pin_keeps_it(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(F), known(G, pinned=True))
    for function in (F, G):
        books.record(began(DEVICE, 0, function, place="cpu:0"), ended(DEVICE, 10, function, place="cpu:0"))
    lines = of(books, by=By.FUNCTION).lines
    assert [lines[name].memory_nanos for name in (F, G)] == [0, 10 * 1_000_000 * 500 // 1_000]


def test_bound_early_a_function_costs_its_share_of_a_device_as_long_as_it_is_deployed(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(), began(DEPLOYED, 0, size_bytes=250), answered(1, at_s=5), ended(DEPLOYED, 100))
    bill = of(books)
    assert bill.total.early_nanos == 100 * 1_000_000 // 4
    assert bill.total.total_nanos == 1_000


def test_what_goes_on_is_charged_as_far_as_is_recorded(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(), began(HOST, 0, size_bytes=1_000), Beat(BEGAN_NS + 10 * SECOND_NS))
    assert of(books).total.memory_nanos == 10 * 100_000


def test_a_crash_charges_nothing_twice(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(), began(HOST, 0, size_bytes=1_000), Beat(BEGAN_NS + 10 * SECOND_NS))
    books.begin(BEGAN_NS + 8 * SECOND_NS)
    books.record(known(), began(HOST, 10, size_bytes=1_000), Beat(BEGAN_NS + 20 * SECOND_NS))
    assert of(books).total.memory_nanos == 20 * 100_000


def test_an_answer_costs_what_held_when_it_was_given(tmp_path: Path) -> None:
    books = Books(tmp_path)
    dear = Tariff("USD", 3_000_000, 1_000, 100_000, 1_000_000)
    set_tariff(books.database, written(dear, BEGAN_NS + 10 * SECOND_NS), now_ns=BEGAN_NS)
    books.record(known(), answered(1, at_s=9), answered(2, at_s=10))
    assert [item.nanos for item in items(books.database, Question())] == [1_000, 3_000]
    assert of(books).total.active_nanos == 4_000


def test_functions_inside_their_slo_are_counted_and_what_a_request_in_time_costs(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(F), known(G), began(DEPLOYED, 0, F), began(DEPLOYED, 0, G))
    books.record(*(answered(number, F) for number in range(1, 99)), answered(99, F, in_time=False))
    books.record(answered(100, G, in_time=False), answered(101, G), answered(102, G, reason=CANCELLED))
    bill = of(books)
    assert (bill.functions, bill.functions_in_slo) == (2, 1)
    assert bill.nanos_per_request_in_time == 101 * 1_000 // 99


def test_a_function_that_nobody_asked_keeps_its_promise_and_a_removed_one_is_none(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(F), known(G), began(DEPLOYED, 0, F), began(DEPLOYED, 0, G), ended(DEPLOYED, 5, G))
    bill = of(books, since_ns=BEGAN_NS + 6 * SECOND_NS)
    assert (bill.functions, bill.functions_in_slo, bill.nanos_per_request_in_time) == (1, 1, None)


def test_one_tenant_s_bill_has_its_requests_and_its_functions(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(F, "ours"), known(G, "theirs"), began(HOST, 0, F), ended(HOST, 10, F), began(HOST, 0, G))
    books.record(answered(1, F, "theirs"), answered(2, G, "ours"), answered(3, G, "theirs"))
    ours = of(books, tenant="ours", by=By.FUNCTION)
    assert {name: (line.requests, line.memory_nanos > 0) for name, line in ours.lines.items()} == {
        F: (0, True),
        G: (1, False),
    }


def test_a_function_s_bill_has_all_its_versions(tmp_path: Path) -> None:
    books = Books(tmp_path)
    books.record(known(F), known(FunctionId("f/2")), known(G))
    books.record(answered(1, F), answered(2, FunctionId("f/2")), answered(3, G))
    assert list(of(books, function="f", by=By.FUNCTION).lines) == ["f/1", "f/2"]


def test_days_are_those_of_utc(tmp_path: Path) -> None:
    books = Books(tmp_path)
    midnight_s = DAY_S - BEGAN_NS // SECOND_NS % DAY_S
    books.record(known(), answered(1, at_s=midnight_s - 1), answered(2, at_s=midnight_s))
    books.record(began(HOST, midnight_s - 2, size_bytes=1_000), ended(HOST, midnight_s + 3))
    lines = of(books, by=By.DAY).lines
    assert [(day, line.requests, line.memory_nanos) for day, line in lines.items()] == [
        ("2023-11-14", 1, 200_000),
        ("2023-11-15", 1, 300_000),
    ]


def test_a_ledger_without_a_tariff_makes_no_bill(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationFault, match="has no tariff yet"):
        make_bill(Database(tmp_path), Question())


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([F, G]),
        st.sampled_from(["", "acme", "zoo"]),
        st.integers(0, 3 * DAY_S),
        st.integers(0, 10**11),
        st.sampled_from(["resident", "host"]),
        st.sampled_from(["", "timeout", CANCELLED]),
    ),
    max_size=30,
)
SPANS = st.lists(
    st.tuples(st.sampled_from([HOST, DEVICE, DEPLOYED]), st.sampled_from([F, G]), st.integers(0, 10**6)), max_size=8
)


@settings(max_examples=40, deadline=None)
@given(REQUESTS, SPANS, st.integers(1, 3 * DAY_S), st.integers(0, 10**9), st.integers(0, 3 * DAY_S))
def test_every_way_to_look_at_a_period_adds_up_to_the_same(
    requests: list[tuple[FunctionId, str, int, int, str, str]],
    spans: list[tuple[str, FunctionId, int]],
    change_s: int,
    price: int,
    cut_s: int,
) -> None:
    directory = Path(tempfile.mkdtemp())
    try:
        books = Books(directory)
        other = Tariff("USD", price, 1_000, 123_456, 700_001)
        set_tariff(books.database, written(other, BEGAN_NS + change_s * SECOND_NS), now_ns=BEGAN_NS)
        records: list[Record] = [known(F, "acme", pinned=True), known(G, "zoo")]
        for number, (function, tenant, at_s, device_ns, path, reason) in enumerate(requests, 1):
            records.append(answered(number, function, tenant, at_s, device_ns, path=path, reason=reason))
        for place, (kind, function, length_s) in enumerate(spans):
            records.append(began(kind, place, function, 777, str(place)))
            records.append(ended(kind, place + length_s, function, str(place)))
        books.record(*records)
        assert_it_adds_up(books, BEGAN_NS + cut_s * SECOND_NS)
        books.database.close()
    finally:
        shutil.rmtree(directory)


def assert_it_adds_up(books: Books, cut_ns: int) -> None:
    whole = of(books)
    sums = ("requests", "in_time", "refused", "cancelled", "device_ns", "active_nanos", "memory_nanos", "early_nanos")
    for by in By:
        bill = of(books, by=by)
        assert bill.total == whole.total
        assert [sum(getattr(line, name) for line in bill.lines.values()) for name in sums] == [
            getattr(whole.total, name) for name in sums
        ]
    assert sum(item.nanos for item in items(books.database, Question())) == whole.total.active_nanos
    parts = [of(books, since_ns=since, until_ns=until).total for since, until in ((0, cut_ns), (cut_ns, FOREVER_NS))]
    assert sum(part.total_nanos for part in parts) == whole.total.total_nanos
    assert sum(part.early_nanos for part in parts) == whole.total.early_nanos
    tenants = [of(books, tenant=tenant).total.total_nanos for tenant in ("", "acme", "zoo")]
    assert sum(tenants) == whole.total.total_nanos
    assert TARIFF.currency == whole.currency
