"""A whole run: ask the server about its functions, write their requests, drive, and sum up."""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import uvloop
from msgspec import Struct

from dormouse.errors import InvalidRequest
from dormouse.load.connection import Pool, address_in
from dormouse.load.drive import Drive, asked, fetched
from dormouse.load.outcome import Outcome, Sent, outcome_of
from dormouse.load.plan import Plan
from dormouse.load.target import Protocol, Sizes, Target, of_file, of_metadata, path_of, written

SHOWN_EVERY_S = 0.2
SLO_MS, PERCENTILE = 1000.0, 98.0
"""Where the server says nothing of them."""

Shown = Callable[[int], None]
"""Told how many requests have ended."""


class Order(Struct, frozen=True):
    """What is to be done, beside the plan. ``slo_ms``: in place of the functions' own deadlines."""

    url: str
    protocol: Protocol = "v2"
    key: str | None = None
    ca: Path | None = None
    sizes: Sizes = Sizes()
    seed: int = 42
    input: Path | None = None
    slo_ms: float | None = None
    connections: int = 1024
    timeout_s: float = 60.0


def carry_out(order: Order, plan: Plan, shown: Shown = lambda _: None) -> tuple[Outcome, list[Sent]]:
    """Do it, on an event loop of its own. Ctrl-C ends it early, with what was measured so far. Raises DormouseError."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(driven(order, plan, shown))


async def driven(order: Order, plan: Plan, shown: Shown = lambda _: None) -> tuple[Outcome, list[Sent]]:
    """The same on the loop that runs. Raises DormouseError."""
    pool = Pool(address_in(order.url), order.connections, order.ca)
    try:
        targets = [await _target(pool, name, order) for name in plan.functions]
        drive = Drive(plan, targets, pool, order.timeout_s)
        await _until_stopped(drive, shown)
    finally:
        pool.close()
    outcome = outcome_of(
        drive.sent,
        [(target.name, target.deadline_ms, target.percentile) for target in targets],
        planned=len(plan.arrivals),
        duration_ns=drive.duration_ns,
        connections=pool.opened,
        interrupted=drive.interrupted,
    )
    return outcome, drive.sent


async def _until_stopped(drive: Drive, shown: Shown) -> None:
    loop = asyncio.get_running_loop()

    async def show() -> None:
        while True:
            shown(len(drive.sent))
            await asyncio.sleep(SHOWN_EVERY_S)

    showing = asyncio.create_task(show())
    try:
        loop.add_signal_handler(signal.SIGINT, drive.stop)
        caught = True
    except (ValueError, RuntimeError):  # not the main thread: whoever runs it there has another way to stop
        caught = False
    try:
        await drive.run()
    finally:
        showing.cancel()
        if caught:
            loop.remove_signal_handler(signal.SIGINT)
    shown(len(drive.sent))


async def _target(pool: Pool, name: str, order: Order) -> Target:
    address, where = address_in(order.url), f"/v2/models/{quote(name, safe='')}"
    metadata = await fetched(pool, written(address, where, order.key), f"function {name!r}")
    configured = await fetched(pool, written(address, f"{where}/config", order.key), f"function {name!r}")
    deadline_ms, percentile = slo_in(configured)
    if order.input is None:
        bodies = of_metadata(cast("Mapping[str, Any]", metadata), order.protocol, order.sizes, order.seed)
    else:
        bodies = of_file(order.input)
    requests = [written(address, path_of(order.protocol, name), order.key, body, more) for body, more in bodies]
    first = await refused(pool, requests)
    if first is not None:
        raise InvalidRequest(
            f"function {name!r} refuses the requests made for it ({first}); give it others with --input"
        )
    return Target(name, requests, order.slo_ms or deadline_ms, percentile)


async def refused(pool: Pool, requests: Sequence[bytes]) -> int | None:
    """Tries the first request before the clock runs; the status of a refusal that others would share."""
    answer = await asked(pool, requests[0])
    return answer.status if 400 <= answer.status < 500 and answer.status != 429 else None


def slo_in(configured: Mapping[str, object]) -> tuple[float, float]:
    """Deadline in milliseconds and percentile, from a model's configuration."""
    parameters = configured.get("parameters")
    said = parameters if isinstance(parameters, dict) else {}

    def number(name: str, default: float) -> float:
        value = said.get(name)
        return float(value["string_value"]) if isinstance(value, dict) and "string_value" in value else default

    return number("slo_ms", SLO_MS), number("slo_percentile", PERCENTILE)
