"""The demo: its load, its judgement of answers, its figures, and a small run of it with real models."""

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import mean, variance

import httpx
import msgspec
import numpy as np
import pytest
from rich.console import Console

from dormouse.core.types import Path as ServedBy
from dormouse.demo import calibration, packages, workspace
from dormouse.demo.arrivals import arrivals
from dormouse.demo.comparison import difference
from dormouse.demo.examples import Example, load, save
from dormouse.demo.fleet import MODELS, fleet
from dormouse.demo.messages import Asked, Paced, Phase, Target, Verdict
from dormouse.demo.replay import Function, Replay, check_distinct, judged
from dormouse.demo.report import Figures, Setting, complaints, figures, percentile, rendered
from dormouse.demo.run import DEVICE_BYTES, Demo, demonstrate, run
from dormouse.demo.v2 import LENGTH_HEADER, Array, answer_of, request_of
from dormouse.errors import ConfigurationFault
from dormouse.gateway.bodies import parse_infer, render_infer
from dormouse.submit import Chunk, Description
from dormouse.tensors import Signature, Tensor, TensorSpec

MINUTES = 20 * 60.0


# ------------------------------------------------------------------ the fleet


def test_the_fleet_is_more_than_the_device_holds() -> None:
    variants = fleet()
    assert len(variants) >= 24
    assert len({variant.name for variant in variants}) == len(variants)
    assert len({variant.model.key for variant in variants}) >= 4
    assert {variant.model.source for variant in variants} == {"Hugging Face directory", ".pt2 file", "module:callable"}
    assert sum(variant.model.image_mb for variant in variants) * 1e6 >= 4 * DEVICE_BYTES


def test_popularities_are_shares_and_fall() -> None:
    shares = [variant.popularity for variant in fleet()]
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 5 * shares[-1]


# ------------------------------------------------------------------ arrivals


def test_arrivals_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    assert arrivals(60, 10, [1, 2], seed=3) == arrivals(60, 10, [1, 2], seed=3)
    assert arrivals(60, 10, [1, 2], seed=3) != arrivals(60, 10, [1, 2], seed=4)


@pytest.mark.parametrize("rate", [2.0, 20.0])
def test_arrivals_come_at_the_rate_asked_for_and_in_order(rate: float) -> None:
    found = arrivals(MINUTES, rate, [1.0], seed=1)
    assert len(found) / MINUTES == pytest.approx(rate, rel=0.1)
    assert found == sorted(found)
    assert found[0].at_s >= 0
    assert found[-1].at_s < MINUTES


def test_arrivals_are_burstier_than_chance() -> None:
    """Independent arrivals would have a variance as large as their mean."""
    found = arrivals(MINUTES, 10, [1.0], seed=1)
    by_second = Counter(int(arrival.at_s) for arrival in found)
    counts = [by_second[second] for second in range(int(MINUTES))]
    assert variance(counts) > 2 * mean(counts)


def test_popular_functions_are_asked_more() -> None:
    asked = Counter(arrival.function for arrival in arrivals(MINUTES, 10, [0.7, 0.2, 0.1], seed=1))
    total = sum(asked.values())
    assert [asked[number] / total for number in range(3)] == pytest.approx([0.7, 0.2, 0.1], abs=0.03)


# ------------------------------------------------------------------ comparison

SCORES = np.array([[0.5, -8.0, 7.9, 3.0]], "<f4")
RANKING, EMBEDDING = MODELS["lite0"], MODELS["minilm"]


def changed(values: Array, place: int, value: float) -> Array:
    copy = values.copy()
    copy.flat[place] = value
    return copy


def test_the_right_answer_is_right_and_so_is_one_that_is_rounded_otherwise() -> None:
    assert difference(SCORES, SCORES, RANKING) is None
    assert difference(changed(SCORES, 0, 0.5 + 5e-4), SCORES, RANKING) is None


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (changed(SCORES, 0, 0.502), "values are off by 0.00025"),
        (changed(SCORES, 3, np.nan), "1 values are not finite"),
        (SCORES[:, :3], "shape is [1, 3], expected [1, 4]"),
        (SCORES[0], "shape is [4], expected [1, 4]"),
        (SCORES.astype("<f8"), "datatype is float64, expected float32"),
        (np.zeros_like(SCORES), "values are off by 1 "),
    ],
)
def test_a_wrong_answer_is_told_from_the_right_one(answer: Array, complaint: str) -> None:
    assert complaint in (difference(answer, SCORES, EMBEDDING) or "nothing")


