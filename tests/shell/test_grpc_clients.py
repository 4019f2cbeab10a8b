"""Unmodified gRPC clients against a real server, each in a process of its own; and the protocol file."""

import subprocess
import sys
from pathlib import Path

import pytest
from grpc_tools import protoc

import dormouse.gateway

CLIENTS = Path(__file__).parent / "clients"
GATEWAY = Path(dormouse.gateway.__file__).parent


@pytest.mark.parametrize("client", ["triton_grpc", "kserve_grpc"])
def test_a_client_is_content(client: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(CLIENTS / f"{client}.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=GATEWAY.parents[2], timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_the_compiled_protocol_is_that_of_the_proto_files(tmp_path: Path) -> None:
    fresh = tmp_path / "protocol.binpb"
    command = ["protoc", f"-I{GATEWAY}", f"--descriptor_set_out={fresh}", "inference.proto", "health.proto"]
    assert protoc.main(command) == 0
    assert (GATEWAY / "protocol.binpb").read_bytes() == fresh.read_bytes(), "run `make protocol`"
