"""Asks a server over HTTP with binary tensors, from a process of its own, and checks every answer.

    python -m bench.density.client PLAN.json        (a Plan; results go where it says, as arrays)

Open loop: a request is sent when its time has come, whatever became of those before it, and its latency counts from
that time. Closed loop: so many requests are under way at any time.
"""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

PATHS = ("resident", "peer", "host", "disk", "build")
FAILED = -1


@dataclass
class Plan:
    host: str
    port: int
    names: list[str]
    requests: list[str]
    """By function: a file with all of its request but the first line."""
    references: str
    """A file of what the functions should answer; empty: answers are not looked at."""
    results: str
    at_s: list[float] = field(default_factory=list)
    """Open loop: when, and in ``function`` which. Closed: empty."""
    function: list[int] = field(default_factory=list)
    """In this order; a closed loop begins anew at its end."""
    concurrency: int = 0
    seconds: float = 0
    pause_s: float = 0
    """Closed loop: between an answer and the next request."""
    most: int = 0
    """Closed loop: ends after so many; 0: by time only."""


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self._done: asyncio.Future[tuple[int, bytes, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def ask(self, first: bytes, rest: bytes) -> "asyncio.Future[tuple[int, bytes, bytes]]":
        """Status, JSON and raw bytes of the answer."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._transport.writelines([first, rest])
        return self._done

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        lines = bytes(self._received[:end]).lower().split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines[1:])
        size = int(headers[b"content-length"])
        body = self._received[end + 4 :]
        if len(body) < size:
            return
        self._received.clear()
        text = int(headers.get(b"inference-header-content-length", b"%d" % size))
        done, self._done = self._done, None
        assert done is not None
        if not done.done():
            done.set_result((int(lines[0].split(b" ")[1]), bytes(body[:text]), bytes(body[text:])))

    @property
    def closed(self) -> bool:
        """Servers close a connection that has long been idle."""
        return self._transport is None or self._transport.is_closing()

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))


@dataclass
class Row:
    """One request. ``error``: the answer's distance from the reference, of its size, in the 2-norm."""

    function: int
    due_s: float
    sent_s: float
    done_s: float
    status: int
    path: int
    error: float


class Client:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._requests = {file: Path(file).read_bytes() for file in set(plan.requests)}
        self._expected = _references(plan)
        self._idle: list[Connection] = []
        self._started = 0.0
        self.rows: list[Row] = []

    async def run(self) -> None:
        self._started = time.perf_counter()
        await (self._open() if self._plan.at_s else self._closed())

    async def _open(self) -> None:
        tasks = []
        for at_s, function in zip(self._plan.at_s, self._plan.function, strict=True):
            wait_s = self._started + at_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(self._ask(function, at_s)))
        await asyncio.gather(*tasks)

    async def _closed(self) -> None:
        order = self._order()
        await asyncio.gather(*(self._keep_asking(order) for _ in range(self._plan.concurrency)))

    def _order(self) -> Iterator[int]:
        count = 0
        while not self._plan.most or count < self._plan.most:
            yield self._plan.function[count % len(self._plan.function)]
            count += 1

    async def _keep_asking(self, order: Iterator[int]) -> None:
        for function in order:
            now_s = time.perf_counter() - self._started
            if self._plan.seconds and now_s > self._plan.seconds:
                return
            await self._ask(function, now_s)
            if self._plan.pause_s:
                await asyncio.sleep(self._plan.pause_s)

    async def _ask(self, function: int, due_s: float) -> None:
        first = f"POST /v2/models/{self._plan.names[function]}/infer HTTP/1.1\r\n".encode()
        rest = self._requests[self._plan.requests[function]]
        sent_s = time.perf_counter() - self._started
        try:
            connection = await self._connected()
            status, text, raw = await connection.ask(first, rest)
        except OSError:
            status, text, raw = FAILED, b"", b""
        else:
            self._idle.append(connection)
        done_s = time.perf_counter() - self._started
        path, error = self._looked_at(function, text, raw) if status == 200 else (FAILED, float("nan"))
        if status != 200 and sum(row.status != 200 for row in self.rows) < 5:
            print(f"{self._plan.names[function]}: {status} {text[:300]!r}", file=sys.stderr)
        self.rows.append(Row(function, due_s, sent_s, done_s, status, path, error))

    async def _connected(self) -> Connection:
        while self._idle:
            if not (kept := self._idle.pop()).closed:
                return kept
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._plan.host, self._plan.port)
        return connection

    def _looked_at(self, function: int, text: bytes, raw: bytes) -> tuple[int, float]:
        answer = np.frombuffer(raw, np.float32)
        expected = self._expected[function] if self._expected else answer
        error = (
            float(np.linalg.norm(answer - expected) / np.linalg.norm(expected))
            if answer.shape == expected.shape
            else np.inf
        )
        return PATHS.index(json.loads(text)["parameters"]["dormouse_path"]), error


def _references(plan: Plan) -> list[NDArray[np.float32]]:
    if not plan.references:
        return []
    with np.load(plan.references) as references:
        return [references[name] for name in plan.names]


def main() -> None:
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
    client = Client(plan)
    began = time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(client.run())
    took_s = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_SELF)
    columns = {key: np.array([asdict(row)[key] for row in client.rows]) for key in Row.__dataclass_fields__}
    cores = (used.ru_utime + used.ru_stime) / took_s
    np.savez(plan.results, took_s=took_s, cores=cores, **columns)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
