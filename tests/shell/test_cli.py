"""The command line, against a real server: what it prints, and its exit status."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dormouse.cli.commands import app
from dormouse.cli.manifests import Changes, manifest_of
from dormouse.cli.tables import eager_lines
from dormouse.config import SETTINGS_FILE, Config
from dormouse.core.types import Pin
from dormouse.errors import ConfigurationFault
from dormouse.serving import bind
from tests.shell.running import RunningServer

Dormouse = Callable[..., tuple[int, str]]
"""Arguments, and perhaps ``stdin``, to exit status and output."""


def run(*arguments: str, stdin: str | None = None, server: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, input=stdin, env={"DORMOUSE_SERVER": server})
    assert "Traceback" not in result.output
    return result.exit_code, result.output


@pytest.fixture
def dormouse(server: RunningServer) -> Dormouse:
    def run_there(*arguments: str, stdin: str | None = None) -> tuple[int, str]:
        return run(*arguments, stdin=stdin, server=server.url)

    return run_there


# ------------------------------------------------------------------ deploy, check, rm, load, unload


def test_deploy_says_the_version(dormouse: Dormouse, server: RunningServer) -> None:
    arguments = (
        "deploy",
        "arithmetic:affine",
        "--name",
        "mine",
        "--arg",
        "scale=10",
        "--pin",
        "host",
        "--slo-ms",
        "80",
    )
    assert dormouse(*arguments) == (0, "deployed mine version 1\n")
    assert dormouse(*arguments, "--percentile", "95", "--timeout-ms", "500") == (0, "deployed mine version 2\n")
    manifest = server.node.deployed["mine"].manifest
    assert (manifest.pin, manifest.arguments) == (Pin.HOST, {"scale": 10})
    assert (manifest.slo.deadline_ms, manifest.slo.percentile, manifest.limits.timeout_ms) == (80, 95, 500)
    assert dormouse("deploy", "arithmetic:affine", "--name", "tuned", "--like", "mine")[0] == 0
    assert server.node.deployed["tuned"].manifest.like == "mine"


def test_deploy_takes_a_manifest(dormouse: Dormouse, server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nsource = "arithmetic:upper"\npin = "device"\n[slo]\ndeadline_ms = 5\n')
    assert dormouse("deploy", str(file), "--slo-ms", "7") == (0, "deployed mine version 1\n")
    manifest = server.node.deployed["mine"].manifest
    assert (manifest.pin, manifest.slo.deadline_ms) == (Pin.DEVICE, 7)


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (("arithmetic:nothing",), 2, "source 'arithmetic:nothing' is none of this node's programs"),
        (("no/such/model",), 2, "no/such/model does not exist; give a directory"),
        (("no/such/manifest.toml",), 2, "no/such/manifest.toml cannot be read: No such file or directory"),
        (("arithmetic:upper", "--name", "a b"), 2, "name = 'a b' cannot be used"),
        (("arithmetic:upper", "--dtype", "int4"), 2, "dtype = 'int4' cannot be used"),
        (("arithmetic:upper", "--arg", "x"), 2, "--arg 'x' cannot be used; expected key=value"),
        (("arithmetic:upper", "--arg", "x=" + 2000 * "["), 2, "--arg x cannot be used: its value is nested too deeply"),
        (("",), 2, "the source is empty; give a directory"),
        (("arithmetic:upper", "--slo-ms", "-1"), 2, "slo.deadline_ms = -1.0 cannot be used"),
        (("arithmetic:upper", "--like", "x", "--dtype", "float16"), 2, "like = 'x' cannot be used; expected no inputs"),
    ],
)
def test_deploy_says_what_cannot_be_used(
    dormouse: Dormouse, arguments: tuple[str, ...], status: int, complaint: str
) -> None:
    code, output = dormouse("deploy", *arguments)
    assert code == status
    assert output.startswith("error: ")
    assert complaint in output
    assert output.count("\n") == 1


def test_check_says_what_would_happen(dormouse: Dormouse, server: RunningServer) -> None:
    before = dict(server.node.deployed)
    assert dormouse("check", "arithmetic:affine") == (
        0,
        "affine: replaces version 1\n"
        "  4.0 KiB, numpy\n"
        "  input x  FP32 [-1, 3]\n"
        "  output y  FP32 [-1, 3]\n"
        "  output total  FP64 [-1]\n"
        "  would be admitted\n",
    )
    assert server.node.deployed == before


def test_check_fails_when_deploy_would(dormouse: Dormouse, tmp_path: Path) -> None:
    file = tmp_path / "huge.toml"
    file.write_text('name = "huge"\nsource = "arithmetic:affine"\n[arguments]\nscale = "huge"\n')
    code, output = dormouse("check", str(file))
    assert code == 1
    assert output.startswith("huge: a new function\n")
    assert "error: would be refused: needs 9.0 GiB of host memory, 4.0 GiB are there\n" in output


def test_rm_load_and_unload(dormouse: Dormouse, server: RunningServer) -> None:
    assert dormouse("unload", "affine") == (0, "unloaded affine\n")
    assert not server.node.function_ready("affine")
    assert dormouse("load", "affine") == (0, "loaded affine\n")
    assert server.node.function_ready("affine")
    assert dormouse("rm", "affine") == (0, "removed affine\n")
    for command in ("rm", "load", "unload"):
        assert dormouse(command, "affine") == (1, "error: no function 'affine'\n")


# ------------------------------------------------------------------ ps


def test_ps_shows_every_function_and_the_node(dormouse: Dormouse) -> None:
    dormouse("call", "affine", "--input", "x=[[1, 2, 3]]")
    dormouse("unload", "upper")
    code, output = dormouse("ps")
    assert code == 0
    lines = output.splitlines()
    headings = ["NAME", "VERSION", "TIER", "SIZE", "PIN", "PATH", "REQUESTS", "P50", "ms", "P98", "ms"]
    assert lines[0].split() == [*headings, "EVICTED", "IN", "SLO"]
    assert ["affine", "1", "host", "4.0", "KiB", "host", "1", "1.5", "2.5", "3", "yes"] in map(str.split, lines)
    assert ["upper", "1", "unavailable", "4.0", "KiB", "0", "3"] in map(str.split, lines)
    assert "cpu:0 32.0 MiB of 64.0 MiB, 1 functions resident, 1.0 MiB in last chunks unused" in lines
    assert [line for line in lines if "graphs" in line] == ["without CUDA graphs: upper: text goes in"]


def test_what_runs_without_graphs_is_one_line_a_reason() -> None:
    def row(number: int, reason: str) -> dict[str, object]:
        graphs = {f"cuda:{card}": {"shapes": 0, "eager_because": reason} for card in (0, 1)}
        return {"name": f"f{number}", "graphs": graphs}

    rows = [*(row(number, "it streams its answer") for number in range(7)), row(7, ""), row(8, "text goes in")]
    rows.append({"name": "f9"})
    assert eager_lines(rows) == [
        "without CUDA graphs: f0, f1, f2, f3, f4 and 2 more: it streams its answer",
        "without CUDA graphs: f8: text goes in",
    ]


def test_ps_as_json_is_what_the_server_knows(dormouse: Dormouse) -> None:
    code, output = dormouse("ps", "--json")
    assert code == 0
    answer = json.loads(output)
    assert {row["name"] for row in answer["functions"]} >= {"affine", "upper"}
    assert answer["node"]["host"]["capacity_bytes"] == 2**30


# ------------------------------------------------------------------ call


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("affine", "--input", "x=[[1, 2.5, 3]]"), "y  FP32 1x3\n  [[3. 6. 7.]]\ntotal  FP64 1\n  [16.]\n"),
        (("upper", "--text", "a dormouse"), "y  BYTES 1x1\n  A DORMOUSE\n"),
        (("upper", "--input", 'x=[["a"], ["b"]]'), "y  BYTES 2x1\n  A\n  B\n"),
        (("echo_FP16", "--input", "x=[[0.5, -2]]"), "y  FP16 1x2\n  [[ 0.5 -2. ]]\n"),
        (
            ("echo_BF16", "--input", "x=[[0.5, 1.00390625, 1.01171875]]"),
            "y  BF16 1x3\n  [[0.5      1.       1.015625]]\n",
        ),
        (("echo_BOOL", "--input", "x=[[true, 0]]"), "y  BOOL 1x2\n  [[ True False]]\n"),
        (("echo_UINT64", "--input", "x=[[18446744073709551615]]"), "y  UINT64 1x1\n  [[18446744073709551615]]\n"),
        (("echo_INT64", "--input", "x=[[-9223372036854775808]]"), "y  INT64 1x1\n  [[-9223372036854775808]]\n"),
    ],
)
def test_call_prints_the_answer(dormouse: Dormouse, arguments: tuple[str, ...], printed: str) -> None:
    assert dormouse("call", *arguments) == (0, printed + "path host, waited 1.5 ms, ran 0.0 ms\n")


def test_call_sums_large_answers_up(dormouse: Dormouse) -> None:
    code, output = dormouse("call", "affine", "--input", f"x={[[1, 2, 3]] * 1000}")
    assert code == 0
    assert output.count("\n") < 20
    assert "min 3, mean 5, max 7" in output
    code, output = dormouse("call", "upper", "--input", f"x={json.dumps([['a']] * 1000)}")
    assert output.splitlines()[-2] == "  ... 992 more"


@pytest.mark.parametrize("given", ["-", "file"])
def test_call_takes_a_whole_request(dormouse: Dormouse, given: str, tmp_path: Path) -> None:
    request = '{"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1, 1], "data": ["hm"]}]}'
    file = tmp_path / "request.json"
    file.write_text(request)
    code, output = dormouse("call", "upper", "--json", "-" if given == "-" else str(file), stdin=request)
    assert (code, output.splitlines()[:2]) == (0, ["y  BYTES 1x1", "  HM"])


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (("affine",), 2, "give the request as one of --json, --input or --text"),
        (("affine", "--text", "a", "--input", "x=1"), 2, "give the request as one of --json, --input or --text"),
        (("affine", "--text", "a"), 2, "function 'affine' has 0 inputs of texts; use --input or --json"),
        (("affine", "--input", "x"), 2, "--input 'x' cannot be used; expected name=value"),
        (("affine", "--input", "x=" + 2000 * "["), 2, "--input x: the value is nested too deeply"),
        (("affine", "--input", f"x={70 * '['}1{70 * ']'}"), 2, "input 'x': the value is no tensor of FP32"),
        (("affine", "--input", "q=1"), 2, "input 'q' is unknown; the inputs are x"),
        (("affine", "--input", "x=[[1],[2,3]]"), 2, "input 'x': the value is no tensor of FP32"),
        (("affine", "--input", "x=[[1, 2]]"), 2, "input 'x': shape is [1, 2], expected [-1, 3] (-1: any)"),
        (("echo_FP16", "--input", "x=[[1e9]]"), 2, "input 'x': the value is no tensor of FP16"),
        (("echo_BF16", "--input", "x=[[1e39]]"), 2, "input 'x': the value is no tensor of BF16"),
        (("echo_FP16", "--input", "x=[[null]]"), 2, "input 'x': the value is no tensor of FP16"),
        (("affine", "--json", "/no/such/file"), 2, "/no/such/file cannot be read: No such file or directory"),
        (("nobody", "--text", "a"), 1, "no function 'nobody'"),
        (("fault", "--text", "late"), 1, "the request took longer than its timeout of 5 ms"),
        (("fault", "--text", "bug"), 1, "internal error: ZeroDivisionError; the server's log has the details"),
    ],
)
def test_call_says_what_is_wrong(dormouse: Dormouse, arguments: tuple[str, ...], status: int, complaint: str) -> None:
    code, output = dormouse("call", *arguments)
    assert code == status
    assert output.startswith(f"error: {complaint}")
    assert output.count("\n") == 1


# ------------------------------------------------------------------ no server, or something else


def test_no_server_is_one_line_that_says_how_to_start_one() -> None:
    with bind("127.0.0.1", 0) as silent:  # bound, and not listening
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert run("ps", "--server", address) == (
            1,
            f"error: no server answers at {address}; start one with `dormouse serve`, or name another with --server\n",
        )


@pytest.mark.parametrize("address", ["::::", "ftp://x", "http://"])
def test_an_address_that_is_none_is_one_line(address: str) -> None:
    code, output = run("ps", "--server", address)
    assert code == 2
    assert output.startswith("error: server = ")
    assert output.count("\n") == 1


# ------------------------------------------------------------------ serve


def test_serve_has_an_option_for_every_setting() -> None:
    command = typer.main.get_command(app)
    parameters = {parameter.name for parameter in command.commands["serve"].params}  # type: ignore[attr-defined]
    assert parameters == {*Config.__struct_fields__, "config", "reset"}


def test_serve_says_what_cannot_be_used_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    code, output = run("serve", "--state-dir", str(tmp_path), "--device", "tpu")
    assert (code, output) == (
        2,
        "error: device = 'tpu' cannot be used; expected auto, cpu, cuda, cuda:N or several: cuda:0,cuda:1\n",
    )
    assert not (tmp_path / SETTINGS_FILE).exists()


def test_serve_says_that_the_port_is_taken(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        code, output = run("serve", "--state-dir", str(tmp_path), "--port", port)
    assert code == 2
    assert output.startswith(f"error: cannot listen on 127.0.0.1 port {port}: ")


def test_serve_says_what_images_in_memory_only_give_up(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        _, output = run("serve", "--state-dir", str(tmp_path), "--port", port, "--images", "dram")
    warning, _, rest = output.partition("\n")
    assert warning.startswith("warning: images live in memory only: functions deployed now are forgotten")
    assert rest.startswith("error: cannot listen")


# ------------------------------------------------------------------ manifests


def test_a_source_becomes_absolute_and_names_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    (tmp_path / "net.v2.pt2").touch()
    assert manifest_of("my model", Changes()).source == str(tmp_path / "my model")
    assert manifest_of("my model/", Changes()).name == "my-model"
    assert manifest_of("net.v2.pt2", Changes()).name == "net.v2"
    assert manifest_of("pkg.mod:make", Changes(code=Path("code"))).code == str(tmp_path / "code")
    assert manifest_of("pkg.mod:make", Changes()).name == "make"


def test_paths_in_a_manifest_count_from_the_manifest(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text('name = "m"\nsource = "weights"\ncode = "../code"\n')
    manifest = manifest_of(str(file), Changes())
    assert manifest.source == str(tmp_path / "weights")
    assert Path(manifest.code or "").resolve() == tmp_path.parent / "code"


@pytest.mark.parametrize("text", ["", "name = 5", "name = ", 'name = "m"\nsource = "s"\nslos = 1'])
def test_a_manifest_that_cannot_be_used_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "m.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationFault) as caught:
        manifest_of(str(file), Changes())
    assert caught.value.message.startswith(f"{file}: ")


# ------------------------------------------------------------------ as a program


def test_the_program_starts_and_says_its_version() -> None:
    program = "from dormouse.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().count(".") == 2
    assert done.stderr == ""
