"""A core on the workbench: one scheduler, a clock that the test sets, and shorthand for events."""

from typing import TypeVar

from dormouse.core.messages import (
    Command,
    Event,
    ExecutorJoined,
    FunctionDeployed,
    ImageRead,
    RequestArrived,
)
from dormouse.core.scheduler import Scheduler
from dormouse.core.types import (
    Batch,
    DeviceId,
    ExecutorId,
    FunctionId,
    FunctionSpec,
    Limits,
    OperationId,
    Pin,
    RequestId,
    Settings,
    Slo,
)
from dormouse.sim import invariants

MIB = 1024 * 1024
MS = 1_000_000
GPU = ExecutorId("cuda:0")

C = TypeVar("C")


class Bench:
    """Sends events a millisecond apart and checks the invariants after each. Nothing is queued ahead, unless settings
    say so: what is asked next is then seen to be given next."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.core = Scheduler(settings or Settings(host_capacity_bytes=100 * MIB, ahead_ns=0))
        self.state = self.core.state
        self.now = 0
        self.operations = 0
        self.requests = 0

    def send(self, event: Event, *, after_ms: float = 1) -> list[Command]:
        self.now += round(after_ms * MS)
        commands = self.core.handle(self.now, event)
        invariants.check(self.state)
        return commands

    def operation(self) -> OperationId:
        self.operations += 1
        return OperationId(self.operations)

    def join(self, executor: str = "cuda:0", capacity_mib: int = 64, chunk_mib: int = 2) -> list[Command]:
        return self.send(ExecutorJoined(ExecutorId(executor), DeviceId(executor), capacity_mib * MIB, chunk_mib * MIB))

    def deploy(
        self,
        name: str,
        mib: int = 10,
        *,
        pin: Pin = Pin.NONE,
        slo_ms: int = 1000,
        limits: Limits | None = None,
        state_mib: int = 0,
        batch: Batch | None = None,
    ) -> list[Command]:
        slo, limits, batch = Slo(slo_ms * MS), limits or Limits(), batch or Batch()
        spec = FunctionSpec(FunctionId(name), mib * MIB, state_mib * MIB, slo, pin, limits, batch)
        return self.send(FunctionDeployed(self.operation(), spec))

    def park(
        self, name: str, mib: int = 10, *, pin: Pin = Pin.NONE, limits: Limits | None = None, batch: Batch | None = None
    ) -> list[Command]:
        """Deploy, and the image is read at once."""
        self.deploy(name, mib, pin=pin, limits=limits, batch=batch)
        return self.send(ImageRead(FunctionId(name)))

    def ask(
        self,
        name: str,
        *,
        deadline_ms: float | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        after_ms: float = 1,
        rows: int = 1,
        alike: str = "",
        guest: str | None = None,
        waited_ms: float | None = None,
    ) -> list[Command]:
        """A request; deadlines count from its arrival, ``waited_ms`` after it came to the server. Its id is
        ``self.requests``."""
        self.requests += 1
        arrival = self.now + round(after_ms * MS)
        event = RequestArrived(
            RequestId(self.requests),
            FunctionId(name),
            None if deadline_ms is None else arrival + round(deadline_ms * MS),
            None if timeout_ms is None else arrival + round(timeout_ms * MS),
            priority,
            rows,
            alike,
            guest,
            None if waited_ms is None else arrival - round(waited_ms * MS),
        )
        return self.send(event, after_ms=after_ms)


def only(commands: list[Command], kind: type[C]) -> C:
    """The one command of a kind."""
    (found,) = every(commands, kind)
    return found


def every(commands: list[Command], kind: type[C]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]
