"""What is measured of links, what is kept of it, and what the core is told."""

import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from dormouse.calibration import calibrate, ensure, stored, this_machine
from dormouse.cli.calibrate import described
from dormouse.cli.commands import app
from dormouse.config import MIB, Config
from dormouse.control.devices import devices_of
from dormouse.control.topology import GROUP_BYTES, MEMORY_BYTES_PER_S, links_of
from dormouse.core.types import DeviceId
from dormouse.device.driver import Driver
from dormouse.device.measuring import CardMeasured, Machine, MapCost, Measured, PairMeasured, Rate, machine_of, measure
from dormouse.device.vmm import CHUNK_BYTES
from dormouse.errors import ConfigurationFault, DeviceError
from tests.contract.conftest import StandInCuda

ONE, TWO = DeviceId("cuda:0"), DeviceId("cuda:1")
MACHINE = Machine(("a card, driver 1, bus 0", "a card, driver 1, bus 1"))
MEASURED = Measured(
    MACHINE,
    cards=tuple(
        CardMeasured(device, (Rate(MIB, 40), Rate(4 * MIB, 98), Rate(64 * MIB, 100)), 4 * MIB, 90, ())
        for device in (ONE, TWO)
    ),
    pairs=(
        PairMeasured(ONE, TWO, 199, (Rate(MIB, 300), Rate(2 * MIB, 700)), 190),
        PairMeasured(TWO, ONE, 199),
    ),
    notes=("a note",),
    took_ns=1_500_000_000,
)


def saying(what: bytes, status: int = 0) -> tuple[str, ...]:
    """A stand-in for the process that measures."""
    return (
        sys.executable,
        "-c",
        f"import sys; sys.std{'err' if status else 'out'}.buffer.write({what!r}); sys.exit({status})",
    )


# ------------------------------------------------------------------ measuring


def test_two_cards_are_measured_with_everything_between_them_and_nothing_is_left_behind() -> None:
    cuda = StandInCuda()
    measured = measure(Driver(cuda), 8 * MIB)
    assert measured.machine.cards == (
        "stand-in 0, CUDA driver 13.2, 0000:00:00.0",
        "stand-in 1, CUDA driver 13.2, 0000:01:00.0",
    )
    assert [card.device for card in measured.cards] == [ONE, TWO]
    for card in measured.cards:
        assert [cost.chunk_bytes for cost in card.maps] == [2 * MIB, 8 * MIB]
        assert card.elbow_bytes in [rate.size_bytes for rate in card.from_host]
        assert card.to_host_bytes_per_s > 0
    assert [(pair.source, pair.destination) for pair in measured.pairs] == [(TWO, ONE), (ONE, TWO)] or [
        (pair.source, pair.destination) for pair in measured.pairs
    ] == [(ONE, TWO), (TWO, ONE)]
    assert all(pair.peer and pair.two_links_bytes_per_s and pair.both_links_bytes_per_s for pair in measured.pairs)
    assert measured.notes == ()
    assert cuda.is_empty()
    assert any("over both links" in line for line in described(measured))


def test_one_card_has_no_pairs_and_a_line_says_so() -> None:
    cuda = StandInCuda()
    cuda.devices = 1
    measured = measure(Driver(cuda), 8 * MIB)
    assert (len(measured.cards), measured.pairs) == (1, ())
    assert measured.notes == ("one GPU: no other to copy from, and no other link to borrow",)


def test_cards_that_do_not_reach_each_other_have_a_line_each_and_no_way() -> None:
    cuda = StandInCuda()
    cuda.apart = True
    measured = measure(Driver(cuda), 8 * MIB)
    assert all(not pair.peer and not pair.two_links_bytes_per_s for pair in measured.pairs)
    assert measured.notes[0] == "no way from the memory of cuda:0 to cuda:1: they have no peer access to each other"
    assert len(measured.notes) == 2


def test_a_way_that_fails_is_a_line_and_none() -> None:
    cuda = StandInCuda()
    cuda.good_calls["cuMemImportFromShareableHandle"] = 0
    measured = measure(Driver(cuda), 8 * MIB)
    (note,) = measured.notes
    assert note.startswith("no way from the memory of cuda:0 to cuda:1: cuMemImportFromShareableHandle failed")
    assert [bool(pair.peer) for pair in measured.pairs] == [False, True]
    assert cuda.is_empty()


def test_without_a_card_nothing_is_measured() -> None:
    cuda = StandInCuda()
    cuda.devices = 0
    assert machine_of(Driver(cuda)) == Machine(())
    assert measure(Driver(cuda)).cards == ()


# ------------------------------------------------------------------ keeping


def test_what_was_measured_is_kept_for_this_machine_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert stored(state, MACHINE) is None
    assert calibrate(state, MACHINE, saying(msgspec.json.encode(MEASURED))) == MEASURED
    assert stored(state, MACHINE) == MEASURED
    assert stored(state, Machine(("another card",))) is None
    (file,) = state.iterdir()
    file.write_text("{")
    assert stored(state, MACHINE) is None


