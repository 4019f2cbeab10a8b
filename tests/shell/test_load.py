"""The load generator against a small real server: plans, what is sent, what is counted, and what is said of it."""

import asyncio
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from dormouse.errors import ConfigurationFault, DormouseError, InvalidRequest
from dormouse.load.connection import Address, Pool, address_in
from dormouse.load.drive import Drive, asked
from dormouse.load.outcome import MS_NS, Outcome, Sent, latency_of, outcome_of
from dormouse.load.plan import Plan, drawn, traced
from dormouse.load.report import page
from dormouse.load.run import Order, carry_out
from dormouse.load.target import VARIANTS, Sizes, Target, of_metadata, written
from dormouse.workload import MINUTE_NS, SECOND_NS
from tests.shell.running import RunningServer
from tests.shell.test_cli import run as dormouse

# ------------------------------------------------------------------ plans


@pytest.mark.parametrize("process", ["poisson", "constant", "gamma"])
def test_plans_have_the_rate_asked_for_and_are_the_same_for_the_same_seed(process: str) -> None:
    def plan(seed: int) -> Plan:
        return drawn(("a", "b"), 200, 30, seed, process=process)  # type: ignore[arg-type]  # a word of the list

    assert plan(1) == plan(1)
    assert (plan(1) == plan(2)) == (process == "constant")
    assert plan(1).rate == pytest.approx(200, rel=0.15)
    moments = [at_ns for at_ns, _ in plan(1).arrivals]
    assert moments == sorted(moments)
    assert moments[-1] <= 30 * SECOND_NS
    shares = Counter(number for _, number in plan(1).arrivals)
    assert shares[0] == pytest.approx(shares[1], rel=0.15)


def test_a_trace_of_moments_is_replayed_stretched_or_cut(tmp_path: Path) -> None:
    file = tmp_path / "moments.csv"
    file.write_text("at_s,function\n2.0,b\n0.5,a\n1.0,a\n")
    plan = traced(file, (), seed=1)
    assert (plan.functions, plan.duration_ns) == (("b", "a"), 2 * SECOND_NS)
    assert plan.arrivals == [(SECOND_NS // 2, 1), (SECOND_NS, 1), (2 * SECOND_NS, 0)]
    assert traced(file, (), seed=1, duration_s=1).arrivals == plan.arrivals[:2]
    assert traced(file, (), seed=1, rate=3).arrivals[-1] == (SECOND_NS, 0)
    file.write_text("at_s\n0\n1\n2\n")
    assert [number for _, number in traced(file, ("x", "y"), seed=1).arrivals] == [0, 1, 0]


def test_traces_of_minutes_are_drawn_as_the_simulator_draws_them(tmp_path: Path) -> None:
    text, array = tmp_path / "minutes.csv", tmp_path / "minutes.npy"
    text.write_text("minute,a,b\n0,30,0\n1,0,60\n")
    plan = traced(text, (), seed=1)
    assert (plan.functions, plan.duration_ns) == (("a", "b"), 2 * MINUTE_NS)
    assert {number for at_ns, number in plan.arrivals if at_ns < MINUTE_NS} == {0}
    assert {number for at_ns, number in plan.arrivals if at_ns >= MINUTE_NS} == {1}
    np.save(array, np.array([[30, 0], [0, 60]]))
    assert traced(array, ("a", "b"), seed=1).arrivals == plan.arrivals
    assert {number for _, number in traced(array, ("a",), seed=1).arrivals} == {0}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("when\n1\n", "line 1: there is no column 'at_s' and none 'minute'"),
        ("at_s\n1\n", "names no functions; give --function"),
        ("at_s,function\n", "has no request in it"),
        ("at_s,function\nx,a\n", "line 2: 'x' is no number"),
        ("at_s,function\n-1,a\n", "line 2: '-1' is no number"),
        ("minute\n0\n", "has no calls in it"),
        ("minute,a\n0,nan\n", "line 2: 'nan' is no number"),
    ],
)
def test_traces_that_cannot_be_used_are_said_with_their_line(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(ConfigurationFault, match=re.escape(complaint)):
        traced(file, (), seed=1)


# ------------------------------------------------------------------ what is sent


def test_requests_are_made_from_metadata_and_differ_but_are_the_same_for_the_same_seed() -> None:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [-1, -1, 3]},
        {"name": "some_mask", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "half", "datatype": "BF16", "shape": [2]},
        {"name": "words", "datatype": "BYTES", "shape": [-1]},
    ]
    metadata = {"name": "f", "inputs": inputs}
    bodies = of_metadata(metadata, "v2", Sizes(rows=2, free=5), seed=1)
    assert bodies == of_metadata(metadata, "v2", Sizes(rows=2, free=5), seed=1)
    assert len({body for body, _ in bodies}) == VARIANTS
    body, headers = bodies[0]
    length = int(headers["Inference-Header-Content-Length"])
    head = msgspec.json.decode(body[:length])
    assert [tensor["shape"] for tensor in head["inputs"]] == [[2, 5, 3], [2, 5], [2], [2]]
    assert len(body) - length == 2 * 5 * 3 * 4 + 2 * 5 * 8 + 2 * 2
    assert np.frombuffer(body[length + 120 : length + 200], "<i8").tolist() == [1] * 10


