"""Which images leave host memory for the disk, and when one comes back before it is asked for.

A policy puts the images that may leave in order; it says nothing of how many must. Images never leave while they are
pinned, wanted, or the source of a copy, nor before runtime state on a device has been written home.

``lru``: least recently used first. ``interval``: by what their absence is expected to cost, a byte: how long a read
takes, against how long it will be until the next request. That is told by the histogram of the function's pauses, of
which only those still count that are longer than its present silence (after Shahrad and others, ATC'20, who keep
warm by percentiles of idle times). So a function that is asked every minute leaves just after a request, and one
that is asked at random does not. What has left is read again ahead of its request, if its pauses are alike.

Every choice weighs a bounded number: those used least recently, whose silence has been longest, and those whose next
request was farthest away when they were asked last.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeAlias

from dormouse.core.eviction import smallest_prefix
from dormouse.core.intervals import Rest
from dormouse.core.ready import Key
from dormouse.core.state import Function, ImageState, State
from dormouse.core.types import Bytes, FunctionId, Ns, Pin

Able: TypeAlias = Callable[[Function], bool]


@dataclass(frozen=True, slots=True)
class HostTier:
    """``order``: images that may leave, the first one first. ``learns``: pauses are counted, and what has left is read
    again ahead of time."""

    order: Callable[[State, Able, Ns], Iterator[Function]]
    learns: bool = False


def _in_order_of_use(state: State, able: Able) -> Iterator[Function]:
    return (f for f in map(state.functions.__getitem__, state.host_recency) if able(f))


def least_recently_used(state: State, able: Able, now: Ns) -> Iterator[Function]:
    del now
    return _in_order_of_use(state, able)


FEWEST = 4
"""Fewer pauses say nothing about the next."""
CONSIDERED = 32
"""From either end so many are weighed."""


def least_expected(state: State, able: Able, now: Ns) -> Iterator[Function]:
    """Ours. Those that were weighed come first; then, should they be too few, the others in order of use."""
    weighed = considered(state, able)
    known = {function.id for function in weighed}
    weighed.sort(key=lambda function: worth(state, function, now))
    return chain(weighed, (f for f in _in_order_of_use(state, able) if f.id not in known))


def considered(state: State, able: Able) -> list[Function]:
    """Images from both ends: used least recently, and asked for again latest."""
    found = {function.id: function for function in islice(_in_order_of_use(state, able), CONSIDERED)}
    far, seen = state.far, list[tuple[FunctionId, Key]]()
    while len(seen) < CONSIDERED and (name := far.first()) is not None:
        seen.append((name, far.keys[name]))
        far.discard(name)
        function = state.functions[name]
        if able(function):
            found[name] = function
    for name, key in seen:
        far.put(name, key)
    return list(found.values())


def worth(state: State, function: Function, now: Ns) -> int:
    """What an image is worth in host memory, by byte: a number to compare with others."""
    read_ns = state.disk.read_ns(function.spec.image_bytes)
    return read_ns * 1_000_000_000_000_000 // (until_asked_ns(function, now) * function.host_bytes)


def until_asked_ns(function: Function, now: Ns) -> Ns:
    """How long until the next request, as far as anybody can tell; never 0."""
    rhythm = function.rhythm
    idle_ns = now - rhythm.last_ns
    rest = function.intervals.longer_than(idle_ns)
    if rest.count >= FEWEST:
        return max(1, rest.mean_ns() - idle_ns)
    return rhythm.gap_ns(now)


def learn(state: State, function: Function, now: Ns) -> None:
    """A request has come."""
    if function.rhythm.last_ns >= 0:
        function.intervals.add(now - function.rhythm.last_ns)
    function.rhythm.asked(now)
    if function.image is ImageState.HOST:
        put_in_order(state, function, now)


def put_in_order(state: State, function: Function, now: Ns) -> None:
    """Among the images in host memory, that which is asked for latest first."""
    state.far.put(function.id, (-(now + function.rhythm.gap_ns(now)), 0, 0))


HOST_TIER: dict[str, HostTier] = {
    "lru": HostTier(least_recently_used),
    "interval": HostTier(least_expected, learns=True),
}


# ------------------------------------------------------------------ what leaves


def is_dispensable(function: Function) -> bool:
    """Whether an image could leave host memory, once no device needs it there."""
    return (
        function.image is ImageState.HOST
        and function.spec.pin is Pin.NONE
        and not function.queue
        and not function.is_source_of_a_copy
    )


def writes_state_home(function: Function) -> bool:
    """Runtime state on a device goes back to the image in host memory, which must be there."""
    return function.spec.state_bytes > 0 and bool(function.residencies)


def may_leave(function: Function) -> bool:
    return is_dispensable(function) and not writes_state_home(function)


def images_to_drop(state: State, tier: HostTier, incoming: Function, now: Ns) -> tuple[FunctionId, ...] | None:
    """Images that leave host memory for the incoming one; None when there is no room now."""
    return _enough(state, incoming, lambda: tier.order(state, may_leave, now))


def residents_to_bring_home(state: State, tier: HostTier, incoming: Function, now: Ns) -> tuple[FunctionId, ...]:
    """Idle residents whose state must be written home before their images can make room for the incoming one."""
    images = _enough(state, incoming, lambda: tier.order(state, is_dispensable, now))
    return tuple(name for name in images or () if writes_state_home(state.functions[name]))


def images_worth_less(state: State, tier: HostTier, incoming: Function, now: Ns) -> tuple[FunctionId, ...] | None:
    """Images that may make room for one that nobody has asked for yet: worth less than it. None: too few."""
    value = worth(state, incoming, now)

    def worth_less() -> Iterator[Function]:
        images = islice(tier.order(state, may_leave, now), 2 * CONSIDERED)
        return (function for function in images if worth(state, function, now) < value)

    return _enough(state, incoming, worth_less)


def _enough(state: State, incoming: Function, order: Callable[[], Iterable[Function]]) -> tuple[FunctionId, ...] | None:
    needed: Bytes = incoming.host_bytes - state.host_free_bytes
    if needed <= 0:
        return ()
    candidates = () if state.settings.host_is_last else order()
    return smallest_prefix(((function.id, function.host_bytes) for function in candidates), needed)


# ------------------------------------------------------------------ what comes back

EARLY_PPM, LATE_PPM = 50_000, 950_000
ALIKE = 4
"""Pauses are alike when the late one is at most so many times as long as the early one."""


def expected(rest: Rest) -> tuple[Ns, Ns] | None:
    """From when to when after the last request the next one is due; None: nobody can tell."""
    if rest.count < FEWEST:
        return None
    early_ns, late_ns = rest.no_shorter_than(EARLY_PPM), rest.no_longer_than(LATE_PPM)
    return (early_ns, late_ns) if late_ns <= ALIKE * early_ns else None


def promote_at_ns(state: State, function: Function, now: Ns) -> Ns | None:
    """When an image that is on disk should be read, so that it is there just before its request; None: not at all."""
    last_ns = function.rhythm.last_ns
    due = expected(function.intervals.longer_than(now - last_ns))
    if due is None:
        return None
    read_ns = state.disk.read_ns(function.spec.image_bytes)
    late_ns = last_ns + due[1]
    # What found no room is looked at again, less often the longer it may still take.
    at_ns = max(last_ns + due[0] - 2 * read_ns, now + read_ns, now + (late_ns - now) // 4)
    return at_ns if at_ns < late_ns else None