def test_a_measurement_that_fails_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"calibrate failed: FAILED \(the card is gone\)"):
        calibrate(tmp_path, MACHINE, saying(b"Traceback\nthe card is gone\n", 1))
    with pytest.raises(DeviceError, match="exit status 1"):
        calibrate(tmp_path, MACHINE, saying(b"", 1))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigurationFault, match="cannot be written"):
        calibrate(blocked, MACHINE, saying(msgspec.json.encode(MEASURED)))


def test_the_first_start_measures_and_says_so_and_the_second_is_silent(tmp_path: Path) -> None:
    said: list[str] = []
    command = saying(msgspec.json.encode(MEASURED))
    ensure(tmp_path, None, said.append, command)
    assert said == []
    ensure(tmp_path, MACHINE, said.append, command)
    assert said == [
        "measuring the links of 2 GPU(s), once on this machine; --calibrate off skips it",
        "a note",
        "measured in 1.5 s; dormouse calibrate shows what",
    ]
    ensure(tmp_path, MACHINE, said.append, saying(b"never asked", 1))
    assert len(said) == 3


def test_a_start_goes_on_with_defaults_when_measuring_fails(tmp_path: Path) -> None:
    said: list[str] = []
    ensure(tmp_path, MACHINE, said.append, saying(b"no memory", 1))
    assert said[-1] == "warning: links were not measured, so defaults are used: calibrate failed: FAILED (no memory)"


def test_this_machine_is_known_by_its_cards_or_has_none() -> None:
    machine = this_machine()
    assert machine is None or machine.cards


@pytest.mark.skipif(this_machine() is not None, reason="this machine has an NVIDIA GPU")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_without_a_card_the_command_says_one_line_and_succeeds(tmp_path: Path, options: list[str]) -> None:
    done = CliRunner().invoke(app, ["calibrate", "--state-dir", str(tmp_path), *options])
    assert done.exit_code == 0
    (line,) = done.output.splitlines()
    assert "no NVIDIA GPU was found" in line
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ what is made of it


def test_the_core_is_told_the_rates_that_were_measured(tmp_path: Path) -> None:
    topology = links_of(Config(tmp_path), [ONE, TWO], MEASURED).topology
    assert topology.host_rate(TWO) == 100
    there, back = topology.pair(ONE, TWO), topology.pair(TWO, ONE)
    assert (there.peer_bytes_per_s, there.detour_bytes_per_s) == (700, 90)
    assert (back.peer_bytes_per_s, back.detour_bytes_per_s) == (0, 0)


def test_between_cpu_devices_everything_goes_at_the_rate_of_memory_and_there_are_no_detours(tmp_path: Path) -> None:
    for limit, rate in ((None, MEMORY_BYTES_PER_S), (MIB, MIB)):
        topology = links_of(Config(tmp_path, link_bytes_per_s=limit), ["cpu:0", "cpu:1"], None).topology
        pair = topology.pair(DeviceId("cpu:0"), DeviceId("cpu:1"))
        assert (topology.host_rate(DeviceId("cpu:1")), pair.peer_bytes_per_s, pair.detour_bytes_per_s) == (
            rate,
            rate,
            0,
        )


def test_without_a_measurement_cards_have_the_rates_assumed_for_all(tmp_path: Path) -> None:
    assert links_of(Config(tmp_path), [ONE, TWO], None).topology.pairs == ()


def test_groups_are_twice_the_elbow_unless_their_size_is_given(tmp_path: Path) -> None:
    for config, measured, group_bytes in (
        (Config(tmp_path), MEASURED, 8 * MIB),
        (Config(tmp_path), None, GROUP_BYTES),
        (Config(tmp_path), Measured(MACHINE), GROUP_BYTES),
        (Config(tmp_path, group_bytes=5), MEASURED, 5),
    ):
        assert links_of(config, [ONE], measured).group_bytes == group_bytes


@pytest.mark.parametrize(("beside_ns", "ahead"), [(30, frozenset()), (31, frozenset([ONE]))])
def test_where_mapping_waits_for_copies_loads_are_mapped_first(
    tmp_path: Path, beside_ns: int, ahead: frozenset[str]
) -> None:
    costs = (MapCost(2 * MIB, 10, 10, 1000), MapCost(CHUNK_BYTES, 10, 10, beside_ns))
    measured = Measured(MACHINE, cards=(CardMeasured(ONE, (Rate(MIB, 40),), MIB, 90, costs),))
    assert links_of(Config(tmp_path), [ONE], measured).maps_ahead == ahead


@pytest.mark.parametrize(
    ("setting", "devices"),
    [("cpu", ["cpu"]), ("cpu:0", ["cpu:0"]), ("cuda:3", ["cuda:3"]), ("cpu:0,cpu:1", ["cpu:0", "cpu:1"])],
)
def test_a_setting_names_devices(setting: str, devices: list[str]) -> None:
    assert devices_of(setting) == devices


@pytest.mark.parametrize("setting", ["cpu,cpu", "cpu:0,cpu:0", "cpu:", "tpu:0", "cpu:0,,cpu:1"])
def test_a_setting_that_names_no_devices_is_refused(setting: str) -> None:
    with pytest.raises(ConfigurationFault, match="cannot be used"):
        devices_of(setting)
