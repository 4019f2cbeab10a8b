"""``dormouse simulate`` and ``dormouse replay``, as typed."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dormouse.cli.commands import app
from dormouse.core.types import Settings
from dormouse.journal import FORMAT, JournalWriter
from dormouse.sim import campaign

SCENARIO = """
seed = 5
[machine]
like = "h200"
device_bytes = 1000000000
[functions]
count = 8
models = ["resnet-152"]
[workload]
duration_s = 10
requests_per_s = 40
"""


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(SCENARIO)
    return file


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    file = tmp_path / "history.journal"
    campaign.run(3, file)
    return file


def test_simulate_prints_and_writes_what_a_scenario_comes_to(file: Path, tmp_path: Path) -> None:
    written = tmp_path / "outcome.json"
    code, output = run("simulate", file, "--json", written)
    assert code == 0
    outcome = json.loads(written.read_text())
    assert f"{outcome['compliant']} of 8" in output
    assert outcome["requests"] > 300
    assert sum(path["share"] for path in outcome["paths"].values()) == pytest.approx(1)


def test_simulate_twice_gives_the_same(file: Path, tmp_path: Path) -> None:
    outcomes = []
    for name in ("one", "two"):
        run("simulate", file, "--json", tmp_path / name)
        outcome = json.loads((tmp_path / name).read_text())
        outcomes.append({key: value for key, value in outcome.items() if "wall" not in key})
    assert outcomes[0] == outcomes[1]


def test_find_capacity_says_what_it_tried(file: Path, tmp_path: Path) -> None:
    written = tmp_path / "capacity.json"
    file.write_text(SCENARIO.replace("= 40", "= 200").replace("duration_s = 10", "duration_s = 3"))
    code, output = run("simulate", file, "--find-capacity", "--json", written)
    assert code == 0
    found = json.loads(written.read_text())["functions"]
    assert f"{found} functions: {found} compliant" in output
    assert output.endswith(f"all compliant up to {found} functions\n")


def test_a_bad_scenario_is_one_line_and_status_2(file: Path) -> None:
    file.write_text(SCENARIO + "shape = 3\n")
    code, output = run("simulate", file)
    assert code == 2
    assert output.startswith(f"error: scenario {file} line 12: workload.shape: ")
    assert output.count("\n") == 1


def test_a_picture_is_drawn_or_what_is_missing_said(file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "latency.png"
    code, output = run("simulate", file, "--plot", picture)
    if importlib.util.find_spec("matplotlib") is None:
        assert (code, output.splitlines()[-1]) == (
            2,
            "error: --plot needs matplotlib: pip install 'dormouse[plot]'",
        )
    else:
        assert code == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_journal_replays(journal: Path) -> None:
    code, output = run("replay", journal)
    assert code == 0
    assert output.endswith("events replayed, every command the same\n")


def test_a_journal_that_was_cut_off_replays_up_to_there(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:-3])
    code, output = run("replay", journal)
    assert code == 0
    events = int(output.split()[0])
    assert output.splitlines()[1] == f"the journal was cut off after event {events}"


def test_a_journal_that_tells_other_commands_fails_and_shows_them(journal: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.journal"
    head, _, rest = journal.read_bytes().partition(b"\n")
    settings = json.loads(head)
    settings["settings"]["queueing"] = "fifo"
    settings["settings"]["queue_length"] = 0
    other.write_bytes(json.dumps(settings).encode() + b"\n" + rest)
    code, output = run("replay", other)
    assert code == 1
    assert "brought forth other commands than recorded" in output


def test_a_journal_of_another_version_is_refused_with_both(journal: Path) -> None:
    head, _, rest = journal.read_bytes().partition(b"\n")
    told = json.loads(head) | {"format": FORMAT + 6}
    journal.write_bytes(json.dumps(told).encode() + b"\n" + rest)
    code, output = run("replay", journal)
    assert code == 2
    assert f"has journal format {FORMAT + 6}, this version reads {FORMAT}" in output


def test_what_is_no_journal_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("hello\n")
    assert run("replay", file)[0] == 2
    assert run("replay", tmp_path / "none") == (2, f"error: journal {tmp_path / 'none'} is not there\n")


def test_a_failing_campaign_prints_its_seed_and_keeps_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> None:
        raise AssertionError("the moon is full")

    monkeypatch.setattr("dormouse.sim.invariants.check", broken)
    monkeypatch.setattr("sys.argv", ["campaign", "--seeds", "1", "--first", "9", "--keep", str(tmp_path)])
    assert campaign.main() == 1
    said = capsys.readouterr().err
    assert "the moon is full" in said
    assert "seed 9 failed" in said
    assert (tmp_path / "seed-9.journal").stat().st_size > 0


def test_a_campaign_that_holds_says_what_it_saw(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["campaign", "--seeds", "4", "--jobs", "1"])
    assert campaign.main() == 0
    assert "4 seeds, no invariant broken, every request ended once" in capsys.readouterr().out


def test_an_empty_history_replays(tmp_path: Path) -> None:
    file = tmp_path / "empty.journal"
    JournalWriter(file, Settings(host_capacity_bytes=1)).close()
    assert run("replay", file) == (0, "0 events replayed, every command the same\n")
