"""Brings images from disk to host memory: those that are asked for, and those that soon will be."""

from heapq import heapify, heappop, heappush

from dormouse.core.admission import larger_than_host
from dormouse.core.operations import evict_everywhere, give_up
from dormouse.core.state import Function, ImageState, State
from dormouse.core.tiering import images_to_drop, images_worth_less, promote_at_ns, residents_to_bring_home
from dormouse.core.turn import Turn
from dormouse.core.types import FOREVER_NS, FunctionId, Ns

PROMOTED_AT_ONCE = 8
"""A turn looks at no more; the next one comes at once."""


def read_images(turn: Turn) -> None:
    """Bring wanted images from disk, most urgent first, dropping what the policy names."""
    state, tier = turn.state, turn.policies.host_tier
    while state.reading < state.settings.concurrent_reads and (function := turn.most_urgent(state.cold)) is not None:
        refusal = larger_than_host(state, function)
        if refusal is not None:
            give_up(turn, function, refusal)
            continue
        victims = images_to_drop(state, tier, function, turn.now)
        if victims is None:
            for resident in residents_to_bring_home(state, tier, function, turn.now):
                evict_everywhere(turn, state.functions[resident])
            return
        _drop(turn, victims)
        turn.read_image(function)


def _drop(turn: Turn, victims: tuple[FunctionId, ...]) -> None:
    for victim in victims:
        function = turn.state.functions[victim]
        turn.drop_image(function)
        if turn.policies.host_tier.learns:
            _promise(turn, function, promote_at_ns(turn.state, function, turn.now))


def _promise(turn: Turn, function: Function, at_ns: Ns | None) -> None:
    """To look at a function then; None: not at all. A later promise takes the place of an earlier one."""
    state = turn.state
    before, function.promote_at_ns = function.promote_at_ns, at_ns
    if at_ns is not None and at_ns != before:
        heappush(state.promotions, (at_ns, function.id))
        if len(state.promotions) > 2 * len(state.functions) + 64:
            state.promotions[:] = [entry for entry in state.promotions if _is_promised(state, *entry)]
            heapify(state.promotions)


def _is_promised(state: State, at_ns: Ns, name: FunctionId) -> bool:
    function = state.functions.get(name)
    return function is not None and function.promote_at_ns == at_ns


def promote(turn: Turn) -> None:
    """Read what is due, as long as nobody waits for a read, and one lane stays free for whoever might."""
    state = turn.state
    for _ in range(PROMOTED_AT_ONCE):
        if not state.promotions or state.promotions[0][0] > turn.now:
            return
        at_ns, name = heappop(state.promotions)
        if _is_promised(state, at_ns, name):
            function = state.functions[name]
            function.promote_at_ns = None
            if function.image is ImageState.DISK and function.accepts and not function.queue:
                _promote(turn, function)


def _promote(turn: Turn, function: Function) -> None:
    state = turn.state
    lanes = max(1, state.settings.concurrent_reads - 1)
    victims = None
    # On a device it needs no image in host memory; it may leave there, so it is looked at again.
    if state.reading < lanes and not state.cold.keys and not function.residencies:
        victims = images_worth_less(state, turn.policies.host_tier, function, turn.now)
    if victims is None:
        _promise(turn, function, promote_at_ns(state, function, turn.now))
        return
    _drop(turn, victims)
    function.promoted = True
    turn.read_image(function)


def next_promotion_ns(state: State) -> Ns:
    """FOREVER_NS: none is promised."""
    promotions = state.promotions
    while promotions:
        if _is_promised(state, *promotions[0]):
            return promotions[0][0]
        heappop(promotions)
    return FOREVER_NS
