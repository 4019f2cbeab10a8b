"""An executor as the core must imagine it: two lanes that obey in order, and a pool that really runs out.

It keeps its own books and asserts that no command ever asks for what a real device could not do.
"""

from collections import deque
from dataclasses import dataclass, field

from dormouse.core.messages import (
    Cancel,
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
from dormouse.core.types import FOREVER_NS, Bytes, CommandId, ExecutorId, FunctionId, Ns, Reason


@dataclass
class DeviceModel:
    id: ExecutorId
    capacity: Bytes
    sizes: dict[FunctionId, Bytes]
    copy_lane: deque[Load | Evict] = field(default_factory=deque)
    compute_lane: deque[Execute] = field(default_factory=deque)
    mapped: dict[FunctionId, Bytes] = field(default_factory=dict)
    others: "dict[ExecutorId, DeviceModel]" = field(default_factory=dict)
    """Every device, this one too."""
    spoilt: set[CommandId] = field(default_factory=set)
    """Loads whose source was lost: most of them fail."""
    near: set[CommandId] = field(default_factory=set)
    """Loads of which it has said that they have nearly arrived."""
    before: set[CommandId] = field(default_factory=set)
    """Loads that were under way when it came: the link that they may have is that of one which is lost."""

    def __post_init__(self) -> None:
        self.before = {load.command for load in self._loads()}

    def obey(self, command: ExecutorCommand) -> None:
        match command:
            case Load():
                assert not any(self.id in load.helpers for load in self._loads() if load.command not in self.before), (
                    "its link is lent"
                )
                for helper in command.helpers:
                    assert not any(isinstance(c, Load) for c in self.others[helper].copy_lane), "a busy link was lent"
                if command.source is not None:
                    assert command.function in self.others[command.source].intact, "a copy of what is not there"
                self.copy_lane.append(command)
                self._begin()
            case Evict():
                readers = [
                    load for load in self._loads() if (load.source, load.function) == (self.id, command.function)
                ]
                assert all(load.command in self.others[load.executor].spoilt for load in readers), "evicted while read"
                self.copy_lane.append(command)
                self._begin()
            case Execute():
                for load in self.copy_lane:
                    if isinstance(load, Load) and load.function == command.function and load.lead_ns < FOREVER_NS:
                        assert load.command in self.near, "executed before its image had nearly arrived"
                assert len(self.compute_lane) < 2, "one compute lane, and one execution behind it"
                loads = {c.function for c in self.copy_lane if isinstance(c, Load)}
                assert command.function in self.mapped or command.function in loads, "executed without a residency"
                self.compute_lane.append(command)
            case Cancel() | Forget():
                pass

    @property
    def intact(self) -> set[FunctionId]:
        """What is here whole and will stay."""
        return set(self.mapped) - {command.function for command in self.copy_lane}

    def _loads(self) -> list[Load]:
        return [c for device in self.others.values() for c in device.copy_lane if isinstance(c, Load)]

    def peer_lost(self, peer: ExecutorId) -> None:
        loads = (c for c in self.copy_lane if isinstance(c, Load) and c.source == peer)
        self.spoilt.update(load.command for load in loads)

    def _begin(self) -> None:
        """A load takes its chunks when everything before it has been obeyed."""
        if self.copy_lane and isinstance(head := self.copy_lane[0], Load) and head.function not in self.mapped:
            self.mapped[head.function] = self.sizes[head.function]
            assert sum(self.mapped.values()) <= self.capacity, "a load without room"

    @property
    def executing(self) -> FunctionId | None:
        return self.compute_lane[0].function if self.compute_lane else None

    def finish_copy(self) -> LoadFinished | EvictionFinished:
        command = self.copy_lane.popleft()
        if isinstance(command, Load):
            self._begin()
            return LoadFinished(self.id, command.command, command.function, load_ns=1)
        assert command.function not in {run.function for run in self.compute_lane}, "evicted while it ran"
        del self.mapped[command.function]
        self._begin()
        return EvictionFinished(self.id, command.command, command.function)

    def approach(self) -> ImageNearlyArrived | None:
        """The load at the head of the lane has nearly arrived; None if nobody wants to know."""
        load = self.copy_lane[0]
        if not isinstance(load, Load) or load.lead_ns >= FOREVER_NS or load.command in self.near:
            return None
        self.near.add(load.command)
        return ImageNearlyArrived(self.id, load.command, load.function)

    def fail_load(self) -> list[ExecutionFailed | LoadFailed]:
        """A copy went wrong: first the execution that waits for it ends, then the load, rolled back."""
        command = self.copy_lane.popleft()
        assert isinstance(command, Load)
        del self.mapped[command.function]
        self._begin()
        events: list[ExecutionFailed | LoadFailed] = []
        if self.executing == command.function:
            run = self.compute_lane.popleft()
            events.append(
                ExecutionFailed(self.id, run.command, run.request, Reason.LOAD_FAILED, "injected", run.others)
            )
        return [*events, LoadFailed(self.id, command.command, command.function, "injected")]

    def finish_execution(self, device_ns: Ns = 1) -> ExecutionFinished:
        command = self.compute_lane.popleft()
        return ExecutionFinished(self.id, command.command, command.request, device_ns, command.others)

    def refuse_load(self) -> Load:
        """The load came outside its window; an execution that counts on it will find nothing there."""
        command = self.copy_lane.popleft()
        assert isinstance(command, Load)
        del self.mapped[command.function]
        self._begin()
        return command

    def fail_execution(self) -> ExecutionFailed:
        command = self.compute_lane.popleft()
        fault = self._fault(command)
        return ExecutionFailed(self.id, command.command, command.request, fault, "injected", command.others)

    def cannot_split(self) -> ExecutionFailed:
        """The answer of a batch could not be cut apart."""
        command = self.compute_lane.popleft()
        why = Reason.UNBATCHABLE
        return ExecutionFailed(self.id, command.command, command.request, why, "injected", command.others)

    def _fault(self, command: Execute) -> Reason:
        return Reason.EXECUTION_FAILED if self.can_run(command) else Reason.LOAD_FAILED

    def can_run(self, command: Execute) -> bool:
        return command.function in self.mapped or command.function in {c.function for c in self.copy_lane}
