"""The text of a scrape: read back by prometheus_client's own parsers, in both formats, and checked by promtool."""

from collections import Counter

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from dormouse.core.ledger import Ledger
from dormouse.core.types import Path, Reason
from dormouse.metrics.books import REMOVED, Books, DeviceBook, FunctionBook
from dormouse.metrics.exposition import Exposition
from tests.metrics.promtool import complaints

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
MS = 1_000_000


def ledger(answers: int, *, in_time: bool = True, took_ms: int = 3) -> Ledger:
    made = Ledger()
    for _ in range(answers):
        made.answered(Path.HOST, took_ms * MS, MS, in_time=in_time)
    return made


def books() -> Books:
    everybodys = ledger(5)
    everybodys.merge(ledger(2, in_time=False, took_ms=100))
    everybodys.refused(Reason.QUEUE_FULL)
    everybodys.loaded(Path.HOST, 1000)
    everybodys.evicted(7 * MS)
    everybodys.promotions_used = 1
    everybodys.guests["globex"] = ledger(2, in_time=False, took_ms=100)
    return Books(
        functions=[
            FunctionBook("f", "acme", everybodys, queued=3, image_bytes=1000, compliant=False),
            FunctionBook("idle", "", Ledger()),
        ],
        gone=[FunctionBook(REMOVED, "acme", ledger(4))],
        devices=[DeviceBook("cuda:0", True, 2, 100, 60, 10, 1, 5, 0, {("peer", "cuda:1"): 77, ("host", "host"): 5})],
        host_capacity_bytes=500,
        oldest_wait_ns=1500 * MS,
    )


def text_of(told: Books, accept: str = "") -> str:
    return "".join(Exposition(Counter({("v2", 200): 9, ("grpc", 429): 1})).pieces(told, accept))


def families(told: Books, accept: str = "") -> dict[str, Metric]:
    parse = openmetrics_families if accept else plain_families
    return {family.name: family for family in parse(text_of(told, accept))}


def values(family: Metric, suffix: str, **labels: str) -> list[float]:
    return [
        sample.value
        for sample in family.samples
        if sample.name == family.name + suffix and labels.items() <= sample.labels.items()
    ]


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_each_tenant_has_its_own_part_and_all_parts_are_the_whole(accept: str) -> None:
    found = families(books(), accept)
    latency = found["dormouse_request_duration_seconds"]
    assert values(latency, "_count", function="f", tenant="acme", path="host") == [5]
    assert values(latency, "_count", function="f", tenant="globex", path="host") == [2]
    assert values(latency, "_sum", function="f", tenant="globex") == [pytest.approx(0.2)]
    assert values(found["dormouse_requests_missed"], "_total", function="f", tenant="globex") == [2]
    assert values(found["dormouse_requests_missed"], "_total", function="f", tenant="acme") == [1]
    assert values(found["dormouse_refusals"], "_total", reason="queue_full") == [1]
    assert values(found["dormouse_requests_in_time"], "_total", function="idle") == [0]


def test_buckets_hold_what_was_not_longer() -> None:
    latency = families(books())["dormouse_request_duration_seconds"]
    by_edge = {
        float(sample.labels["le"]): sample.value
        for sample in latency.samples
        if sample.labels.get("tenant") == "acme" and sample.labels["function"] == "f" and "le" in sample.labels
    }
    assert all(count == (5 if edge >= 0.003 else 0) for edge, count in by_edge.items())


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_node_devices_doors_and_process_are_told_of(accept: str) -> None:
    found = families(books(), accept)
    assert values(found["dormouse_functions"], "") == [2]
    assert values(found["dormouse_functions_compliant"], "") == [1]
    assert values(found["dormouse_queue_oldest_wait_seconds"], "") == [1.5]
    assert values(found["dormouse_memory_capacity_bytes"], "", tier="device", device="cuda:0") == [100]
    assert values(found["dormouse_link_bytes"], "_total", link="peer", source="cuda:1") == [77]
    assert values(found["dormouse_executor_restarts"], "_total") == [2]
    assert values(found["dormouse_answers"], "_total", door="grpc", status="429") == [1]
    assert values(found["process_cpu_seconds"], "_total")[0] > 0


def test_what_is_gone_has_counts_and_nothing_that_is_now() -> None:
    found = families(books())
    assert values(found["dormouse_requests_in_time"], "_total", function=REMOVED) == [4]
    assert values(found["dormouse_function_queue_length"], "", function=REMOVED) == []


def test_promtool_has_nothing_to_say() -> None:
    assert complaints(text_of(books())) == ""


def test_a_name_that_would_end_its_label_does_not() -> None:
    told = Books(functions=[FunctionBook('a"} 1\n%d\\', "", ledger(1))])
    latency = families(told)["dormouse_request_duration_seconds"]
    assert values(latency, "_count", function='a"} 1\n%d\\') == [1]


def test_a_thousand_functions_come_in_pieces_that_let_others_have_their_turn() -> None:
    told = Books(functions=[FunctionBook(f"f{number}", "", ledger(1)) for number in range(1000)])
    pieces = list(Exposition(Counter()).pieces(told, ""))
    assert pieces.count("") >= 50
