"""Our own order of work: by deadline, among the requests that have slack left.

A request has slack until the latest moment at which it can begin and still be in time. That moment counts what its
function takes: computing, and loading where it is on no device. A request whose moment has passed is late whatever is
done, so it goes behind all that can still be in time, of its own function and of others: one late request would
otherwise make the next one late, and so on as long as there is too much to do. It is served when nothing else waits, or
refused when its timeout has come.

Those with slack go by deadline and not by that moment: on one lane whose work is not interrupted, deadlines' order has
the smallest lateness (Jackson's rule), and long loads that go first for their own sake make many short ones late.
"""

from itertools import islice

from dormouse.core.ready import Key
from dormouse.core.state import Function, Request, State
from dormouse.core.types import Ns

LOOK_AHEAD = 32
"""Of a long queue so many requests are looked at for one that can be in time."""


def slack_key(state: State, function: Function, request: Request, now: Ns) -> Key:
    """By priority; then what can be in time before what cannot; then by deadline."""
    late = now + needs_ns(state, function) > request.deadline_ns
    return (request.priority * 2 + late, request.deadline_ns, request.id)


def step_aside(state: State, function: Function, now: Ns) -> None:
    """Let late requests at the head of a function's queue go to its end, if one behind them can be in time."""
    needs = needs_ns(state, function)
    late = []
    for request in islice(function.queue.values(), LOOK_AHEAD):
        if now + needs <= request.deadline_ns:
            break
        late.append(request.id)
    else:
        return
    for name in late:
        function.queue.move_to_end(name)


def needs_ns(state: State, function: Function) -> Ns:
    """From its beginning to the answer: computing, or loading where that takes longer."""
    computing_ns = function.lead.computing_ns if function.lead.known else 0
    if function.residencies:
        return computing_ns
    return max(computing_ns, function.spec.image_bytes * 1_000_000_000 // state.settings.topology.host_rate_of_all)
