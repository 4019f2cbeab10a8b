"""The demo's server: ``dormouse serve`` as a process of its own, and what the demo asks at the operator's door."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from dormouse.demo.child import child, failure
from dormouse.errors import DormouseError
from dormouse.functions import Manifest

STOP_LIMIT_S = 30.0
READY = b" is ready on "


class Operator:
    """Deploys, and asks how it went. Made by ``server``."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.url = url
        self._http = http

    async def deploy(self, manifest: Manifest) -> None:
        """Raises DormouseError with the server's own words."""
        answer = await self._http.post("/dormouse/functions", content=msgspec.json.encode(manifest))
        if answer.is_error:
            raise DormouseError(f"{manifest.name} was not deployed: {answer.text}")

    async def functions(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (await self._http.get("/dormouse/functions")).json()["functions"]
        return rows

    async def node(self) -> dict[str, Any]:
        node: dict[str, Any] = (await self._http.get("/dormouse/node")).json()
        return node


@asynccontextmanager
async def server(state_dir: Path, options: Sequence[str], log_file: Path) -> AsyncIterator[Operator]:
    """A server on a free loopback port, ended when left. Raises DormouseError if it does not start."""
    command = [
        sys.executable,
        "-m",
        "dormouse.cli",
        "serve",
        "--state-dir",
        str(state_dir),
        "--port",
        "0",
        "--no-auth",
        *options,
    ]
    async with child(command, log_file, stop_limit_s=STOP_LIMIT_S) as process:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if READY not in line:
            raise await failure("the server did not start", process, log_file)
        url = line.partition(READY)[2].split()[0].decode()
        async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http:
            yield Operator(url, http)