def test_a_function_that_takes_texts_gets_texts() -> None:
    texts = [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in ("text", "tokens")]
    metadata = {"name": "f", "inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]}, *texts]}
    ((body, headers), *_) = of_metadata(metadata, "v2", Sizes(words=3), seed=1)
    (tensor,) = msgspec.json.decode(body[: int(headers["Inference-Header-Content-Length"])])["inputs"]
    assert (tensor["name"], tensor["data"][0].count(" ")) == ("text", 2)
    ((body, _), *_) = of_metadata(metadata, "openai", Sizes(words=3), seed=1)
    assert msgspec.json.decode(body)["model"] == "f"


def test_requests_carry_the_key_and_addresses_are_checked() -> None:
    text = written(Address("::1", 80, False), "/x", "secret", b"{}")
    assert b"POST /x HTTP/1.1\r\nHost: [::1]:80\r\n" in text
    assert b"Authorization: Bearer secret\r\n" in text
    assert address_in("https://h") == Address("h", 443, True)
    for wrong in ("ftp://h", "http://", "http://h:x"):
        with pytest.raises(ConfigurationFault, match="is no address"):
            address_in(wrong)


# ------------------------------------------------------------------ what is counted


def sent(took_ms: float, *, status: str = "200", late_ms: float = 0, number: int = 0, path: str = "host") -> Sent:
    return Sent(number, 0, round(late_ms * MS_NS), round(took_ms * MS_NS), status, path)


def summed(*requests: Sent, slo: tuple[float, float] = (100.0, 90.0)) -> Outcome:
    return outcome_of(requests, [("f", *slo)], planned=10, duration_ns=SECOND_NS, connections=1)


def test_percentiles_are_by_nearest_rank() -> None:
    latency = latency_of(number * MS_NS for number in range(1, 101))
    assert latency is not None
    assert (latency.p50_ms, latency.p95_ms, latency.p98_ms, latency.p99_ms, latency.max_ms) == (50, 95, 98, 99, 100)
    assert latency_of([]) is None


def test_failures_are_counted_by_status_and_are_never_in_time() -> None:
    outcome = summed(*[sent(10)] * 9, sent(1, status="503"))
    assert (outcome.answered, outcome.errors) == (9, {"503": 1})
    assert (outcome.functions[0].in_time, outcome.functions[0].compliant) == (9, True)
    worse = summed(*[sent(10)] * 8, sent(1, status="503"), sent(101))
    assert not worse.functions[0].compliant
    assert worse.latency is not None and worse.latency.max_ms == 101


def test_latency_is_told_by_path() -> None:
    outcome = summed(sent(1, path="resident"), sent(5), sent(7), sent(9, path=""))
    assert {path: each.count for path, each in outcome.paths.items()} == {"host": 2, "resident": 1, "unknown": 1}
    assert outcome.paths["host"].max_ms == 7


def test_a_generator_that_could_not_keep_up_has_no_valid_figures() -> None:
    assert summed(*[sent(10)] * 99, sent(60, late_ms=50)).generator.valid
    told = summed(*[sent(10)] * 98, *[sent(60, late_ms=50)] * 2).generator
    assert (told.valid, told.late, told.late_max_ms) == (False, 2, 50)
    assert not summed().generator.valid


# ------------------------------------------------------------------ runs

QUICK = drawn(("affine", "upper", "embedder"), 300, 0.3, seed=1)


def test_every_request_of_a_plan_is_sent_and_counted_once(server: RunningServer) -> None:
    outcome, requests = carry_out(Order(server.url), QUICK)
    assert outcome.planned == outcome.sent == outcome.answered == len(QUICK.arrivals) == len(requests)
    assert Counter(each.number for each in requests) == Counter(number for _, number in QUICK.arrivals)
    assert set(outcome.paths) == {"host"}
    assert [each.name for each in outcome.functions] == list(QUICK.functions)
    asked_for = Counter(inference.name for inference in server.node.seen)
    tries = len(QUICK.functions)  # one each before the clock runs
    assert asked_for.total() == len(QUICK.arrivals) + tries
    assert (outcome.functions[0].deadline_ms, outcome.functions[0].percentile) == (1000, 98)


def test_openais_door_is_asked_too_and_tells_the_path(server: RunningServer) -> None:
    outcome, _ = carry_out(Order(server.url, protocol="openai", slo_ms=0.0001), drawn(("embedder",), 100, 0.2, seed=1))
    assert outcome.errors == {}
    assert set(outcome.paths) == {"host"}
    assert (outcome.functions[0].deadline_ms, outcome.functions[0].compliant) == (0.0001, False)


def driven(server: RunningServer, meanwhile: Callable[[Drive], Awaitable[None]], **options: float) -> Drive:
    """Twenty requests that are due at once, to a function that holds them back."""
    made: list[Drive] = []

    async def run() -> None:
        address = address_in(server.url)
        pool = Pool(address, int(options.get("connections", 100)))
        metadata = {"name": "affine", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]}
        requests = [
            written(address, "/v2/models/affine/infer", None, body, more)
            for body, more in of_metadata(metadata, "v2", Sizes(), seed=1)
        ]
        plan = Plan(("affine",), [(0, 0)] * 20, SECOND_NS)
        drive = Drive(plan, [Target("affine", requests, 1000, 98)], pool, options.get("timeout_s", 30.0))
        made.append(drive)
        running = asyncio.create_task(drive.run())
        await meanwhile(drive)
        await running
        pool.close()

    server.node.gate, server.node.arrivals = asyncio.Event(), asyncio.Semaphore(0)
    asyncio.run(run())
    return made[0]