def test_a_ranking_must_have_the_same_best_even_if_values_are_near() -> None:
    close = np.array([[5.0, 5.0001]], "<f4")
    swapped = close[:, ::-1].copy()
    assert difference(swapped, close, EMBEDDING) is None
    assert "the best is number [0], expected [1]" in (difference(swapped, close, RANKING) or "")


# ------------------------------------------------------------------ on the wire

PIXEL = np.arange(6, dtype="<f4").reshape(1, 2, 3)
SIGNATURE = Signature((TensorSpec("x", "FP32", (-1, 2, 3)),), (TensorSpec("y", "FP32", (-1, 4)),))
DESCRIBED = Description("f", ("1",), "pytorch", SIGNATURE)


def reply_to(question: dict[str, Array], answer: Array, **headers: str) -> httpx.Response:
    """What the gateway makes of a request and an answer."""
    request = request_of(question, slo_ms=250)
    parsed = parse_infer(request.body, request.headers[LENGTH_HEADER], DESCRIBED)
    assert parsed.inference.slo_ns == 250_000_000
    assert [bytes(tensor.data) for tensor in parsed.inference.inputs] == [
        array.tobytes() for array in question.values()
    ]
    output = Tensor("y", "FP32", answer.shape, answer.tobytes())
    reply = render_infer(parsed, Chunk((output,), True, "1", ServedBy.HOST, 2_000_000, 5_000_000))
    return httpx.Response(200, content=b"".join(reply.parts), headers={LENGTH_HEADER: str(reply.json_bytes), **headers})


def test_requests_and_answers_agree_with_the_gateway() -> None:
    reply = reply_to({"x": PIXEL}, SCORES)
    answer = answer_of(reply.content, int(reply.headers[LENGTH_HEADER]))
    assert (answer.path, answer.queued_ms, answer.device_ms) == ("host", 2.0, 5.0)
    np.testing.assert_array_equal(answer.outputs["y"], SCORES)


def test_examples_come_back_from_their_file(tmp_path: Path) -> None:
    question = {"input_ids": np.array([[1, 2]], "<i8"), "attention_mask": np.array([[1, 1]], "<i8")}
    save(tmp_path / "file", [Example(question, SCORES), Example({"x": PIXEL}, SCORES[:, :2])])
    one, other = load(tmp_path / "file")
    assert one.question.keys() == question.keys()
    np.testing.assert_array_equal(one.question["input_ids"], question["input_ids"])
    np.testing.assert_array_equal(other.answer, SCORES[:, :2])


# ------------------------------------------------------------------ judging


def function(directory: Path, name: str, answer: Array, model: str = "lite0") -> Function:
    file = directory / name
    save(file, [Example({"x": PIXEL}, answer)])
    return Function(Target(name, model, 0.5, str(file)))


def verdict_of(asked: Function, reply: httpx.Response) -> Asked:
    return judged(asked, asked.examples[0], reply, Phase.LOAD, 1.0)


def test_answers_are_judged_by_their_reference(tmp_path: Path) -> None:
    asked = function(tmp_path, "a", SCORES)
    right = verdict_of(asked, reply_to({"x": PIXEL}, SCORES))
    assert (right.verdict, right.path, right.exact, right.detail) == (Verdict.RIGHT, "host", True, "")
    rounded = verdict_of(asked, reply_to({"x": PIXEL}, changed(SCORES, 0, 0.50001)))
    assert (rounded.verdict, rounded.exact) == (Verdict.RIGHT, False)
    stale = verdict_of(asked, reply_to({"x": PIXEL}, SCORES * np.float32(1.001)))
    assert (stale.verdict, stale.exact) == (Verdict.WRONG, False)
    assert "off by 0.001" in stale.detail


