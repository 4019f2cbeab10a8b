"""What was measured of this machine's links: measured once, in a process of its own, and kept in the state directory.

A result is kept by machine: cards, driver and places on the bus. With another card or another driver it is none.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from dormouse.device.driver import Driver
from dormouse.device.measuring import Machine, Measured, machine_of
from dormouse.errors import ConfigurationFault, DeviceError

LIMIT_S = 300
COMMAND = (sys.executable, "-m", "dormouse.device.measuring")
"""What is started; it prints a Measured, or one line about why not."""


def this_machine() -> Machine | None:
    """None without a GPU."""
    with suppress(DeviceError):
        machine = machine_of(Driver())
        return machine if machine.cards else None
    return None


def stored(state_dir: Path, machine: Machine) -> Measured | None:
    """What was measured of the machine; None if nothing was, or it cannot be read."""
    with suppress(OSError, msgspec.DecodeError):
        measured = msgspec.json.decode(_file(state_dir, machine).read_bytes(), type=Measured)
        return measured if measured.machine == machine else None
    return None


def calibrate(state_dir: Path, machine: Machine, command: tuple[str, ...] = COMMAND) -> Measured:
    """Measure, which takes seconds, and keep the result. Raises DeviceError or ConfigurationFault."""
    try:
        child = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise DeviceError("calibrate", "TOO_SLOW", f"it was not done within {LIMIT_S} s") from None
    if child.returncode != 0:
        lines = child.stderr.decode(errors="replace").splitlines() or [f"exit status {child.returncode}"]
        raise DeviceError("calibrate", "FAILED", lines[-1])
    measured = msgspec.json.decode(child.stdout, type=Measured)
    _keep(state_dir, machine, measured)
    return measured


def ensure(
    state_dir: Path, machine: Machine | None, say: Callable[[str], None], command: tuple[str, ...] = COMMAND
) -> None:
    """At a start: measure if that has not been done on this machine. Says so; whatever goes wrong, defaults will do."""
    if machine is None or stored(state_dir, machine) is not None:
        return
    say(f"measuring the links of {len(machine.cards)} GPU(s), once on this machine; --calibrate off skips it")
    try:
        measured = calibrate(state_dir, machine, command)
    except (DeviceError, ConfigurationFault) as fault:
        say(f"warning: links were not measured, so defaults are used: {fault.message}")
        return
    for note in measured.notes:
        say(note)
    say(f"measured in {measured.took_ns / 1e9:.1f} s; dormouse calibrate shows what")


def _keep(state_dir: Path, machine: Machine, measured: Measured) -> None:
    file = _file(state_dir, machine)
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(measured)) + b"\n")
        unfinished.replace(file)
    except OSError as fault:
        raise ConfigurationFault(f"state_dir = {str(state_dir)!r} cannot be written: {fault.strerror}") from None


def _file(state_dir: Path, machine: Machine) -> Path:
    return state_dir / f"calibration-{hashlib.sha256(msgspec.json.encode(machine)).hexdigest()[:12]}.json"
