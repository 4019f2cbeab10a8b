"""The order of work: which function is served next.

Inside a function requests are first come, first served, unless a policy arranges them; across functions a policy gives
the request at the head of each queue a key, and the smallest key goes first. A policy is a function of the records;
chosen by name in the settings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from dormouse.core.ready import Key
from dormouse.core.rrc import artifact_key, paper_key, regroup, regroup_fixed
from dormouse.core.slack import slack_key, step_aside
from dormouse.core.state import Function, Request, State
from dormouse.core.types import Ns

KeyOf: TypeAlias = Callable[[State, Function, Request, Ns], Key]


@dataclass(frozen=True, slots=True)
class Queueing:
    """``passing``: keys change as time passes, so that the one a function waits with is looked at again before it is
    served. ``arrange``: puts a function's own queue in order before its key is taken; without it, first come, first
    served. ``refresh``: called now and then, after which all keys are taken anew."""

    key: KeyOf
    passing: bool = False
    arrange: Callable[[State, Function, Ns], None] | None = None
    refresh: Callable[[State, Ns], None] | None = None
    refresh_ns: Ns = 0


def earliest_deadline(state: State, function: Function, request: Request, now: Ns) -> Key:
    """By priority, then by deadline."""
    del state, function, now
    return (request.priority, request.deadline_ns, request.id)


def first_come(state: State, function: Function, request: Request, now: Ns) -> Key:
    """By arrival alone."""
    del state, function, now
    return (0, request.arrived_ns, request.id)


REGROUP_NS: Ns = 2_000_000_000
"""Torpor's artifact puts functions into groups anew every two seconds."""

QUEUEING: dict[str, Queueing] = {
    "edf": Queueing(earliest_deadline),
    "fifo": Queueing(first_come),
    "torpor": Queueing(artifact_key, refresh=regroup, refresh_ns=REGROUP_NS),
    "torpor-paper": Queueing(paper_key, refresh=regroup, refresh_ns=REGROUP_NS),
    "torpor-fixed": Queueing(paper_key, refresh=regroup_fixed, refresh_ns=2 * REGROUP_NS),
    "slack": Queueing(slack_key, passing=True, arrange=step_aside),
}