def test_an_error_has_failed_and_what_cannot_be_read_is_wrong(tmp_path: Path) -> None:
    asked = function(tmp_path, "a", SCORES)
    failed = verdict_of(asked, httpx.Response(503, content=b'{"error":"the queue is full"}'))
    assert failed.verdict is Verdict.FAILED
    assert "503" in failed.detail and "the queue is full" in failed.detail
    assert verdict_of(asked, httpx.Response(200, content=b"{}")).verdict is Verdict.WRONG
    assert verdict_of(asked, httpx.Response(200, content=b"{}", headers={LENGTH_HEADER: "2"})).verdict is Verdict.WRONG


def test_variants_that_give_the_same_answer_are_no_use(tmp_path: Path) -> None:
    one, same = function(tmp_path, "a", SCORES), function(tmp_path, "b", SCORES)
    with pytest.raises(ValueError, match="a and b give the same answer"):
        check_distinct([one, same])
    check_distinct([one, function(tmp_path, "c", SCORES * np.float32(1.01))])
    check_distinct([one, function(tmp_path, "d", SCORES, model="lite1")])


def test_an_answer_that_never_comes_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = function(tmp_path, "a", SCORES)

    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("the server went away", request=request)

    async def ask() -> Asked:
        async with httpx.AsyncClient(transport=httpx.MockTransport(gone), base_url="http://x") as http:
            return await Replay(http, [asked], seconds=1, seed=1).ask(asked, 0, Phase.LOAD, 0.0)

    assert asyncio.run(ask()).verdict is Verdict.LOST
    assert msgspec.json.decode(capsys.readouterr().out, type=Asked).verdict is Verdict.LOST


# ------------------------------------------------------------------ calibration and figures


def test_the_load_follows_from_what_single_requests_took() -> None:
    host_ms = calibration.by_model([("a", 10.0), ("a", 30.0), ("a", 20.0), ("b", 100.0)])
    assert host_ms == {"a": 20.0, "b": 100.0}
    targets = [Target("a-1", "a", 0.75, ""), Target("b-1", "b", 0.25, "")]
    rate = calibration.rate_per_s(host_ms, targets)
    assert rate * (0.75 * 0.020 + 0.25 * 0.100) == pytest.approx(calibration.UTILIZATION)
    deadlines = calibration.deadlines(host_ms)
    assert deadlines["a"] == calibration.SHORTEST_DEADLINE_MS
    assert deadlines["b"] == calibration.DEADLINE_FACTOR * 100


PACED = Paced({"m": 10.0}, {"m": 20.0}, {"m": 100.0, "n": 100.0}, 5.0, 4)
SETTING = Setting(
    model_of={"m-1": "m", "m-2": "m", "n-1": "n"},
    total_bytes=4_000_000,
    device_bytes=1_000_000,
    evictions=7,
    seconds=3,
    versions={"torch": "2"},
    device="cpu:0",
    date="2026-01-01T00:00:00+00:00",
)


def asked(name: str, verdict: Verdict, latency_ms: float, path: str = "host", phase: Phase = Phase.LOAD) -> Asked:
    return Asked(name, phase, verdict, latency_ms, path, detail="" if verdict is Verdict.RIGHT else "why")


def counted(*records: Asked) -> Figures:
    return figures(records, PACED, SETTING)


def test_figures_count_by_path_and_leave_calibration_out() -> None:
    found = counted(
        asked("m-1", Verdict.RIGHT, 400, "build", Phase.FIRST),
        asked("m-1", Verdict.RIGHT, 1, "host", Phase.CALIBRATION),
        *(asked("m-1", Verdict.RIGHT, latency_ms) for latency_ms in range(1, 101)),
    )
    assert (found.requests, found.calibration_requests) == (101, 1)
    assert {path: row.requests for path, row in found.paths.items()} == {
        "resident": 0, "host": 100, "disk": 0, "build": 1,
    }  # fmt: skip
    assert (found.paths["host"].p50_ms, found.paths["host"].p98_ms) == (50, 98)
    assert (found.functions, found.models, found.evictions) == (3, 2, 7)
    assert found.all_right


def test_lost_answers_count_as_failed_and_nothing_bad_is_forgiven() -> None:
    found = counted(
        asked("m-1", Verdict.RIGHT, 1),
        asked("m-1", Verdict.WRONG, 1),
        asked("m-2", Verdict.FAILED, 1, ""),
        asked("m-2", Verdict.LOST, 1, "", Phase.CALIBRATION),
    )
    assert (found.answers_wrong, found.answers_failed, found.answers_lost) == (1, 2, 1)
    assert not found.all_right


