"""Our own order of work: by the latest moment at which a request can begin and still be in time.

That moment counts what its function takes: computing, and loading where it is on no device. A request whose moment has
passed is late whatever is done, so it goes behind all that can still be in time: under overload one late request would
otherwise make the next one late, and so on for ever. But it is not forgotten: after a few times its own deadline it
stands with the others again.
"""

from dormouse.core.ready import Key
from dormouse.core.state import Function, Request, State
from dormouse.core.types import Ns

PATIENCE = 10
"""So many times as long as it was given does a late request stand behind the others."""


def slack_key(state: State, function: Function, request: Request, now: Ns) -> Key:
    """By priority; then what can be in time before what cannot; then by the latest beginning."""
    latest_ns = request.deadline_ns - needs_ns(state, function)
    given_ns = request.deadline_ns - request.arrived_ns
    if now <= latest_ns or now > request.arrived_ns + PATIENCE * given_ns:
        return (request.priority * 2, latest_ns, request.id)
    return (request.priority * 2 + 1, request.deadline_ns, request.id)


def needs_ns(state: State, function: Function) -> Ns:
    """From its beginning to the answer: computing, or loading where that takes longer."""
    computing_ns = function.lead.computing_ns if function.lead.known else 0
    if function.residencies:
        return computing_ns
    return max(computing_ns, function.spec.image_bytes * 1_000_000_000 // state.settings.topology.host_rate_of_all)
