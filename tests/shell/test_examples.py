"""The examples of the README and of docs/clients.md, word for word, each in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shell.running import RunningServer

ROOT = Path(__file__).parents[2]
CLIENTS = ("tritonclient.http", "tritonclient.http.aio", "tritonclient.grpc", "tritonclient.grpc.aio")
KSERVE = ("InferenceRESTClient", "InferenceGRPCClient")


def examples() -> list[str]:
    """Python that talks to a server."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/clients.md")]
    blocks = [block for text in texts for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    # OpenAI's ask another function: test_readme runs the README's, and the last test here the other.
    return [block for block in blocks if (":8000" in block or ":8001" in block) and "OpenAI(" not in block]


def test_there_is_one_for_every_client() -> None:
    everything = "\n".join(examples())
    assert all(f"{client}.InferenceServerClient(" in everything for client in CLIENTS)
    assert all(f"{client}(" in everything for client in KSERVE)


@pytest.mark.parametrize("number", range(len(examples())))
def test_an_example_works(number: int, server: RunningServer) -> None:
    code = examples()[number].replace("127.0.0.1:8000", server.address).replace("127.0.0.1:8001", server.grpc)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "output" in done.stdout or "0.6" in done.stdout, done.stdout
    (inference,) = server.node.seen
    assert (inference.name, inference.inputs[0].shape) == ("classifier", (1, 3))


def test_the_example_for_openais_client_works(server: RunningServer) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/openai.md").read_text(), re.DOTALL)
    code = code.replace("127.0.0.1:8000", server.address).replace("minilm", "embedder")
    code = code.replace("A dormouse sleeps all winter.", "a dormouse sleeps all winter")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\[0\.\d+, 0\.\d+, 0\.\d+\]\n", done.stdout)