def test_a_function_is_compliant_if_98_percent_are_right_and_in_time() -> None:
    in_time, late = asked("m-1", Verdict.RIGHT, 100), asked("m-1", Verdict.RIGHT, 101)
    assert counted(*[in_time] * 49, late).functions_compliant == 3
    assert counted(*[in_time] * 48, late).functions_compliant == 2
    assert counted(*[in_time] * 48, asked("m-1", Verdict.WRONG, 1)).functions_compliant == 2


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentile([], 0.5) == 0
    assert percentile([3.0], 0.98) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.0


def test_the_json_has_the_promised_keys() -> None:
    written = msgspec.json.decode(msgspec.json.encode(counted(asked("m-1", Verdict.RIGHT, 2))))
    promised = (
        "functions models total_bytes device_bytes requests answers_wrong answers_failed functions_compliant paths"
    )
    assert set(promised.split()) <= written.keys()
    assert written["paths"].keys() == {"resident", "host", "disk", "build"}
    assert written["paths"]["host"] == {"requests": 1, "p50_ms": 2.0, "p98_ms": 2.0}


def test_the_table_says_whether_all_answers_were_right() -> None:
    def text_of(*records: Asked) -> str:
        console = Console(width=120)
        with console.capture() as capture:
            console.print(rendered(counted(*records), PACED))
        return capture.get()

    good, bad = asked("m-1", Verdict.RIGHT, 2), asked("m-2", Verdict.WRONG, 2)
    assert "all 1 answers were right" in text_of(good)
    assert "of 2 answers 1 were wrong, 0 failed or were lost" in text_of(good, bad)
    assert "4 MB: 4.0 times the device's 1 MB; 7 evictions" in text_of(good)
    assert complaints([good, bad]) == ["m-2: wrong (host): why"]


# ------------------------------------------------------------------ what it needs


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.REQUIREMENTS, "no_such_package", "no-such-package==1.0")
    with pytest.raises(ConfigurationFault, match=r"pip install --no-deps .*no-such-package==1\.0") as caught:
        run(1, "cpu", None)
    assert caught.value.status == 400  # which the command line turns into exit status 2


def test_settings_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationFault, match="--seconds 0"):
        run(0, "cpu", None)
    with pytest.raises(ConfigurationFault, match="there is no folder"):
        run(1, "cpu", tmp_path / "no" / "file.json")


def test_folders_of_dead_runs_are_removed_and_those_of_living_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(workspace.CACHE_VARIABLE, str(tmp_path))
    left_over = tmp_path / "run-dead"
    left_over.mkdir()
    (left_over / "lock").touch()
    with workspace.run_directory(workspace.cache_directory()) as living:
        workspace.cache_directory()
        assert living.exists()
        assert not left_over.exists()
    assert not living.exists()


def test_a_disk_without_room_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(workspace.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(workspace, "NEEDED_BYTES", 10**18)
    with pytest.raises(ConfigurationFault, match=workspace.CACHE_VARIABLE):
        workspace.cache_directory()


# ------------------------------------------------------------------ the whole of it


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    try:
        packages.require()
    except ConfigurationFault as missing:
        pytest.skip(missing.message)
    monkeypatch.setenv(workspace.CACHE_VARIABLE, str(tmp_path))
    return tmp_path


def test_a_small_demo_gives_right_answers_from_every_kind_of_source(cache: Path) -> None:
    copies = {"minilm": 2, "lite0": 2, "crepe": 1}
    demo = Demo(fleet(copies), seconds=3, device="cpu", device_bytes=128 * 1024 * 1024)
    found = asyncio.run(demonstrate(demo, Console(quiet=True)))
    assert (found.functions, found.models) == (5, 3)
    assert found.total_bytes > 2 * found.device_bytes
    assert found.all_right
    assert found.paths["build"].requests == 5
    assert found.requests > 5
    assert found.evictions > 0
    assert not list(cache.glob("run-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_ends_with_130_and_leaves_nothing(cache: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", "from dormouse.cli import main; main()", "demo", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert "28 functions" in process.stdout.readline()
    process.send_signal(number)
    assert "interrupted" in process.stdout.read()
    process.stdout.close()
    assert process.wait() == 130
    assert not list(cache.glob("run-*"))