async def arrived(server: RunningServer, count: int) -> None:
    """So many requests have reached the node, which runs on another loop."""
    arrivals = server.node.arrivals
    assert arrivals is not None

    async def take() -> None:
        for _ in range(count):
            await arrivals.acquire()

    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(take(), server.loop))


def let_go(server: RunningServer) -> None:
    assert server.node.gate is not None
    server.loop.call_soon_threadsafe(server.node.gate.set)


def test_no_answer_delays_the_next_request(server: RunningServer) -> None:
    """All are there while none has been answered: the loop is open."""

    async def meanwhile(drive: Drive) -> None:
        await arrived(server, 20)
        assert drive.sent == []
        let_go(server)

    drive = driven(server, meanwhile)
    assert Counter(each.status for each in drive.sent) == {"200": 20}


def test_waiting_for_a_connection_counts_as_latency_and_is_told_as_lateness(server: RunningServer) -> None:
    async def meanwhile(drive: Drive) -> None:
        await arrived(server, 1)
        assert drive.sent == []
        let_go(server)

    requests = driven(server, meanwhile, connections=1).sent
    assert all(each.took_ns >= each.late_ns for each in requests)
    assert sorted(each.late_ns for each in requests)[-1] > sorted(each.late_ns for each in requests)[0]


def test_one_who_stops_it_gets_what_was_measured_so_far(server: RunningServer) -> None:
    async def meanwhile(drive: Drive) -> None:
        await arrived(server, 20)
        drive.stop()

    drive = driven(server, meanwhile)
    assert drive.interrupted
    assert Counter(each.status for each in drive.sent) == {"unfinished": 20}
    let_go(server)


def test_what_is_not_answered_in_time_is_a_timeout(server: RunningServer) -> None:
    async def meanwhile(_: Drive) -> None:
        await arrived(server, 20)

    drive = driven(server, meanwhile, timeout_s=0.5)
    assert Counter(each.status for each in drive.sent) == {"timeout": 20}
    let_go(server)


class Fickle(asyncio.Protocol):
    """Answers its requests, but closes the connection instead of answering the second."""

    requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        del data
        Fickle.requests += 1
        if Fickle.requests == 2:
            self.transport.close()
        else:
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


def test_a_request_that_an_idle_connection_took_with_it_is_sent_again() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(Fickle, "127.0.0.1", 0)
        address = Address("127.0.0.1", listening.sockets[0].getsockname()[1], False)
        pool = Pool(address, 4)
        answers = [await asked(pool, written(address, "/", None)) for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 200]
        assert (Fickle.requests, pool.opened) == (3, 2)
        pool.close()
        listening.close()
        await listening.wait_closed()

    asyncio.run(run())


