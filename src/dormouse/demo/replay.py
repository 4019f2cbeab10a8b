"""Asks a server, and checks every answer: ``python -m dormouse.demo.replay``, a process of its own.

Reads a LoadPlan on stdin, writes Lines on stdout. The load is an open loop: a request leaves when it is due, however
many are still waiting, and none is left out.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
import numpy as np

from dormouse.demo import calibration
from dormouse.demo.arrivals import Arrival, arrivals
from dormouse.demo.comparison import difference
from dormouse.demo.examples import Example, load
from dormouse.demo.fleet import MODELS
from dormouse.demo.messages import Asked, Line, LoadPlan, Paced, Phase, Target, Verdict
from dormouse.demo.v2 import LENGTH_HEADER, Answer, Request, answer_of, request_of

PATIENCE_S = 120.0
"""A request that has no answer after this is lost."""


class Function:
    """A target with its examples, and requests made from them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.model = MODELS[target.model]
        self.examples = load(Path(target.examples))
        self.requests = [request_of(example.question) for example in self.examples]

    def promise(self, deadline_ms: float) -> None:
        """Tell the server from now on by when an answer is wanted."""
        self.requests = [request_of(example.question, deadline_ms) for example in self.examples]

    def wrong(self, answer: Answer, example: Example) -> str | None:
        if len(answer.outputs) != 1:
            return f"outputs are {', '.join(answer.outputs)}, expected one"
        (values,) = answer.outputs.values()
        return difference(values, example.answer, self.model)


class Replay:
    """One run against a server."""

    def __init__(self, http: httpx.AsyncClient, functions: Sequence[Function], *, seconds: float, seed: int) -> None:
        self._http = http
        self._functions = functions
        self._seconds = seconds
        self._seed = seed

    async def run(self) -> None:
        # Back and forth: a cache that forgets what was used longest ago would miss every time in a circle.
        for function in reversed(self._functions):
            await self.ask(function, 0, Phase.FIRST, time.perf_counter())
        singles = []
        for function in self._functions:
            for number in range(2):
                asked = await self.ask(function, number, Phase.CALIBRATION, time.perf_counter())
                singles.append((function.target.model, asked))
        await self._load(self._paced(singles))

    def _paced(self, singles: Sequence[tuple[str, Asked]]) -> list[Arrival]:
        resident, host = (
            calibration.by_model((model, asked.latency_ms) for model, asked in singles if asked.path == path)
            for path in ("resident", "host")
        )
        slowest = calibration.by_model((model, asked.latency_ms) for model, asked in singles)
        host = slowest | host  # a model that was never asleep, in a small fleet
        deadlines = calibration.deadlines(host)
        for function in self._functions:
            function.promise(deadlines[function.target.model])
        targets = [function.target for function in self._functions]
        rate = calibration.rate_per_s(host, targets)
        due = arrivals(self._seconds, rate, [target.popularity for target in targets], self._seed)
        say(Paced(resident, host, deadlines, rate, len(due)))
        return due

    async def _load(self, due: Sequence[Arrival]) -> None:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as requests:
            for arrival in due:
                at = start + arrival.at_s
                await asyncio.sleep(at - time.perf_counter())
                function = self._functions[arrival.function]
                requests.create_task(self.ask(function, arrival.example, Phase.LOAD, at))

    async def ask(self, function: Function, number: int, phase: Phase, due: float) -> Asked:
        """One request, due at ``due`` (of ``perf_counter``); says how it ended."""
        number %= len(function.requests)
        try:
            async with asyncio.timeout(PATIENCE_S):
                reply = await self._post(function.target.name, function.requests[number])
        except (TimeoutError, httpx.HTTPError) as fault:
            asked = Asked(function.target.name, phase, Verdict.LOST, _ms_since(due), detail=repr(fault))
        else:
            asked = judged(function, function.examples[number], reply, phase, _ms_since(due))
        say(asked)
        return asked

    async def _post(self, name: str, request: Request) -> httpx.Response:
        return await self._http.post(f"/v2/models/{name}/infer", content=request.body, headers=request.headers)


def judged(function: Function, example: Example, reply: httpx.Response, phase: Phase, latency_ms: float) -> Asked:
    name = function.target.name
    if reply.status_code != httpx.codes.OK:
        return Asked(name, phase, Verdict.FAILED, latency_ms, detail=f"{reply.status_code} {reply.text[:300]}")
    try:
        answer = answer_of(reply.content, int(reply.headers[LENGTH_HEADER]))
        wrong = function.wrong(answer, example)
    except (ValueError, KeyError) as fault:
        return Asked(name, phase, Verdict.WRONG, latency_ms, detail=f"no answer that can be read: {fault}")
    verdict = Verdict.RIGHT if wrong is None else Verdict.WRONG
    return Asked(name, phase, verdict, latency_ms, answer.path, answer.queued_ms, answer.device_ms, wrong or "")


def check_distinct(functions: Sequence[Function]) -> None:
    """Raise ValueError if the answer of one variant would pass for another's: the run would prove little."""
    for number, one in enumerate(functions):
        for other in functions[number + 1 :]:
            for example, confused in _same_questions(one, other):
                if difference(confused.answer, example.answer, one.model) is None:
                    raise ValueError(f"{one.target.name} and {other.target.name} give the same answer")


def _same_questions(one: Function, other: Function) -> list[tuple[Example, Example]]:
    if one.model is not other.model:
        return []
    return [(a, b) for a in one.examples for b in other.examples if _same(a, b)]


def _same(one: Example, other: Example) -> bool:
    return all(np.array_equal(array, other.question[name]) for name, array in one.question.items())


def _ms_since(due: float) -> float:
    return (time.perf_counter() - due) * 1e3


def say(line: Line) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)


async def replay(plan: LoadPlan) -> None:
    functions = [Function(target) for target in plan.targets]
    check_distinct(functions)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=plan.url, timeout=None, limits=limits, trust_env=False) as http:
        await Replay(http, functions, seconds=plan.seconds, seed=plan.seed).run()


if __name__ == "__main__":
    asyncio.run(replay(msgspec.json.decode(sys.stdin.buffer.read(), type=LoadPlan)))
