"""Load shedding: refusing what waits when its deadline has come, so that others are in time (``Settings.shed_late``).

Late requests go behind those that can be in time anyway (``slack``), but as soon as none of those waits they take
lanes, links and other functions' places, and the next requests find that. With shedding they end at their deadline.

It is for those that are late because they had to wait. A request whose function takes longer than the deadline allows,
as the first one of an image on disk does, is served late: refused, it would be refused again the next time.
"""

from dormouse.core.slack import needs_ns
from dormouse.core.state import Function, ImageState, Request, State
from dormouse.core.types import Ns


def may_wait_until_ns(state: State, function: Function, request: Request) -> Ns:
    """When a request that has just arrived is refused if it still waits."""
    if state.settings.shed_late and _could_be_in_time(state, function, request):
        return min(request.deadline_ns, request.timeout_ns)
    return request.timeout_ns


def _could_be_in_time(state: State, function: Function, request: Request) -> bool:
    """If nobody else were there."""
    if not function.residencies and function.image is not ImageState.HOST:
        return False
    return request.arrived_ns + needs_ns(state, function) <= request.deadline_ns
