"""Scenario files and traces: what they say comes true, and what is wrong with one is a line that says where."""

import gzip
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dormouse import traces
from dormouse.core.messages import Command, Event, Reply
from dormouse.core.types import FunctionId, Settings
from dormouse.errors import ConfigurationFault
from dormouse.sim import scenario
from dormouse.sim.capacity import largest_compliant
from dormouse.sim.outcome import outcome_of
from dormouse.sim.presets import MACHINES, PAPER_MODELS
from dormouse.sim.world import World

TEXT = """
seed = 3

[machine]
like = "h200x2"
devices = 3
device_bytes = 1000000000

[functions]
count = 5
models = ["resnet-152", "densenet-169"]

[workload]
kind = "gamma"
duration_s = 20
requests_per_s = 30
"""
SHIPPED = sorted((Path(__file__).parents[2] / "scenarios").glob("*.toml"))
TWO_MODELS = """[functions]
count = 1
[[model]]
name = 'x'
image_bytes = 1
resident_ms = 1
[[model]]
name = 'y'
image_bytes = 1
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "s.toml"
    file.write_text(text)
    return file


def test_a_scenario_becomes_a_world_and_an_outcome(tmp_path: Path) -> None:
    read = scenario.read(written(tmp_path, TEXT))
    world = scenario.world_of(read)
    assert [device.name for device in world.machine.devices] == ["h200:0", "h200:1", "h200:2"]
    assert [world.model_of(function).name for function in world.functions][:3] == [
        "resnet-152",
        "densenet-169",
        "resnet-152",
    ]
    world.run(scenario.arrivals_of(read, tmp_path))
    outcome = outcome_of(world.core.state, world.now)
    assert outcome.requests == pytest.approx(600, rel=0.3)
    assert outcome.in_time + (outcome.requests - outcome.in_time) == outcome.requests
    assert sum(row.requests for row in outcome.paths.values()) == outcome.requests - outcome.refused


def test_a_scenario_may_begin_warm_and_with_one_queue(tmp_path: Path) -> None:
    text = TEXT + 'warm = true\n[policies]\nbinding = "late"\n'
    world = scenario.world_of(scenario.read(written(tmp_path, text)))
    assert outcome_of(world.core.state, world.now).requests == 0
    assert all(function.residencies for function in world.core.state.functions.values())


TABLE_4 = {
    "resnet-50": (9, 13, 11),
    "resnet-101": (14, 22, 16),
    "resnet-152": (17, 25, 20),
    "densenet-169": (25, 27, 26),
    "densenet-201": (28, 30, 30),
    "inception-v3": (14, 17, 16),
    "efficientnet": (12, 13, 13),
    "bert-qa": (43, 144, 45),
}


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_alone_the_models_of_the_paper_take_what_its_table_4_says(name: str) -> None:
    machine = msgspec.structs.replace(MACHINES["v100x4"], hop_ns=0)
    settings = Settings(machine.host_bytes, binding="late", placement="torpor", topology=scenario.topology_of(machine))
    took_ms: dict[int, float] = {}

    def watch(_: int, __: Event, commands: list[Command]) -> None:
        took_ms.update({c.request: c.device_ns / 1e6 for c in commands if isinstance(c, Reply)})

    functions = [(FunctionId(f"f{number}/1"), PAPER_MODELS[name]) for number in range(2)]
    world = World(machine, settings, functions, watch=watch)
    # Cold; resident; the other one takes the device; from there to its neighbour over NVLink.
    world.run(iter([(0, 0), (10**9, 0), (2 * 10**9, 1), (2 * 10**9 + 1, 0)]))
    assert [took_ms[request] for request in (2, 1, 4)] == pytest.approx(TABLE_4[name], abs=1.0)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_the_scenarios_that_are_shipped_can_be_read(file: Path) -> None:
    assert scenario.world_of(scenario.read(file)).functions


def test_models_of_ones_own(tmp_path: Path) -> None:
    text = (
        "[functions]\ncount = 2\n[[model]]\nname = 'mine'\nimage_bytes = 1000000\nresident_ms = 2.5\ndeadline_ms = 10"
    )
    world = scenario.world_of(scenario.read(written(tmp_path, text)))
    model = world.model_of(world.functions[1])
    assert (model.name, model.resident_ns, model.slo.deadline_ns) == ("mine", 2_500_000, 10_000_000)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("functions = ", "is no TOML"),
        ("[machine]\nlike = 'h200'", "missing required field `functions`"),
        ("[functions]\ncount = 3\nrate = 4", "line 3: functions.rate: object contains unknown field `rate`"),
        ("[functions]\ncount = 'x'", "line 2: functions.count: expected `int`, got `str`"),
        ("[functions]\ncount = 0", "line 2: functions.count = 0: it must be more than 0"),
        ("[functions]\ncount = 1\n[machine]\nlike = 'b200'", "line 4: machine.like = 'b200': there is no such machine"),
        ("[functions]\ncount = 1\n[machine]\ndevices = 0", "line 4: machine.devices = 0: it must be more than 0"),
        ("[functions]\ncount = 1\n[workload]\nrequests_per_s = -2", "line 4: workload.requests_per_s = -2.0"),
        ("[functions]\ncount = 1\n[workload]\nkind = 'per-minute'", "workload.trace = '': workload 'per-minute' needs"),
        ("[functions]\ncount = 1\n[workload]\nkind = 'storm'", "line 4: workload.kind: invalid enum value 'storm'"),
        ("[functions]\ncount = 1\n[policies]\neviction = 'mru'", "line 4: policies.eviction = 'mru': there is no such"),
        ("[functions]\ncount = 1\nmodels = ['gpt']", "line 3: functions.models = 'gpt': there is no such model"),
        ("[functions]\ncount = 1\n[policies]\nhost_tier = 'mru'", "policies.host_tier = 'mru': there is no such"),
        ("[functions]\ncount = 1\n[workload]\nlongest_s = 2", "line 4: workload.longest_s = 2.0: it must not be less"),
        ("[functions]\ncount = 1\n[workload]\njitter = 0.5", "line 4: workload.jitter = 0.5: it must be from 0"),
        ("[functions]\ncount = 1\n[faults]\nslow_links = -1", "line 4: faults.slow_links = -1"),
        ("[functions]\ncount = 1\n[workload]\nshare = 1", "line 4: workload.share = 1.0"),
        ("[functions]\ncount = 1\n[[model]]\nname='x'\nimage_bytes=0\nresident_ms=1", "line 5: model.image_bytes = 0"),
        (TWO_MODELS + "resident_ms = nan", "line 10: model.resident_ms = nan: it must be from"),
        (TWO_MODELS + "resident_ms = 1\npercentile = 200", "line 11: model.percentile = 200.0"),
        (
            TWO_MODELS.replace("'y'", "'x'") + "resident_ms = 1",
            "line 8: model.name = 'x': there is a model of that name",
        ),
        ("[functions]\ncount = 1\n[machine]\nhop_us = inf", "line 4: machine.hop_us = inf: it must be from 0"),
        ("[functions]\ncount = 1\n[machine]\ndevices = 100000", "line 4: machine.devices = 100000: it must be from 1"),
        ("[functions]\ncount = 1\n[machine]\ndevice_bytes = 2000000", "could never be loaded"),
        ("[functions]\ncount = 1\n[machine]\nhost_bytes = 2000000", "line 4: machine.host_bytes = 2000000: model"),
        ("[functions]\ncount = 100000000000", "line 2: functions.count = 100000000000: it must be from 1 to 1e+06"),
        ("[functions]\ncount = 1\n[workload]\nduration_s = nan", "line 4: workload.duration_s = nan"),
        ("[functions]\ncount = 1\n[workload]\nrequests_per_s = inf", "line 4: workload.requests_per_s = inf"),
        ("[functions]\ncount = 1\n[workload]\nexponent = nan", "line 4: workload.exponent = nan"),
        ("[functions]\ncount = 1\n[workload]\ncv = 1e300", "line 4: workload.cv = 1e+300"),
        ("[functions]\ncount = 1\n[policies]\nslo_window_s = nan", "line 4: policies.slo_window_s = nan"),
        ("[functions]\ncount = 1\n[faults]\nslow_links = inf", "line 4: faults.slow_links = inf"),
        (
            "[functions]\ncount = 1\n[workload]\nkind = 'servegen'\ntrace = 'none.csv'",
            "line 5: workload.trace = 'none.csv': there is no such file",
        ),
    ],
)
def test_what_is_wrong_with_a_scenario_is_one_line_that_says_where(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationFault) as fault:
        scenario.read(written(tmp_path, text))
    assert complaint in fault.value.message
    assert "s.toml" in fault.value.message
    assert "\n" not in fault.value.message.replace(str(tmp_path), "")


def test_a_scenario_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationFault, match="is not there"):
        scenario.read(tmp_path / "none.toml")


def test_capacity_is_the_largest_number_that_is_all_compliant(tmp_path: Path) -> None:
    text = TEXT.replace('models = ["resnet-152", "densenet-169"]', 'models = ["resnet-152"]')
    read = scenario.read(written(tmp_path, text.replace("requests_per_s = 30", "requests_per_s = 150")))
    tried: dict[int, int] = {}
    found = largest_compliant(read, tmp_path, tried.__setitem__)
    assert tried[found] == found
    assert tried[found + 1] < found + 1


# ------------------------------------------------------------------ traces


def test_calls_per_minute_are_read(tmp_path: Path) -> None:
    file = tmp_path / "t.npy"
    np.save(file, np.array([[1, 2], [3, 4]]))
    assert traces.calls_per_minute(file) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "array", [np.array([1, 2]), np.array([[0.5]]), np.array([[-1]]), np.zeros((0, 3), int), np.array([[2**62]])]
)
def test_an_array_that_is_no_trace_is_one_line(tmp_path: Path, array: "np.typing.NDArray[np.generic]") -> None:
    file = tmp_path / "t.npy"
    np.save(file, array)
    with pytest.raises(ConfigurationFault, match=r"t.npy holds .* calls per minute are whole numbers"):
        traces.calls_per_minute(file)


def test_a_damaged_array_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "t.npy"
    file.write_bytes(b"\x93NUMPY nonsense")
    with pytest.raises(ConfigurationFault, match=r"t.npy is no numpy array"):
        traces.calls_per_minute(file)
    with pytest.raises(ConfigurationFault, match="is not there"):
        traces.calls_per_minute(tmp_path / "none.npy")


RATES = """client_id,window_start_s,rate_rps,iat_cv,iat_dist,iat_p1,iat_p2
7,0,1.5,2,Gamma,0.25,2.6
7,600,0,0,,0,0
8,0,0,0,,0,0
9,0,2.0,3,Weibull,0.5,1
"""


def test_client_windows_are_read_without_clients_that_never_ask(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv.gz"
    file.write_bytes(gzip.compress(RATES.encode()))
    assert [[window.rate for window in client] for client in traces.client_windows(file)] == [[1.5, 0.0], [2.0]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("client_id,rate\n1,2\n", "line 1: there is no column 'rate_rps'"),
        (RATES + "10,0,fast,1,Gamma,1,1\n", "line 6: could not convert string to float: 'fast'"),
        (RATES + "10,0\n", "line 6: the line ends early"),
        (RATES + "10,0,-1,1,Gamma,1,1\n", "line 6: a rate of -1.0 requests a second"),
        (RATES + "10,0,nan,1,Gamma,1,1\n", "line 6: a rate of nan requests a second"),
        (RATES.splitlines()[0] + "\n7,0,0,0,,0,0\n", "holds no client that ever asks"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "rates.csv"
    file.write_text(text)
    with pytest.raises(ConfigurationFault) as fault:
        traces.client_windows(file)
    assert complaint in fault.value.message


def test_a_compressed_trace_that_is_cut_off_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv.gz"
    file.write_bytes(gzip.compress((RATES + "7,600,0,0,,0,0\n" * 50).encode())[:-20])
    with pytest.raises(ConfigurationFault, match="cannot be read"):
        traces.client_windows(file)


def test_invocation_totals_come_in_order_of_popularity(tmp_path: Path) -> None:
    file = tmp_path / "totals.csv"
    file.write_text("HashApp,NumInvocations\na,5\nb,70\n")
    assert traces.invocation_totals(file) == [70, 5]
    file.write_text("HashApp,NumInvocations\na,many\n")
    with pytest.raises(ConfigurationFault, match="line 2: 'many' is no number of invocations"):
        traces.invocation_totals(file)
