"""What leaves a device so that something else may come.

A policy names victims, or answers None: "cannot now". That it cannot is remembered (``Executor.full_for``), so a policy
may depend on nothing but the executor, the functions that are resident there, and the incoming function's first request
and whether that is late, and on the time in steps of two seconds. Victims are never in use: running, loading, the
source of a copy, pinned to the tier, or with queued work that would bring them straight back. The last has two
exceptions. Maximum wait: a request that is past its own deadline may displace idle functions whose work is less urgent.
And where one queue serves all devices its order alone says who is next: work that waits spares nobody.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TypeAlias

from dormouse.core.state import PINNED, RESIDENT, Executor, Function, Request, State, Want
from dormouse.core.types import Bytes, FunctionId, Ns

Eviction: TypeAlias = Callable[[State, Executor, Function, Ns], tuple[FunctionId, ...] | None]


KEEP_ALIVE_CHECK_NS: Ns = 2_000_000_000
"""Keep-alives are looked at so often, as in Torpor's artifact."""


def want_of(incoming: Function, now: Ns) -> Want:
    """What the incoming function's claim to room depends on."""
    head, look = incoming.head, now // KEEP_ALIVE_CHECK_NS
    if head is None:
        return Want(incoming.id, None, False, look)
    return Want(incoming.id, head.id, head.deadline_ns < now, look)


def yields(victim: Function, head: Request) -> bool:
    """Whether a victim's queued work may wait for a request that is late."""
    waiting = victim.head
    assert waiting is not None, f"{victim.id} has no queued work"
    return head.deadline_ns < waiting.deadline_ns


def least_recently_used(state: State, executor: Executor, incoming: Function, now: Ns) -> tuple[FunctionId, ...] | None:
    """Least recently used first, idle ones before those with queued work; none whose going is not needed."""
    needed = executor.region_bytes(incoming.spec) - executor.free_bytes
    return smallest_prefix(_in_order_of_use(state, executor, incoming, now), needed)


def _in_order_of_use(
    state: State, executor: Executor, incoming: Function, now: Ns
) -> Iterator[tuple[FunctionId, Bytes]]:
    """Candidates, found only as far as somebody asks: with many functions on a device the first few are enough."""
    busy = []
    spares = not state.settings.one_queue
    head = incoming.head
    late = None if head is None or head.deadline_ns >= now else head
    for name, residency in executor.recency.items():
        if residency.state is not RESIDENT or residency.feeds:
            continue
        function = state.functions[name]
        if function.spec.pin is PINNED:
            continue
        if not (spares and function.queue):
            yield name, residency.size_bytes
        elif late is not None and yields(function, late):
            busy.append((name, residency.size_bytes))
    yield from busy


def smallest_prefix(candidates: Iterable[tuple[FunctionId, Bytes]], needed: Bytes) -> tuple[FunctionId, ...] | None:
    """The first candidates that free enough, less those that the later ones made needless; None if all are too few."""
    chosen: dict[FunctionId, Bytes] = {}
    freed = 0
    if needed <= 0:
        return ()
    for candidate, size_bytes in candidates:
        chosen[candidate] = size_bytes
        freed += size_bytes
        if freed >= needed:
            break
    else:
        return None
    for candidate, size_bytes in tuple(chosen.items()):
        if freed - size_bytes >= needed:
            del chosen[candidate]
            freed -= size_bytes
    return tuple(chosen)


def light_first(state: State, executor: Executor, incoming: Function, now: Ns) -> tuple[FunctionId, ...] | None:
    """Torpor's (ATC'25, section on eviction; its artifact): light functions and those that have another replica first,
    in order of use; then, in the same order, the last replicas of heavy ones. Among so many of those that are not used
    lately: where a device holds more, one that has just been used is not the better victim for being light."""
    needed = executor.region_bytes(incoming.spec) - executor.free_bytes
    if needed <= 0:
        return ()
    candidates = _in_order_of_use(state, executor, incoming, now)
    weighed = islice(candidates, CONSIDERED_LIGHT)
    return smallest_prefix(chain(_protected_last(state, weighed), candidates), needed)


