"""The one door: ``handle(now, event) -> commands``. Owns no policy and keeps no time of its own."""

from collections.abc import Callable
from typing import Any

from dormouse.core import executors, operations, requests
from dormouse.core.admission import Refusal, refuse_function
from dormouse.core.binding import BINDING
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
    ImageNearlyArrived,
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
from dormouse.core.queueing import QUEUEING, Queueing
from dormouse.core.ready import ReadyQueue
from dormouse.core.state import State, new_function
from dormouse.core.tiering import HOST_TIER
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
    ImageNearlyArrived: executors.image_nearly_arrived,
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
        self.state = State(settings, homeless=ReadyQueue(), cold=ReadyQueue(), far=ReadyQueue())
        policies = Policies(
            QUEUEING[settings.queueing],
            PLACEMENT[settings.placement],
            EVICTION[settings.eviction],
            HOST_TIER[settings.host_tier],
            BINDING[settings.binding],
        )
        self._turn = Turn(self.state, policies)

    def handle(self, now: Ns, event: Event) -> list[Command]:
        """Take in one event; answer with the commands it brings forth, to be performed in order."""
        state, turn = self.state, self._turn
        commands: list[Command] = []
        turn.now, turn.commands = now, commands
        if not state.executors and state.executorless_since_ns is None:
            state.executorless_since_ns = now
        if state.refresh_at_ns <= now and turn.policies.queueing.refresh is not None:
            self._refresh(turn.policies.queueing)
        HANDLERS[type(event)](turn, event)
        if state.executorless_since_ns is not None or (state.timeouts and state.timeouts[0][0] <= now):
            requests.expire(turn)
        if state.gatherings and state.gatherings[0][0] <= now:
            requests.end_gatherings(turn)
        dispatch(turn)
        timer_ns, timeouts = state.timer_ns, state.timeouts
        # Nearly always the timer that is set comes before all that anybody waits for.
        sooner = timer_ns is None or (timeouts and timeouts[0][0] < timer_ns)
        waits = state.gatherings or state.executorless_since_ns is not None or state.replicate_at_ns is not None
        if sooner or waits or state.promotions:
            wanted = requests.next_timer_ns(state)
            if wanted is not None and (timer_ns is None or wanted < timer_ns):
                state.timer_ns = wanted
                commands.append(SetTimer(wanted))
        return commands

    def _refresh(self, queueing: Queueing) -> None:
        """Let the policy look at everything, and take all keys anew."""
        state, turn = self.state, self._turn
        assert queueing.refresh is not None, "asked of a policy that has nothing to refresh"
        queueing.refresh(state, turn.now)
        state.refresh_at_ns = turn.now + queueing.refresh_ns
        for function in state.functions.values():
            if function.queue:
                turn.settle(function)

    def preview(self, spec: FunctionSpec) -> Refusal | None:
        """Why this function would be refused if it were deployed now; changes nothing."""
        return refuse_function(self.state, new_function(spec, self.state.settings))
