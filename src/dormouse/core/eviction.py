"""What leaves a device so that something else may come.

A policy names victims, or answers None: "cannot now". That it cannot is remembered (``Executor.full_for``), so a policy
may depend on nothing but the executor, the functions that are resident there, and the incoming function's first request
and whether that is late. Victims are never in use: running, loading, the source of a
copy, pinned to the tier, or with queued work that would bring them straight back. The one exception to the last is
maximum wait: a request that is past its own deadline may displace idle functions whose work is less urgent.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TypeAlias

from dormouse.core.state import PINNED, RESIDENT, Executor, Function, Request, State, Want
from dormouse.core.types import Bytes, FunctionId, Ns

Eviction: TypeAlias = Callable[[State, Executor, Function, Ns], tuple[FunctionId, ...] | None]


def want_of(incoming: Function, now: Ns) -> Want:
    """What the incoming function's claim to room depends on."""
    head = incoming.head
    return Want(incoming.id, None, False) if head is None else Want(incoming.id, head.id, head.deadline_ns < now)


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
    head = incoming.head
    late = None if head is None or head.deadline_ns >= now else head
    for name, residency in executor.recency.items():
        if residency.state is not RESIDENT or residency.feeds:
            continue
        function = state.functions[name]
        if function.spec.pin is PINNED:
            continue
        if not function.queue:
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
    in order of use; then, in the same order, the last replicas of heavy ones."""
    needed = executor.region_bytes(incoming.spec) - executor.free_bytes
    protected: list[tuple[FunctionId, Bytes]] = []
    others: list[tuple[FunctionId, Bytes]] = []
    for name, size_bytes in _in_order_of_use(state, executor, incoming, now):
        function = state.functions[name]
        spared = is_heavy(state, function) and len(function.residencies) == 1
        (protected if spared else others).append((name, size_bytes))
    return smallest_prefix(others + protected, needed)


HEAVY_PERCENT = 80
"""A function whose load takes at least so much of its computing time is noticeably slower when it is swapped in: what
is copied can no longer hide behind what is computed. Of the paper's eight models that puts the ResNets and BERT on one
side, as its artifact does."""


def is_heavy(state: State, function: Function) -> bool:
    """By measured times; one whose computing time is not known yet counts as heavy."""
    if not function.lead.known:
        return True
    load_ns = function.spec.image_bytes * 1_000_000_000 // state.settings.topology.host_bytes_per_s
    return load_ns * 100 >= function.lead.computing_ns * HEAVY_PERCENT


CONSIDERED = 64
"""Of the functions on a device so many are weighed, the least recently used: the others were used too lately."""


def least_missed(state: State, executor: Executor, incoming: Function, now: Ns) -> tuple[FunctionId, ...] | None:
    """Ours: those first whose going costs least, by byte: the rate at which they are asked, and what a miss then costs
    beyond a hit. Another replica makes a miss cheap."""
    needed = executor.region_bytes(incoming.spec) - executor.free_bytes
    if needed <= 0:
        return ()
    candidates = _in_order_of_use(state, executor, incoming, now)
    weighed = list(islice(candidates, CONSIDERED))
    weighed.sort(key=lambda candidate: miss_cost(state, state.functions[candidate[0]], now))
    return smallest_prefix(chain(weighed, candidates), needed)


def miss_cost(state: State, function: Function, now: Ns) -> int:
    """Of one byte for one second, in parts that mean nothing but compare."""
    load_ns = function.spec.image_bytes * 1_000_000_000 // state.settings.topology.host_bytes_per_s
    computing_ns = function.lead.computing_ns if function.lead.known else 0
    # The link is taken for as long as the load takes, even where computing hides it from the request.
    delay_ns = max(load_ns - computing_ns, load_ns // 4)
    replicas = len(function.residencies)
    return delay_ns * 1_000_000 // (function.rhythm.gap_ns(now) * replicas) * 1_000_000 // function.spec.image_bytes


EVICTION: dict[str, Eviction] = {"lru": least_recently_used, "torpor": light_first, "least-missed": least_missed}
