"""Prometheus' own tool, where it is installed; tests that need it are skipped elsewhere, and say so."""

import shutil
import subprocess
from pathlib import Path

import pytest


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: it comes with Prometheus (Debian: apt install prometheus)")
    return found


def complaints(text: str) -> str:
    """What it says of a scrape."""
    done = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def checked(what: str, file: Path) -> str:
    """What it says of a file of rules or settings that it refuses; nothing, if it does not."""
    done = subprocess.run([promtool(), "check", what, str(file)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr
