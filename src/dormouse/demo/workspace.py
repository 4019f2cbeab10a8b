"""Where the demo keeps things: a cache that stays, and a folder for one run that is removed, even after a crash."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dormouse.errors import ConfigurationFault

CACHE_VARIABLE = "DORMOUSE_DEMO_CACHE"
HOME = Path.home() / ".cache" / "dormouse" / "demo"
NEEDED_BYTES = 5 * 10**9
_LOCK = "lock"


def cache_directory() -> Path:
    """The cache, on a disk with room for a run. Raises ConfigurationFault."""
    cache = Path(os.environ.get(CACHE_VARIABLE) or HOME).absolute()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
    except OSError as fault:
        raise ConfigurationFault(
            f"{cache} cannot be used: {fault.strerror}; name another in {CACHE_VARIABLE}"
        ) from None
    _remove_leftovers(cache)
    if free < NEEDED_BYTES:
        raise ConfigurationFault(
            f"the demo needs {NEEDED_BYTES / 1e9:.0f} GB on disk and {cache} has {free / 1e9:.1f} GB free; "
            f"name a folder with more in {CACHE_VARIABLE}"
        )
    return cache


@contextmanager
def run_directory(cache: Path) -> Iterator[Path]:
    """A folder beside the cache, not in the system's for temporary files, which may be memory. Gone when left."""
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=cache))
    try:
        with (directory / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go by the system, however the process ends
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _remove_leftovers(cache: Path) -> None:
    """Folders of runs whose process is gone."""
    for directory in cache.glob("run-*"):
        try:
            with (directory / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            continue  # a run that is going on
        except OSError:
            shutil.rmtree(directory, ignore_errors=True)
