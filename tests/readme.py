"""The README's way from clone to an embedding: its blocks, and what comes of them when they are run."""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).parents[1]
HEADING = "## From clone to an embedding\n"
SHELL = ("bash", "-euo", "pipefail", "-c")


class Way(Struct, frozen=True):
    """The blocks: what installs, what serves, what deploys and asks, and a program."""

    install: str
    serve: str
    ask: str
    program: str


class Answers(Struct, frozen=True):
    """What the last two blocks print."""

    asked: str
    program: str


def way() -> Way:
    """As it is written."""
    section = (ROOT / "README.md").read_text().partition(HEADING)[2].partition("\n## ")[0]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    assert [language for language, _ in blocks] == ["sh", "sh", "sh", "python"]
    return Way(*(text for _, text in blocks))


def walked(steps: Way, directory: Path, environment: Mapping[str, str]) -> Answers:
    """Serve, and meanwhile ask, each in a shell of its own as a reader would."""
    told = {**os.environ, **environment}
    command = (*SHELL, steps.serve.replace("dormouse serve", "exec dormouse serve"))
    server = subprocess.Popen(command, cwd=directory, env=told, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert "dormouse is ready on" in server.stdout.readline()

        def run(*command: str) -> str:
            done = subprocess.run(command, cwd=directory, env=told, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            return done.stdout

        asked = run(*SHELL, steps.ask)
        activated = steps.serve.partition("dormouse serve")[0]
        return Answers(asked, run(*SHELL, f'{activated}python -c "$0"', steps.program))
    finally:
        server.terminate()
        server.communicate()
