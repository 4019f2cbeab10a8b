"""``dormouse top``: what it prints, how it sorts, and how it ends."""

import os
import pty
import signal
import subprocess
import sys

import pytest
from msgspec.structs import replace
from rich.console import Console
from typer.testing import CliRunner

from dormouse.cli.commands import app
from dormouse.cli.screen import Sort, in_order, screen, sparks
from dormouse.watch.picture import Device, Host, Load, Picture, Place, Point, Waiting, Watched, totals_of
from tests.shell.running import RunningServer
from tests.shell.tenanted import ACME, MINE, THEIRS

MIB = 1024 * 1024
ROW = Watched("f", "1", "", False, "READY", "host", "none", 10 * MIB, 0, 100.0, 98.0, requests=10, in_time=10)


def picture(*rows: Watched, **changes: object) -> Picture:
    functions = {row.name: row for row in rows}
    return replace(Picture(10_000, 5000, 1, functions, {}, totals_of(functions)), **changes)


def printed(shown: Picture, height: int | None = None, notice: str = "", sort: Sort = Sort.TROUBLE) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(screen(shown, sort, height, notice))
    return capture.get()


def test_the_worst_come_first() -> None:
    rows = [
        replace(ROW, name="busy", requests_per_s=9.0),
        replace(ROW, name="waits", queued=2),
        replace(ROW, name="late", compliant=False),
        replace(ROW, name="idle"),
    ]
    assert [row.name for row in in_order(rows, Sort.TROUBLE)] == ["late", "waits", "busy", "idle"]
    assert [row.name for row in in_order(rows, Sort.NAME)] == ["busy", "idle", "late", "waits"]
    assert in_order(rows, Sort.WAITING)[0].name == "waits"


def test_it_shows_devices_with_loads_the_queue_and_the_headline() -> None:
    places = (Place("f", 32 * MIB, "resident"), Place("g", 16 * MIB, "loading"))
    device = Device("cuda:0", "cuda:0", "", True, 64 * MIB, MIB, 16 * MIB, executing="f", together=3, places=places)
    gone = Device("cuda:1", "cuda:1", "", False, restarts=2)
    load = Load("g", "cuda:0", "host", 16 * MIB, 9_990, 40, helpers=("cuda:1",))
    shown = picture(
        replace(ROW, compliant=False),
        replace(ROW, name="g", on=("cuda:0",)),
        devices=(device, gone),
        loads=(load,),
        queue=(Waiting("g", 4, 9_500, "its image is on its way to cuda:0"),),
        host=Host(100 * MIB, 30 * MIB),
    )
    text = printed(shown)
    assert "1 of 2 functions inside their SLO" in text
    assert "█" * 20 + "░" * 10 + "·" * 10 + " 48.0 MiB of 64.0 MiB" in text
    assert "▶ f x3" in text
    assert "g from host memory and over cuda:1 to cuda:0, 16.0 MiB, about 25%, 30 ms left" in text
    assert "is gone, a new process is starting, 2 restarts" in text
    assert "g x4, 500 ms  its image is on its way to cuda:0" in text
    assert "COST" not in text


def test_costs_have_a_column_where_there_is_a_ledger() -> None:
    row = replace(ROW, cost_nanos=2_500_000, cost_in_time=10)
    text = printed(picture(row, currency="EUR"))
    assert "COST" in text and "0.0025" in text
    assert "0.00025 EUR a request in time" in text


def test_functions_give_way_where_the_terminal_is_small() -> None:
    rows = [replace(ROW, name=f"f{number:02d}") for number in range(40)]
    text = printed(picture(*rows), height=14)
    assert len(text.splitlines()) <= 14
    assert "and 30 more" in text


def test_without_functions_it_says_how_to_deploy_one() -> None:
    assert "dormouse deploy" in printed(picture())


def test_what_others_chose_is_no_markup() -> None:
    hostile = "[red]x[/red]"
    row = replace(ROW, name=hostile, tier=hostile)
    shown = picture(row, queue=(Waiting(hostile, 1, 0, hostile),))
    assert printed(shown).count(hostile) == 4


def test_sparks_stand_at_half_height_at_the_deadline() -> None:
    points = [None, Point(0, 1, 1, 1), Point(100, 1, 1, 1), Point(500, 1, 1, 0), Point(0, 0, 2, 0)]
    assert sparks(points, 100).plain == " ▁▅██"


def test_where_there_is_no_terminal_it_prints_once(server: RunningServer) -> None:
    result = CliRunner().invoke(app, ["top", "--url", server.url, "--sort", "name"])
    assert result.exit_code == 0
    assert "functions inside their SLO" in result.output and "NAME ↓" in result.output
    assert result.output.count("echo_INT32") == 1


def test_a_tenant_sees_its_own(tenanted_server: RunningServer) -> None:
    result = CliRunner().invoke(app, ["top", "--url", tenanted_server.url, "--key", ACME])
    assert MINE in result.output and THEIRS not in result.output


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_missing_or_wrong_key_is_one_line(tenanted_server: RunningServer, key: str) -> None:
    result = CliRunner().invoke(app, ["top", "--url", tenanted_server.url, "--key", key])
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1 and "key" in result.output


def test_in_a_terminal_it_goes_on_until_ctrl_c_and_ends_cleanly(server: RunningServer) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dormouse.cli", "top", "--url", server.url]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        seen = b""
        while b"echo_INT32" not in seen:
            seen += os.read(ours, 65536)
        assert b"\x1b[?1049h" in seen, "on a screen of its own"
        process.send_signal(signal.SIGINT)
        try:
            while more := os.read(ours, 65536):
                seen += more
        except OSError:  # so Linux says that nobody has the other end any more
            pass
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None and process.stderr.read() == b""
    assert b"\x1b[?1049l" in seen, "and the old one is back"
    os.close(ours)