def _protected_last(state: State, candidates: Iterable[tuple[FunctionId, Bytes]]) -> Iterator[tuple[FunctionId, Bytes]]:
    protected = []
    for name, size_bytes in candidates:
        function = state.functions[name]
        if len(function.residencies) == 1 and is_heavy(state, function):
            protected.append((name, size_bytes))
        else:
            yield name, size_bytes
    yield from protected


CONSIDERED_LIGHT = 128
"""More than a GPU of the paper holds: 25 GB are 94 of its functions."""
HEAVY_PERCENT = 90
"""A function whose load takes at least so much of its computing time is noticeably slower when it is swapped in: what
is copied can no longer hide behind what is computed. Of the paper's eight models that puts the ResNets and BERT on one
side, as its artifact does."""


def is_heavy(state: State, function: Function) -> bool:
    """By measured times; one whose computing time is not known yet counts as heavy."""
    if not function.lead.known:
        return True
    load_ns = function.spec.image_bytes * 1_000_000_000 // state.settings.topology.host_rate_of_all
    return load_ns * 100 >= function.lead.computing_ns * HEAVY_PERCENT


def never(state: State, executor: Executor, incoming: Function, now: Ns) -> tuple[FunctionId, ...] | None:
    """Who has come stays, as where every function holds a device's memory for good."""
    del state, now
    return () if executor.region_bytes(incoming.spec) <= executor.free_bytes else None


def past_keep_alive(state: State, executor: Executor, incoming: Function, now: Ns) -> tuple[FunctionId, ...] | None:
    """INFless's (ASPLOS'22): only functions that have not been asked for longer than 99 % of their gaps last."""
    needed = executor.region_bytes(incoming.spec) - executor.free_bytes
    looked_ns = now - now % KEEP_ALIVE_CHECK_NS
    candidates = _in_order_of_use(state, executor, incoming, now)
    over = ((name, size) for name, size in candidates if state.functions[name].rhythm.is_over(looked_ns))
    return smallest_prefix(over, needed)


CONSIDERED = 64
"""Of the functions on a device so many are weighed, the least recently used: the others were used too lately."""


def least_missed(state: State, executor: Executor, incoming: Function, now: Ns) -> tuple[FunctionId, ...] | None:
    """Ours: those first whose going costs least, by byte: how often they are asked, and what a miss then costs beyond a
    hit. Another replica makes a miss cheap."""
    needed = executor.region_bytes(incoming.spec) - executor.free_bytes
    if needed <= 0:
        return ()
    candidates = _in_order_of_use(state, executor, incoming, now)
    weighed = list(islice(candidates, CONSIDERED))
    weighed.sort(key=lambda candidate: miss_cost(state, state.functions[candidate[0]], now))
    return smallest_prefix(chain(weighed, candidates), needed)


DISTURBED = 2
"""A load may take so many times as long as alone, if others load too."""
BROKEN_PROMISE = 10
"""A miss that may break the deadline counts as so many deadlines of delay."""


def miss_cost(state: State, function: Function, now: Ns) -> int:
    """Of going without one byte, in parts that mean nothing but compare: the rate of requests, times the delay."""
    load_ns = function.spec.image_bytes * 1_000_000_000 // state.settings.topology.host_rate_of_all
    computing_ns = function.lead.computing_ns if function.lead.known else 0
    # The link is taken for as long as the load takes, even where computing hides it from the request.
    delay_ns = max(load_ns - computing_ns, load_ns // 4)
    if DISTURBED * load_ns + computing_ns > function.spec.slo.deadline_ns:
        delay_ns += BROKEN_PROMISE * function.spec.slo.deadline_ns
    replicas = len(function.residencies)
    return delay_ns * 1_000_000 // (function.rhythm.gap_ns(now) * replicas) * 1_000_000 // function.spec.image_bytes


EVICTION: dict[str, Eviction] = {
    "lru": least_recently_used,
    "torpor": light_first,
    "least-missed": least_missed,
    "keep-alive": past_keep_alive,
    "never": never,
}
