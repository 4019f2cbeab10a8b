"""Everything that can happen and everything that can be asked, on one screen.

Events are past participles, commands imperatives. All are frozen, tagged msgspec Structs, so one definition
is the value type, the journal type and the wire type. No tensor, handle or callback is ever inside one.
"""

from msgspec import Struct

from dormouse.core.types import (
    FOREVER_NS,
    Bytes,
    CommandId,
    DeviceId,
    ExecutorId,
    FunctionId,
    FunctionSpec,
    Ns,
    OperationId,
    Path,
    Reason,
    RequestId,
)

# ------------------------------------------------------------------ events: requests


class RequestArrived(Struct, frozen=True, tag=True):
    request: RequestId
    function: FunctionId
    deadline_ns: Ns | None = None
    """Soft: what the answer should make. None: the function's SLO."""
    timeout_ns: Ns | None = None
    """Hard: when it is refused. None: the function's limit. Both are points in time."""
    priority: int = 0
    """1 is the most urgent, 0 the default."""
    rows: int = 1
    """The first dimension of its inputs."""
    alike: str = ""
    """Requests with the same word here may run together; empty: it runs alone."""
    guest: str | None = None
    """The tenant that asks, where that is not the function's owner: its requests are also counted apart."""
    began_ns: Ns | None = None
    """When it came to the server, if that was earlier: its pictures had to be decoded. Times are counted from then."""


class RequestCancelled(Struct, frozen=True, tag=True):
    request: RequestId


# ------------------------------------------------------------------ events: operations


class FunctionDeployed(Struct, frozen=True, tag=True):
    """The image lies on disk; admit it. ``restored``: at start, park it only where there is room."""

    operation: OperationId
    spec: FunctionSpec
    restored: bool = False
    available: bool = True


class LoadRequested(Struct, frozen=True, tag=True):
    operation: OperationId
    function: FunctionId


class UnloadRequested(Struct, frozen=True, tag=True):
    operation: OperationId
    function: FunctionId


class RemovalRequested(Struct, frozen=True, tag=True):
    operation: OperationId
    function: FunctionId


# ------------------------------------------------------------------ events: the host store


class ImageRead(Struct, frozen=True, tag=True):
    function: FunctionId


class ImageReadFailed(Struct, frozen=True, tag=True):
    function: FunctionId
    message: str


# ------------------------------------------------------------------ events: executors


class ExecutorJoined(Struct, frozen=True, tag=True):
    executor: ExecutorId
    device: DeviceId
    capacity_bytes: Bytes
    chunk_bytes: Bytes


class ExecutorLost(Struct, frozen=True, tag=True):
    executor: ExecutorId
    message: str


class RouteOpened(Struct, frozen=True, tag=True):
    """The executor can copy from the peer's device memory from now on, and over its link too if ``detours``."""

    executor: ExecutorId
    peer: ExecutorId
    detours: bool = False


class ImageNearlyArrived(Struct, frozen=True, tag=True):
    """The rest of a load's copy is expected to take no longer than its lead: a run may begin on what is there."""

    executor: ExecutorId
    command: CommandId
    function: FunctionId


class LoadFinished(Struct, frozen=True, tag=True):
    executor: ExecutorId
    command: CommandId
    function: FunctionId
    load_ns: Ns
    build_ns: Ns = 0


class LoadFailed(Struct, frozen=True, tag=True):
    """Rolled back completely: no chunk is held."""

    executor: ExecutorId
    command: CommandId
    function: FunctionId
    message: str


class EvictionFinished(Struct, frozen=True, tag=True):
    """``unaccounted_bytes``: the driver's free memory less what the pool says; anything but 0 is a fault."""

    executor: ExecutorId
    command: CommandId
    function: FunctionId
    unaccounted_bytes: Bytes = 0


class ChunkProduced(Struct, frozen=True, tag=True):
    executor: ExecutorId
    command: CommandId
    request: RequestId


class ExecutionFinished(Struct, frozen=True, tag=True):
    """The last chunk of the answer has been produced, in this event. ``others``: of a batch, those behind the first."""

    executor: ExecutorId
    command: CommandId
    request: RequestId
    device_ns: Ns
    others: tuple[RequestId, ...] = ()


class ExecutionFailed(Struct, frozen=True, tag=True):
    executor: ExecutorId
    command: CommandId
    request: RequestId
    reason: Reason
    message: str
    others: tuple[RequestId, ...] = ()


class CommandRefused(Struct, frozen=True, tag=True):
    """The executor did nothing: the command came outside its window."""

    executor: ExecutorId
    command: CommandId
    reason: Reason