def test_where_no_server_is_the_command_says_so() -> None:
    with pytest.raises(DormouseError, match="no server answers"):
        carry_out(Order("http://127.0.0.1:9"), QUICK)


def test_functions_that_are_not_there_or_refuse_are_said_before_the_clock_runs(
    server: RunningServer, tmp_path: Path
) -> None:
    with pytest.raises(DormouseError, match="function 'nobody': no function 'nobody'"):
        carry_out(Order(server.url), drawn(("nobody",), 10, 1, seed=1))
    file = tmp_path / "request.json"
    file.write_text('{"inputs": []}')
    with pytest.raises(InvalidRequest, match="function 'affine' refuses the requests made for it"):
        carry_out(Order(server.url, input=file), drawn(("affine",), 10, 1, seed=1))
    file.write_text('[{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}]')
    outcome, _ = carry_out(Order(server.url, input=file), drawn(("affine",), 100, 0.1, seed=1))
    assert outcome.errors == {}


# ------------------------------------------------------------------ reports and the command


def test_the_report_is_one_page_that_fetches_nothing(server: RunningServer) -> None:
    outcome, requests = carry_out(Order(server.url), QUICK)
    text = page(outcome, requests, "Load on <somewhere>")
    assert "&lt;somewhere&gt;" in text
    assert not re.search(r"<script|src=|href=|url\(|http", text)
    for svg in re.findall(r"<svg.*?</svg>", text):
        assert len(ElementTree.fromstring(svg).findall("polyline")) >= 1
    assert text.count("<svg") == 2
    assert "NaN" not in text
    assert "no valid" not in page(summed(), [], "nothing")
    assert "not valid" in page(summed(), [], "nothing")


def test_the_command_prints_tables_and_writes_figures(server: RunningServer, tmp_path: Path) -> None:
    figures, report = tmp_path / "figures.json", tmp_path / "report.html"
    options = ("--function", "affine,upper", "--rate", "100", "--duration", "0.3", "--arrivals", "constant")
    code, output = dormouse("load", *options, "--json", str(figures), "--report", str(report), server=server.url)
    outcome = msgspec.json.decode(figures.read_bytes(), type=Outcome)
    assert (outcome.planned, outcome.answered) == (30, 30)
    assert code == (0 if outcome.generator.valid else 1)
    assert "30 of 30 requests answered" in output
    assert re.search(r"affine +15 +98 % in 1000 ms +100.00% +yes", output)
    assert report.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "nothing to ask: give --function"),
        (("--function", "affine", "--rate", "0"), "--rate 0 cannot be used"),
        (("--function", "affine", "--rows", "0"), "--rows 0 cannot be used"),
        (("--function", "affine", "--arrivals", "tidal"), "--arrivals 'tidal' cannot be used"),
        (("--function", "affine", "--protocol", "v3"), "--protocol 'v3' cannot be used"),
        (("--function", "affine", "--report", "x.pdf"), "--report x.pdf: expected a name that ends in .html or .png"),
        (("--function", "affine", "--rate", "1e8"), "is more than 20000000 requests"),
        (("--function", "affine", "--input", "/nowhere"), "--input /nowhere cannot be read"),
        (("--trace", "/nowhere.csv"), "trace /nowhere.csv is not there"),
        (("affine", "--function", "affine"), "a name alone is taken into host memory"),
    ],
)
def test_the_command_says_what_cannot_be_used(server: RunningServer, options: tuple[str, ...], complaint: str) -> None:
    code, output = dormouse("load", *options, server=server.url)
    assert code == 2
    assert complaint in output
    assert output.count("\n") == 1


def test_ctrl_c_prints_what_was_measured_so_far(server: RunningServer) -> None:
    server.node.arrivals = asyncio.Semaphore(0)
    command = [sys.executable, "-m", "dormouse.cli", "load", "--url", server.url, "--function", "affine"]
    options = ["--rate", "50", "--duration", "600"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        asyncio.run(arrived(server, 10))
        running.send_signal(signal.SIGINT)
        output, complaints = running.communicate(timeout=60)
    assert "interrupted: these are the figures up to then" in output
    assert re.search(r"[1-9]\d* of \d+ requests answered", output)
    assert complaints == ""


def test_a_name_alone_is_admitted_to_host_memory(server: RunningServer) -> None:
    server.node.deployed["affine"].loaded = False
    assert dormouse("load", "affine", server=server.url) == (0, "loaded affine\n")
    assert server.node.deployed["affine"].loaded
