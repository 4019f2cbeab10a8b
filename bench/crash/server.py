"""A server of its own process, which can be killed and started again over the same state directory."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

MODELS = Path(__file__).parent / "models"
LIMIT_S = 120


class Crashed(Exception):
    """The server ended of itself, or did not come up."""


class Server:
    """Started by ``start``, which returns when it has said that it is ready, and how long that took."""

    def __init__(self, state_dir: Path, options: list[str], source: Path | None = None) -> None:
        """``source``: where another version of the package lies, if it is not to be this one."""
        self.state_dir = state_dir
        paths = filter(None, (str(source), os.environ.get("PYTHONPATH")))
        self._environment = None if source is None else {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._options = options
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> float:
        command = [sys.executable, "-m", "dormouse.cli", "serve", "--state-dir", str(self.state_dir)]
        command += ["--port", str(self.port), "--grpc-port", "off", "--device", "cpu", "--device-bytes", "64MiB"]
        command += ["--host-bytes", "1GiB", "--allow-code", str(MODELS), "--threads", "1", *self._options]
        began = time.monotonic()
        with (self.state_dir.parent / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "is ready" not in line:
            raise Crashed(f"the server did not come up: {(self.state_dir.parent / 'server.log').read_text()[-2000:]}")
        return time.monotonic() - began

    def kill(self) -> None:
        """As the kernel does it, or an operator in despair."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            raise Crashed("the server has ended of itself")
        process.send_signal(number)
        process.wait(LIMIT_S)
        assert process.stdout is not None
        process.stdout.close()
        self._process = None

    def deploy(self, count: int) -> None:
        """So many functions, ``f0`` and on, of one architecture."""
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=LIMIT_S) as http:
            for number in range(count):
                like = {} if number == 0 else {"like": "f0"}
                source = {"source": "tiny:eight", "code": str(MODELS), "arguments": {"seed": number}}
                if number:
                    source["source"] = "tiny:weights"
                http.post("/dormouse/functions", json={"name": f"f{number}", **source, **like}).raise_for_status()
