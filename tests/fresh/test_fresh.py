"""The README's way, from a clone of what is committed, with an installation of its own. Takes minutes."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.readme import ROOT, SHELL, walked, way

LIMIT_S = 600
"""Of the whole way, as the README promises."""


@pytest.mark.fresh
def test_a_fresh_clone_leads_to_an_embedding(tmp_path: Path) -> None:
    clone = tmp_path / "dormouse"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    subprocess.run([*SHELL, way().install], cwd=clone, check=True, timeout=LIMIT_S)
    answers = walked(way(), clone, {"HOME": str(tmp_path)})
    assert '"embedding"' in answers.asked
    assert re.fullmatch(r"cosine 0\.\d{3}\n", answers.program)
