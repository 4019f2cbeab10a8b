"""A simulated executor: obeys commands in order, refuses late ones, and answers as a process that owns a device does.

It has the two lanes of a real one. The copy lane does one load or eviction at a time; the compute lane runs one request
at a time, also on a function that is still arriving: the answer then comes when the pass is through, but not before the
last layers have run on the last bytes. Rules of the real desk that matter: an execution that waits for a load which
fails is answered before the load is; a message takes ``hop_ns``, and messages do not overtake each other.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from dormouse.core.messages import (
    Cancel,
    CommandRefused,
    Event,
    Evict,
    EvictionFinished,
    Execute,
    ExecutionFailed,
    ExecutionFinished,
    ExecutorCommand,
    Forget,
    ImageNearlyArrived,
    Load,
    LoadFailed,
    LoadFinished,
)
from dormouse.core.types import FOREVER_NS, ExecutorId, FunctionId, Ns, Reason
from dormouse.sim.hardware import Device, Model
from dormouse.sim.network import Copy, Route


class Surroundings(Protocol):
    """What an executor sees of the world."""

    now: Ns

    def later(self, delay_ns: Ns, act: Callable[[], None]) -> None: ...

    def report(self, event: Event) -> None:
        """Send an event to the core; it takes a hop."""

    def model_of(self, function: FunctionId) -> Model: ...

    def ways_of(self, load: Load) -> tuple[Route, ...]:
        """The links that it takes."""

    def copy(self, size_bytes: int, routes: tuple[Route, ...], ended: Callable[[], None]) -> Copy: ...


@dataclass(eq=False, slots=True)
class _Arrival:
    """One load, as those see it who wait for it."""

    begun: bool = False
    ended_ns: Ns | None = None
    failed: str = ""


@dataclass(eq=False, slots=True)
class _Execution:
    command: Execute
    arrival: _Arrival | None
    started_ns: Ns | None = None
    ends: bool = False
    """Its end is known, and will be told."""


@dataclass(eq=False, slots=True)
class SimulatedExecutor:
    """Nothing happens any more once ``alive`` is False."""

    id: ExecutorId
    device: Device
    world: Surroundings
    alive: bool = True
    fail_next_load: str = ""
    """What the next load fails with, halfway."""
    lost_peers: set[ExecutorId] = field(default_factory=set)
    """Executors that have died since it came, whose memory it may not trust."""
    _arrivals: dict[FunctionId, _Arrival] = field(default_factory=dict)
    _built: set[FunctionId] = field(default_factory=set)
    _copying: bool = False
    _to_copy: deque[Load | Evict | Forget] = field(default_factory=deque)
    _to_compute: deque[_Execution] = field(default_factory=deque)

    def obey(self, command: ExecutorCommand) -> None:
        """A command has come in."""
        if not self.alive:
            return
        match command:
            case Execute():
                self._to_compute.append(_Execution(command, self._arrivals.get(command.function)))
                self._compute()
            case Load():
                self._arrivals[command.function] = _Arrival()
                self._to_copy.append(command)
                self._copy()
            case Evict() | Forget():
                self._to_copy.append(command)
                self._copy()
            case Cancel():
                pass  # an answer that is not streamed cannot be cut short

    def _later(self, delay_ns: Ns, act: Callable[[], None]) -> None:
        self.world.later(delay_ns, lambda: act() if self.alive else None)

    def _refusal(self, command: Load | Execute) -> CommandRefused | None:
        if command.earliest_ns <= self.world.now <= command.latest_ns:
            return None
        early = self.world.now < command.earliest_ns
        return CommandRefused(self.id, command.command, Reason.TOO_EARLY if early else Reason.TOO_LATE)

    # ------------------------------------------------------------------ the copy lane

    def _copy(self) -> None:
        while not self._copying and self._to_copy:
            command = self._to_copy.popleft()
            self._copying = True
            if isinstance(command, Load):
                self._load(command, self._arrivals[command.function])
            elif isinstance(command, Evict):
                self._later(self.device.evict_ns, partial(self._evicted, command))
            else:
                self._built.discard(command.function)
                self._copying = False

    def _load(self, command: Load, arrival: _Arrival) -> None:
        refused = self._refusal(command)
        if refused is not None:
            self._end_badly(arrival, f"the load was refused: {refused.reason}", refused)
            return
        build_ns = 0 if command.function in self._built else self.world.model_of(command.function).build_ns
        self._later(build_ns + self.device.load_overhead_ns, lambda: self._begin(command, arrival, build_ns))

    def _begin(self, command: Load, arrival: _Arrival, build_ns: Ns) -> None:
        if command.source in self.lost_peers:
            self._end_badly(arrival, "its peer is gone", LoadFailed(self.id, command.command, command.function, "gone"))
            return
        began_ns = self.world.now
        arrival.begun = True
        self._compute()
        size_bytes = self.world.model_of(command.function).image_bytes
        failure, self.fail_next_load = self.fail_next_load, ""
        if failure:
            size_bytes = max(1, size_bytes // 2)

        def ended() -> None:
            if command.source in self.lost_peers:
                gone = f"{command.source} was lost while it was copied from"
                self._end_badly(arrival, gone, LoadFailed(self.id, command.command, command.function, gone))
                return
            if failure:
                failed = LoadFailed(self.id, command.command, command.function, failure)
                self._end_badly(arrival, failure, failed)
                return
            arrival.ended_ns = self.world.now
            self._built.add(command.function)
            load_ns = self.world.now - began_ns
            self.world.report(LoadFinished(self.id, command.command, command.function, load_ns, build_ns))
            self._free_copy_lane()

        copy = self.world.copy(size_bytes, self.world.ways_of(command), lambda: ended() if self.alive else None)
        if command.lead_ns < FOREVER_NS:
            self._approach(command, arrival, copy)

    def _approach(self, command: Load, arrival: _Arrival, copy: Copy) -> None:
        """Say that the image has nearly arrived, once the rest of its copy takes no longer than the lead; how fast
        that goes may have changed when the time comes."""
        if arrival.ended_ns is not None or arrival.failed:
            return
        wait_ns = copy.ends_ns - command.lead_ns - self.world.now
        if wait_ns > 0:
            self._later(wait_ns, lambda: self._approach(command, arrival, copy))
        else:
            self.world.report(ImageNearlyArrived(self.id, command.command, command.function))

    def _end_badly(self, arrival: _Arrival, message: str, event: LoadFailed | CommandRefused) -> None:
        arrival.failed = message
        for execution in [waiting for waiting in self._to_compute if waiting.arrival is arrival]:
            self._to_compute.remove(execution)
            self._fail(execution, message)
        self.world.report(event)
        self._free_copy_lane()

    def _evicted(self, command: Evict) -> None:
        self._arrivals.pop(command.function, None)
        self.world.report(EvictionFinished(self.id, command.command, command.function))
        self._free_copy_lane()

    def _free_copy_lane(self) -> None:
        self._copying = False
        self._copy()
        self._compute()

    # ------------------------------------------------------------------ the compute lane

    def _compute(self) -> None:
        """Take what is first one step further: start it, or see that it ends."""
        while self._to_compute:
            execution = self._to_compute[0]
            if execution.started_ns is None and not self._start(execution):
                return
            if execution.started_ns is not None:
                self._see_end(execution, execution.started_ns)
                return

    def _start(self, execution: _Execution) -> bool:
        """False while its image has not begun to arrive. One that cannot run is answered and gone."""
        arrival = execution.arrival
        if arrival is not None and not arrival.begun and not arrival.failed:
            return False
        refused = self._refusal(execution.command)
        if refused is not None:
            self._to_compute.popleft()
            self.world.report(refused)
        elif arrival is None or arrival.failed:
            self._to_compute.popleft()
            self._fail(execution, arrival.failed if arrival else "it has never been loaded here")
        else:
            execution.started_ns = self.world.now
        return True

    def _see_end(self, execution: _Execution, started_ns: Ns) -> None:
        arrival = execution.arrival
        assert arrival is not None
        if execution.ends or arrival.ended_ns is None:
            return  # whoever ends the load looks here again
        execution.ends = True
        model = self.world.model_of(execution.command.function)
        end_ns = started_ns + model.resident_ns
        if arrival.ended_ns > started_ns:
            end_ns = max(end_ns, started_ns + model.streamed_ns, arrival.ended_ns + model.tail_ns)
        self._later(max(0, end_ns - self.world.now), lambda: self._end(execution, started_ns))

    def _end(self, execution: _Execution, started_ns: Ns) -> None:
        assert self._to_compute[0] is execution, execution
        self._to_compute.popleft()
        command = execution.command
        device_ns = self.world.now - started_ns
        self.world.report(ExecutionFinished(self.id, command.command, command.request, device_ns))
        self._compute()

    def _fail(self, execution: _Execution, message: str) -> None:
        command = execution.command
        failed = ExecutionFailed(self.id, command.command, command.request, Reason.LOAD_FAILED, message)
        self.world.report(failed)
