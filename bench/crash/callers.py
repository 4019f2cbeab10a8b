"""Callers who keep a server busy until it dies, and remember every answer that they have received in full."""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Received:
    """An answer, as its caller has it."""

    request: str
    """The ledger's name for it, as the answer says."""
    function: str
    device_us: int


@dataclass
class Seen:
    received: list[Received] = field(default_factory=list)
    in_flight: int = 0
    """Requests that were sent, whose answers never came, or not in full."""


def body_of(number: int) -> bytes:
    data = [float(number % 7)] * 8
    inputs = [{"name": "input", "datatype": "FP32", "shape": [1, 8], "data": data}]
    return json.dumps({"id": str(number), "inputs": inputs}).encode()


async def call_until_it_dies(
    port: int, functions: int, callers: int, kill_after_s: float, kill: Callable[[], None]
) -> Seen:
    """So many callers, one request after another each; the server is killed in the midst of it."""
    seen = Seen()
    calls = [asyncio.create_task(_caller(port, functions, seen, random.Random(n))) for n in range(callers)]
    await asyncio.sleep(kill_after_s)
    await asyncio.to_thread(kill)
    await asyncio.gather(*calls)
    return seen


async def _caller(port: int, functions: int, seen: Seen, chance: random.Random) -> None:
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while True:
                name = f"f{chance.randrange(functions)}"
                seen.in_flight += 1
                answer = await _ask(reader, writer, name, body_of(chance.randrange(10**6)))
                if answer is None:
                    return
                seen.in_flight -= 1
                seen.received.append(answer)
        finally:
            writer.close()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, body: bytes) -> Received | None:
    """None: the server is gone."""
    head = f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        writer.write(head.encode() + body)
        said = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in said.split("\r\n"))}
        content = await reader.readexactly(int(lines["content-length"]))
    except (OSError, asyncio.IncompleteReadError):
        return None
    answer = json.loads(content)
    if not said.startswith("HTTP/1.1 200"):
        raise SystemExit(f"{name} was refused: {answer}")
    told = answer["parameters"]
    return Received(told["dormouse_request"], f"{name}/{answer['model_version']}", told["dormouse_device_us"])
