"""The one door: ``handle(now, event) -> commands``. Owns no policy and keeps no time of its own."""

from collections.abc import Callable
from typing import Any

from dormouse.core import executors, operations, requests
from dormouse.core.admission import Refusal, refuse_function
from dormouse.core.dispatch import dispatch
from dormouse.core.eviction import EVICTION
from dormouse.core.messages import (
    ChunkProduced,
    Command,
    CommandRefused,
    Event,
    EvictionFinished,
    ExecutionFailed,
    ExecutionFinished,
    ExecutorJoined,
    ExecutorLost,
    FunctionDeployed,
    ImageRead,
    ImageReadFailed,
    LoadFailed,
    LoadFinished,
    LoadRequested,
    RemovalRequested,
    RequestArrived,
    RequestCancelled,
    RouteOpened,
    SetTimer,
    TimerFired,
    UnloadRequested,
)
from dormouse.core.placement import PLACEMENT
from dormouse.core.queueing import QUEUEING
from dormouse.core.ready import ReadyQueue
from dormouse.core.state import State, new_function
from dormouse.core.turn import Policies, Turn
from dormouse.core.types import FunctionSpec, Ns, Settings


def _timer_fired(turn: Turn, _: TimerFired) -> None:
    turn.state.timer_ns = None


HANDLERS: dict[type[Event], Callable[[Turn, Any], None]] = {
    RequestArrived: requests.arrived,
    RequestCancelled: requests.cancelled,
    FunctionDeployed: operations.deployed,
    LoadRequested: operations.load_requested,
    UnloadRequested: operations.unload_requested,
    RemovalRequested: operations.removal_requested,
    ImageRead: operations.image_read,
    ImageReadFailed: operations.image_read_failed,
    ExecutorJoined: executors.joined,
    ExecutorLost: executors.lost,
    RouteOpened: executors.route_opened,
    LoadFinished: executors.load_finished,
    LoadFailed: executors.load_failed,
    EvictionFinished: executors.eviction_finished,
    ChunkProduced: executors.chunk_produced,
    ExecutionFinished: executors.execution_finished,
    ExecutionFailed: executors.execution_failed,
    CommandRefused: executors.command_refused,
    TimerFired: _timer_fired,
}


class Scheduler:
    """The core. Same events at the same times, same commands, byte for byte."""

    def __init__(self, settings: Settings) -> None:
        """Policies are chosen by name in the settings; an unknown name is a KeyError."""
        self.state = State(settings, homeless=ReadyQueue(), cold=ReadyQueue())
        self._policies = Policies(
            QUEUEING[settings.queueing], PLACEMENT[settings.placement], EVICTION[settings.eviction]
        )

    def handle(self, now: Ns, event: Event) -> list[Command]:
        """Take in one event; answer with the commands it brings forth, to be performed in order."""
        turn = Turn(self.state, self._policies, now)
        if not self.state.executors and self.state.executorless_since_ns is None:
            self.state.executorless_since_ns = now
        HANDLERS[type(event)](turn, event)
        requests.expire(turn)
        dispatch(turn)
        self._set_timer(turn)
        return turn.commands

    def preview(self, spec: FunctionSpec) -> Refusal | None:
        """Why this function would be refused if it were deployed now; changes nothing."""
        return refuse_function(self.state, new_function(spec, self.state.settings))

    def _set_timer(self, turn: Turn) -> None:
        wanted = requests.next_timer_ns(turn)
        if wanted is not None and (self.state.timer_ns is None or wanted < self.state.timer_ns):
            self.state.timer_ns = wanted
            turn.commands.append(SetTimer(wanted))
