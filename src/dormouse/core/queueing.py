"""The order of work: which function is served next.

Inside a function requests are first come, first served; across functions a policy gives the request at the head
of each queue a key, and the smallest key goes first. A policy is a function of one request.
"""

from collections.abc import Callable
from typing import TypeAlias

from dormouse.core.ready import Key
from dormouse.core.state import Request

Queueing: TypeAlias = Callable[[Request], Key]


def earliest_deadline(request: Request) -> Key:
    """By priority, then by deadline."""
    return (request.priority, request.deadline_ns, request.id)


def first_come(request: Request) -> Key:
    """By arrival alone."""
    return (0, request.arrived_ns, request.id)


QUEUEING: dict[str, Queueing] = {"edf": earliest_deadline, "fifo": first_come}
