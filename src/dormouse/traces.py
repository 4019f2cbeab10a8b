"""Reads request traces as they were published. Raises ConfigurationFault naming the file and, in text, the line."""

import csv
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np

from dormouse.errors import ConfigurationFault
from dormouse.workload import Window

MOST_A_MINUTE = 60_000_000


def calls_per_minute(file: Path) -> list[list[int]]:
    """A numpy array of whole numbers, one row a function, one column a minute (Torpor's ``samples.npy``)."""
    try:
        array = np.load(file, allow_pickle=False)
    except FileNotFoundError:
        raise ConfigurationFault(f"trace {file} is not there") from None
    except (OSError, ValueError, EOFError) as fault:
        raise ConfigurationFault(f"trace {file} is no numpy array: {fault}") from None
    numbers = array.ndim == 2 and array.dtype.kind in "iu" and array.size > 0
    if not numbers or int(array.min()) < 0 or int(array.max()) > MOST_A_MINUTE:
        found = f"{array.dtype}{list(array.shape)}"
        raise ConfigurationFault(
            f"trace {file} holds {found}; calls per minute are whole numbers by function and minute, each from 0 to "
            f"{MOST_A_MINUTE}"
        )
    rows: list[list[int]] = array.tolist()
    return rows


def client_windows(file: Path) -> list[list[Window]]:
    """Rate and gap distribution of every client by window (ServeGen's ``client_rates``), without those never seen."""
    clients: dict[int, list[Window]] = {}
    with opened(file) as text:
        for line, row in rows(file, text, ("client_id", "rate_rps", "iat_dist", "iat_p1")):
            try:
                rate, kind = float(row["rate_rps"]), row["iat_dist"].lower()
                if not 0 <= rate <= MOST_A_MINUTE / 60:
                    raise ValueError(f"a rate of {rate} requests a second")
                shape = float(row["iat_p1"]) if rate > 0 and kind in ("gamma", "weibull") else 1.0
                # A client with too few requests in a window for a fit asks at random: Poisson.
                window = Window(rate, shape if shape > 0 else 1.0, weibull=kind == "weibull" and shape > 0)
                clients.setdefault(int(row["client_id"]), []).append(window)
            except ValueError as fault:
                raise ConfigurationFault(f"trace {file} line {line}: {fault}") from None
    asking = [windows for windows in clients.values() if any(window.rate > 0 for window in windows)]
    if not asking:
        raise ConfigurationFault(f"trace {file} holds no client that ever asks")
    return asking


def invocation_totals(file: Path) -> list[int]:
    """How often each application was called (Azure Functions 2019, day 1), the most popular first."""
    with opened(file) as text:
        totals = []
        for line, row in rows(file, text, ("NumInvocations",)):
            if not row["NumInvocations"].isdecimal():
                raise ConfigurationFault(
                    f"trace {file} line {line}: {row['NumInvocations']!r} is no number of invocations"
                )
            totals.append(int(row["NumInvocations"]))
    return sorted(totals, reverse=True)


@contextmanager
def opened(file: Path) -> Iterator[TextIO]:
    """The text of a trace, packed or not. Raises ConfigurationFault."""
    try:
        with gzip.open(file, "rt", newline="") if file.suffix == ".gz" else file.open(newline="") as text:
            yield text
    except FileNotFoundError:
        raise ConfigurationFault(f"trace {file} is not there") from None
    except (OSError, EOFError, UnicodeDecodeError) as fault:
        raise ConfigurationFault(f"trace {file} cannot be read: {fault}") from None


def rows(file: Path, text: TextIO, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Every line's number and its columns, of which ``columns`` are there. Raises ConfigurationFault."""
    reader = csv.DictReader(text)
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigurationFault(f"trace {file} line 1: there is no column {missing[0]!r}")
    for row in reader:
        if any(row[column] is None for column in columns):
            raise ConfigurationFault(f"trace {file} line {reader.line_num}: the line ends early")
        yield reader.line_num, row
