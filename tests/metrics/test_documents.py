"""The dashboard, the rules and the settings that we hand out: they parse, and ask only for what a server tells."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from dormouse.core.ledger import Ledger
from dormouse.core.types import Path as Way
from dormouse.core.types import Reason
from dormouse.metrics import families
from dormouse.metrics.books import Books, DeviceBook, FunctionBook
from dormouse.metrics.exposition import Exposition
from tests.metrics.promtool import checked

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "grafana" / "dormouse.json"
RULES = DOCS / "prometheus" / "alerts.yml"
NAME = re.compile(r"\b(?:dormouse|process|python)_[a-z0-9_]+")
TYPES = {"row", "stat", "timeseries", "heatmap"}


def told() -> set[str]:
    """The names of all samples of a server that has seen everything."""
    ledger = Ledger()
    ledger.answered(Way.HOST, 1, 1, in_time=True)
    ledger.refused(Reason.TIMEOUT)
    ledger.loaded(Way.HOST, 1)
    ledger.promotions_used = 1
    device = DeviceBook("cuda:0", link_bytes={("host", "host"): 1})
    books = Books([FunctionBook("f", "", ledger)], devices=[device])
    text = "".join(Exposition(Counter({("v2", 200): 1})).pieces(books, ""))
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def questions() -> Iterator[str]:
    for panel in panels():
        for target in panel.get("targets", ()):
            yield target["expr"]


def as_rules(expressions: list[str]) -> str:
    """The same, as rules that only promtool reads; what Grafana fills in is filled in."""
    rules = []
    for number, expression in enumerate(expressions):
        plain = re.sub(r"\$__\w+", "5m", expression)
        rules.append({"record": f"asked:{number}", "expr": re.sub(r"\$\w+", ".*", plain)})
    return json.dumps({"groups": [{"name": "dashboard", "rules": rules}]})


def test_the_dashboard_asks_only_for_what_there_is() -> None:
    variables = json.dumps(json.loads(DASHBOARD.read_text())["templating"])
    asked = {name for text in (*questions(), variables) for name in NAME.findall(text)}
    assert asked <= told()
    assert len(asked) > 20


def test_every_question_of_the_dashboard_is_one(tmp_path: Path) -> None:
    file = tmp_path / "rules.yml"
    file.write_text(as_rules(list(questions())))
    assert checked("rules", file) == ""


def test_what_is_no_question_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "rules.yml"
    file.write_text(as_rules(["sum(dormouse_functions"]))
    assert checked("rules", file) != ""


def test_the_dashboard_has_the_form_that_grafana_reads() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time", "annotations"} <= dashboard.keys()
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(numbers) == len(set(numbers))
    for panel in dashboard["panels"]:
        assert panel["type"] in TYPES
        assert panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert [target["refId"] for target in panel["targets"]] == ["A", "B", "C"][: len(panel["targets"])]


def test_no_panel_lies_over_another() -> None:
    for one, other in combinations([panel["gridPos"] for panel in panels()], 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


def test_the_headline_is_how_many_functions_are_inside_their_slo() -> None:
    first = next(panel for panel in panels() if panel["type"] != "row")
    assert first["title"] == "Functions inside their SLO"


def test_rules_are_rules_and_ask_only_for_what_there_is() -> None:
    assert checked("rules", RULES) == ""
    assert set(NAME.findall(RULES.read_text())) <= told()


def test_the_settings_for_prometheus_are_settings(tmp_path: Path) -> None:
    key = tmp_path / "dormouse.key"
    key.write_text("key")
    settings = tmp_path / "prometheus.yml"
    text = (DOCS / "prometheus" / "prometheus.yml").read_text()
    settings.write_text(text.replace("/etc/prometheus/dormouse.key", str(key)))
    (tmp_path / "alerts.yml").write_text(RULES.read_text())
    assert checked("config", settings) == ""


@pytest.mark.parametrize("name", sorted({*families.COUNTERS, *families.GAUGES, families.LATENCY}))
def test_every_metric_of_functions_is_in_the_document(name: str) -> None:
    assert f"`{name}" in (DOCS / "metrics.md").read_text()


def test_every_other_metric_is_in_the_document_too() -> None:
    text = (DOCS / "metrics.md").read_text()
    missing = [name for name in told() if name.startswith("dormouse_") and f"`{name}" not in text]
    assert [name for name in missing if not name.endswith(("_bucket", "_sum", "_count"))] == []