class TimerFired(Struct, frozen=True, tag=True):
    pass


Event = (
    RequestArrived
    | RequestCancelled
    | FunctionDeployed
    | LoadRequested
    | UnloadRequested
    | RemovalRequested
    | ImageRead
    | ImageReadFailed
    | ExecutorJoined
    | ExecutorLost
    | RouteOpened
    | ImageNearlyArrived
    | LoadFinished
    | LoadFailed
    | EvictionFinished
    | ChunkProduced
    | ExecutionFinished
    | ExecutionFailed
    | CommandRefused
    | TimerFired
)

# ------------------------------------------------------------------ commands to executors, obeyed in order


class Load(Struct, frozen=True, tag=True):
    """Map chunks and copy the image in; ``path`` says from where and whether the module must be built."""

    executor: ExecutorId
    command: CommandId
    function: FunctionId
    path: Path
    earliest_ns: Ns
    latest_ns: Ns
    lead_ns: Ns = FOREVER_NS
    """How long before the end of the copy to send ImageNearlyArrived; FOREVER_NS: never, a run may come at once."""
    source: ExecutorId | None = None
    """Whose device memory it is copied from; None: host memory."""
    helpers: tuple[ExecutorId, ...] = ()
    """Whose links carry a part of it from host memory."""


class Execute(Struct, frozen=True, tag=True):
    """Run one request, or several as one; legal while the function's image is still being copied in.

    They end together: one event that repeats the command covers all.
    """

    executor: ExecutorId
    command: CommandId
    request: RequestId
    """The oldest."""
    function: FunctionId
    earliest_ns: Ns
    latest_ns: Ns
    others: tuple[RequestId, ...] = ()
    """Those that run with it, in order."""
    padded_rows: int = 0
    """Fill the inputs up to so many rows, and cut the answer apart by rows; 0: a request is run as it is."""

    @property
    def requests(self) -> tuple[RequestId, ...]:
        return (self.request, *self.others)


class Evict(Struct, frozen=True, tag=True):
    """Give the chunks back; runtime state is written home first."""

    executor: ExecutorId
    command: CommandId
    function: FunctionId
    earliest_ns: Ns = 0
    latest_ns: Ns = FOREVER_NS
    cause: FunctionId | None = None
    """Which function needs the room. None: it leaves of itself."""


class Cancel(Struct, frozen=True, tag=True):
    """Stop producing chunks for a request whose client is gone; a hint, its execution still ends."""

    executor: ExecutorId
    command: CommandId
    request: RequestId
    earliest_ns: Ns = 0
    latest_ns: Ns = FOREVER_NS


class Forget(Struct, frozen=True, tag=True):
    """Drop the built module and the reserved range of a removed function."""

    executor: ExecutorId
    command: CommandId
    function: FunctionId
    earliest_ns: Ns = 0
    latest_ns: Ns = FOREVER_NS


# ------------------------------------------------------------------ commands to the host store


class ReadImage(Struct, frozen=True, tag=True):
    function: FunctionId


class DropImage(Struct, frozen=True, tag=True):
    """Free the host pages; the image stays on disk."""

    function: FunctionId


class DeleteImage(Struct, frozen=True, tag=True):
    function: FunctionId


# ------------------------------------------------------------------ commands to whoever waits


class Reply(Struct, frozen=True, tag=True):
    """Hand the chunk that came with this event to the client."""

    request: RequestId
    final: bool
    path: Path
    queued_ns: Ns
    """From when it came to the server to the start of the execution."""
    device_ns: Ns = 0
    part_ns: Ns = 0
    """How much of the device's time is this request's own; the parts of a batch add up to all of it."""
    in_time: bool = True
    """Before its deadline."""


class Refuse(Struct, frozen=True, tag=True):
    request: RequestId
    reason: Reason
    message: str
    retry_after_ns: Ns = 0


class Acknowledge(Struct, frozen=True, tag=True):
    """An operation has happened, or (with a reason) has been refused and left nothing behind."""

    operation: OperationId
    reason: Reason | None = None
    message: str = ""


class SetTimer(Struct, frozen=True, tag=True):
    """Send TimerFired at this time; replaces the timer set before."""

    at_ns: Ns


ExecutorCommand = Load | Execute | Evict | Cancel | Forget
StoreCommand = ReadImage | DropImage | DeleteImage
Command = ExecutorCommand | StoreCommand | Reply | Refuse | Acknowledge | SetTimer
