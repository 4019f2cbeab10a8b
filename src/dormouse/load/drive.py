"""Sends what a plan says, when it says so, whatever becomes of what was sent before.

Waits on nothing but the clock between two requests; each is a task of its own. Decides nothing about what the figures
mean.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from dormouse.core.types import Ns
from dormouse.errors import DormouseError
from dormouse.load.connection import Answer, Gone, Pool
from dormouse.load.outcome import Sent
from dormouse.load.plan import Plan
from dormouse.load.target import Target

SECOND_NS: Ns = 1_000_000_000
LEAD_S = 0.05
"""Between the start and the plan's beginning."""
AT_A_STRETCH = 64
"""Requests that are all due are sent so many at a time, before answers are looked at."""


class Drive:
    """One run. ``sent`` fills up as requests end."""

    def __init__(self, plan: Plan, targets: Sequence[Target], pool: Pool, timeout_s: float) -> None:
        self.sent: list[Sent] = []
        self.interrupted = False
        self.duration_ns: Ns = 0
        self._plan = plan
        self._targets = targets
        self._pool = pool
        self._timeout_s = timeout_s
        self._open: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._began_s = 0.0

    def stop(self) -> None:
        """Send no more, and wait for nothing: what was measured counts."""
        self.interrupted = True
        self._stopping.set()

    async def run(self) -> None:
        """Until every request has ended, or ``stop``."""
        now = asyncio.get_running_loop().time
        self._began_s = now() + LEAD_S
        pacing = asyncio.create_task(self._pace())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((pacing, stopping), return_when=asyncio.FIRST_COMPLETED)
        pacing.cancel()
        while self._open and not stopping.done():
            await asyncio.wait((*self._open, stopping), return_when=asyncio.FIRST_COMPLETED)
        self.duration_ns = max(1, round((now() - self._began_s) * SECOND_NS))
        stopping.cancel()
        unfinished = list(self._open)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(pacing, stopping, *unfinished, return_exceptions=True)

    async def _pace(self) -> None:
        now, turns = asyncio.get_running_loop().time, [0] * len(self._targets)
        for count, (at_ns, number) in enumerate(self._plan.arrivals):
            due_s = self._began_s + at_ns / SECOND_NS
            if (early_s := due_s - now()) > 0:
                await asyncio.sleep(early_s)
            elif count % AT_A_STRETCH == 0:
                await asyncio.sleep(0)
            requests = self._targets[number].requests
            task = asyncio.create_task(self._one(number, at_ns, due_s, requests[turns[number] % len(requests)]))
            turns[number] += 1
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _one(self, number: int, at_ns: Ns, due_s: float, request: bytes) -> None:
        now, sent_s, status, path = asyncio.get_running_loop().time, None, "unfinished", ""

        def writing() -> None:
            nonlocal sent_s
            sent_s = now()

        try:
            async with asyncio.timeout_at(due_s + self._timeout_s):
                answer = await asked(self._pool, request, writing)
            status, path = str(answer.status), answer.path
        except TimeoutError:
            status = "timeout"
        except (Gone, OSError):
            status = "connection"
        finally:
            ended_s = now()
            late_ns = round(((ended_s if sent_s is None else sent_s) - due_s) * SECOND_NS)
            self.sent.append(Sent(number, at_ns, max(0, late_ns), round((ended_s - due_s) * SECOND_NS), status, path))


def _nothing() -> None:
    pass


async def asked(
    pool: Pool, request: bytes, writing: Callable[[], None] = _nothing, *, keeps_body: bool = False
) -> Answer:
    """One request over a pool; ``writing`` is called as it goes out. One that a connection from before took with it
    goes out once more. Raises Gone and OSError."""
    connection = await pool.take()
    reused = connection.used > 0
    answer: Answer | None = None
    try:
        writing()
        answer = await connection.ask(request, keeps_body=keeps_body)
    except Gone:
        if not reused:
            raise
    finally:
        pool.give_back(connection, sound=answer is not None)
    if answer is not None:
        return answer
    connection = await pool.take(fresh=True)
    try:
        answer = await connection.ask(request, keeps_body=keeps_body)
    finally:
        pool.give_back(connection, sound=answer is not None)
    return answer


async def fetched(pool: Pool, request: bytes, what: str) -> dict[str, object]:
    """What a server says of something, in JSON. Raises DormouseError."""
    try:
        answer = await asked(pool, request, keeps_body=True)
        said = msgspec.json.decode(answer.body, type=dict[str, object])
    except (Gone, OSError) as fault:
        raise DormouseError(f"no server answers: {fault}; start one with `dormouse serve`, or give --url") from None
    except msgspec.DecodeError:
        raise DormouseError(f"{what}: the server answered {answer.status}, and no JSON") from None
    if answer.status != 200:
        refusal = DormouseError(f"{what}: {said.get('error', answer.status)}")
        refusal.status = answer.status
        raise refusal
    return said
