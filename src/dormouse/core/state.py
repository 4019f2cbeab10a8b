"""Who is where: functions, their images and residencies, executors and their lanes, requests.

Records and transition tables, no decisions. A record holds ids and integers, never a handle or a callback.

Theory of operation
-------------------
A function's image is in one ImageState (which host tier it occupies), and on each executor in one
ResidencyState. Both change only through the tables below; a change that is not in its table is a bug and asserts.

    absent --load--> loading --nearly arrived--> arriving --loaded--> resident --evict--> evicting --evicted--> absent
                                                   | ^                  | ^
                                           execute v | executed execute v | executed
                                                 streaming --loaded--> running

``streaming`` is a request that already runs on the layers that have arrived; it begins no sooner than is needed for it
to end with the copy (``core/lead``). When its load fails, two messages
tell of it: the execution's end makes the residency ``broken`` until the load's own end comes; should that come
first, it is ``failing`` until the execution has ended. An executor's free bytes fall when a load is commanded
and rise when an eviction is commanded, not when it has ended: an executor obeys in order, so what a later command
needs has been given back by then.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto, unique
from typing import Final, NamedTuple, TypeVar

from dormouse.core.disk import Disk
from dormouse.core.groups import Groups
from dormouse.core.intervals import Intervals
from dormouse.core.lead import Lead
from dormouse.core.ledger import Histogram, Ledger
from dormouse.core.messages import Execute, ExecutorCommand
from dormouse.core.ready import ReadyQueue
from dormouse.core.recent import Recent
from dormouse.core.rhythm import Rhythm
from dormouse.core.types import (
    Bytes,
    CommandId,
    DeviceId,
    ExecutorId,
    FunctionId,
    FunctionSpec,
    Ns,
    OperationId,
    Path,
    Pin,
    Reason,
    RequestId,
    Settings,
    round_up,
)

S = TypeVar("S", bound=Hashable)
C = TypeVar("C", bound=Hashable)


@unique
class ResidencyState(StrEnum):
    __hash__ = str.__hash__  # the tables are looked up at every step, and Enum hashes in Python

    ABSENT = "absent"
    LOADING = "loading"
    ARRIVING = "arriving"
    STREAMING = "streaming"
    RESIDENT = "resident"
    RUNNING = "running"
    EVICTING = "evicting"
    BROKEN = "broken"
    FAILING = "failing"


@unique
class ResidencyChange(Enum):
    __hash__ = object.__hash__

    LOAD = auto()
    NEARLY_ARRIVED = auto()
    LOADED = auto()
    LOAD_FAILED = auto()
    EXECUTE = auto()
    EXECUTED = auto()
    BREAK = auto()
    EVICT = auto()
    EVICTED = auto()


RESIDENCY_TRANSITIONS: Mapping[tuple[ResidencyState, ResidencyChange], ResidencyState] = {
    (ResidencyState.ABSENT, ResidencyChange.LOAD): ResidencyState.LOADING,
    (ResidencyState.LOADING, ResidencyChange.LOADED): ResidencyState.RESIDENT,
    (ResidencyState.LOADING, ResidencyChange.LOAD_FAILED): ResidencyState.ABSENT,
    (ResidencyState.LOADING, ResidencyChange.NEARLY_ARRIVED): ResidencyState.ARRIVING,
    (ResidencyState.ARRIVING, ResidencyChange.LOADED): ResidencyState.RESIDENT,
    (ResidencyState.ARRIVING, ResidencyChange.LOAD_FAILED): ResidencyState.ABSENT,
    (ResidencyState.ARRIVING, ResidencyChange.EXECUTE): ResidencyState.STREAMING,
    (ResidencyState.STREAMING, ResidencyChange.LOADED): ResidencyState.RUNNING,
    (ResidencyState.STREAMING, ResidencyChange.EXECUTED): ResidencyState.ARRIVING,
    (ResidencyState.STREAMING, ResidencyChange.BREAK): ResidencyState.BROKEN,
    (ResidencyState.BROKEN, ResidencyChange.LOAD_FAILED): ResidencyState.ABSENT,
    (ResidencyState.STREAMING, ResidencyChange.LOAD_FAILED): ResidencyState.FAILING,
    (ResidencyState.FAILING, ResidencyChange.EXECUTED): ResidencyState.ABSENT,
    (ResidencyState.RESIDENT, ResidencyChange.EXECUTE): ResidencyState.RUNNING,
    (ResidencyState.RUNNING, ResidencyChange.EXECUTED): ResidencyState.RESIDENT,
    (ResidencyState.RESIDENT, ResidencyChange.EVICT): ResidencyState.EVICTING,
    (ResidencyState.EVICTING, ResidencyChange.EVICTED): ResidencyState.ABSENT,
}


@unique
class ImageState(StrEnum):
    __hash__ = str.__hash__

    DISK = "disk"
    READING = "reading"
    HOST = "host"


@unique
class ImageChange(Enum):
    __hash__ = object.__hash__

    READ = auto()
    ARRIVED = auto()
    READ_FAILED = auto()
    DROP = auto()


IMAGE_TRANSITIONS: Mapping[tuple[ImageState, ImageChange], ImageState] = {
    (ImageState.DISK, ImageChange.READ): ImageState.READING,
    (ImageState.READING, ImageChange.ARRIVED): ImageState.HOST,
    (ImageState.READING, ImageChange.READ_FAILED): ImageState.DISK,
    (ImageState.HOST, ImageChange.DROP): ImageState.DISK,
}


@unique
class Service(StrEnum):
    __hash__ = str.__hash__

    """What callers may expect of a function."""

    ADMITTING = "admitting"
    """Deployed for the first time; a failure leaves nothing behind."""
    LOADING = "loading"
    """Asked back after it was unavailable."""
    READY = "ready"
    UNLOADING = "unloading"
    UNAVAILABLE = "unavailable"
    REMOVING = "removing"


@unique
class ServiceChange(Enum):
    __hash__ = object.__hash__

    ADMIT = auto()
    UNLOAD = auto()
    LEAVE = auto()
    LOAD = auto()
    REMOVE = auto()
    FAIL = auto()


SERVICE_TRANSITIONS: Mapping[tuple[Service, ServiceChange], Service] = {
    (Service.ADMITTING, ServiceChange.ADMIT): Service.READY,
    (Service.READY, ServiceChange.ADMIT): Service.READY,
    (Service.UNLOADING, ServiceChange.ADMIT): Service.UNLOADING,
    (Service.REMOVING, ServiceChange.ADMIT): Service.REMOVING,
    (Service.LOADING, ServiceChange.ADMIT): Service.READY,
    (Service.LOADING, ServiceChange.FAIL): Service.UNAVAILABLE,
    (Service.LOADING, ServiceChange.UNLOAD): Service.UNLOADING,
    (Service.LOADING, ServiceChange.REMOVE): Service.REMOVING,
    (Service.READY, ServiceChange.UNLOAD): Service.UNLOADING,
    (Service.UNLOADING, ServiceChange.UNLOAD): Service.UNLOADING,
    (Service.UNLOADING, ServiceChange.LEAVE): Service.UNAVAILABLE,
    (Service.UNAVAILABLE, ServiceChange.LOAD): Service.LOADING,
    (Service.READY, ServiceChange.REMOVE): Service.REMOVING,
    (Service.UNLOADING, ServiceChange.REMOVE): Service.REMOVING,
    (Service.UNAVAILABLE, ServiceChange.REMOVE): Service.REMOVING,
    (Service.REMOVING, ServiceChange.REMOVE): Service.REMOVING,
}


@unique
class RequestState(StrEnum):
    __hash__ = str.__hash__

    QUEUED = "queued"
    EXECUTING = "executing"
    ABANDONED = "abandoned"
    """Executing still, but nobody waits for the answer."""


@unique
class RequestChange(Enum):
    __hash__ = object.__hash__

    EXECUTE = auto()
    REQUEUE = auto()
    ABANDON = auto()


REQUEST_TRANSITIONS: Mapping[tuple[RequestState, RequestChange], RequestState] = {
    (RequestState.QUEUED, RequestChange.EXECUTE): RequestState.EXECUTING,
    (RequestState.EXECUTING, RequestChange.REQUEUE): RequestState.QUEUED,
    (RequestState.EXECUTING, RequestChange.ABANDON): RequestState.ABANDONED,
}


# What every turn asks for. Enum takes a hundred nanoseconds to find a member, Python ten to find a global.
ABSENT: Final = ResidencyState.ABSENT
ARRIVING: Final = ResidencyState.ARRIVING
RESIDENT: Final = ResidencyState.RESIDENT
RUNNING: Final = ResidencyState.RUNNING
STREAMING: Final = ResidencyState.STREAMING
EXECUTE: Final = ResidencyChange.EXECUTE
EXECUTED: Final = ResidencyChange.EXECUTED
IN_HOST_MEMORY: Final = ImageState.HOST
READY: Final = Service.READY
QUEUED: Final = RequestState.QUEUED
EXECUTING: Final = RequestState.EXECUTING
BEGIN: Final = RequestChange.EXECUTE
PINNED: Final = Pin.DEVICE


ON_THE_WAY = (ResidencyState.LOADING, ResidencyState.ARRIVING, ResidencyState.STREAMING, ResidencyState.BROKEN)
"""While it is in one of these, its load has not ended: a copy lane is taken, and a source is read."""


AT_REST = (ResidencyState.RESIDENT, ResidencyState.EVICTING)
"""Nothing is under way for any request."""


def step(table: Mapping[tuple[S, C], S], state: S, change: C) -> S:
    """The state after a change. A change that its table does not know is a bug."""
    after = table.get((state, change))
    assert after is not None, f"{state} cannot {change}"
    return after


@dataclass(slots=True)
class Request:
    id: RequestId
    function: FunctionId
    began_ns: Ns  # when it came to the server: what its answer took is counted from here
    arrived_ns: Ns  # when it came to the core, and began to wait for a device
    deadline_ns: Ns
    timeout_ns: Ns
    priority: int
    state: RequestState = QUEUED
    executor: ExecutorId | None = None
    path: Path = Path.RESIDENT
    started_ns: Ns = 0
    attempts: int = 0
    rows: int = 1
    alike: str = ""  # equal for requests that may run together; empty: it may not
    alone: bool = False
    """It was among others when their execution failed: it starts over without them."""
    streamed: bool = False
    """Its execution began before its function was there as a whole."""
    guest: str | None = None  # the tenant that asks, unless it is the function's owner
    chunks: int = 0
    """Chunks that the client has; an answer that has begun cannot be begun again."""

    def change(self, change: RequestChange) -> None:
        self.state = step(REQUEST_TRANSITIONS, self.state, change)


@dataclass(slots=True)
class Residency:
    """A function on one executor."""

    size_bytes: Bytes
    """Whole chunks."""
    path: Path
    """How its present load finds the image."""
    by_peer: bool = False
    """Its present load does not come from host memory."""
    source: ExecutorId | None = None
    """Whose copy is being read; None also when that executor has been lost."""
    helpers: tuple[ExecutorId, ...] = ()
    """Whose copy lanes are lent to its present load."""
    feeds: set[ExecutorId] = field(default_factory=set)
    """Executors that are copying it from here."""
    state: ResidencyState = ABSENT
    load_started_ns: Ns = 0
    loaded_ns: Ns = 0


@dataclass(slots=True)
class Function:
    id: FunctionId
    spec: FunctionSpec
    host_bytes: Bytes
    """Whole pages."""
    number: int = 0
    """The how manieth it was that was deployed, from 0."""
    service: Service = Service.ADMITTING
    image: ImageState = ImageState.DISK
    parking: bool = False
    """It is to be brought to host memory although no request asks for it."""
    unplaceable: bool = False
    """No device that is here could hold it, or loading it failed: a pin alone does not try again, a request does."""
    from_disk: bool = False
    """Requests waited while it was read from disk, and no device has loaded it since."""
    read_started_ns: Ns = 0
    promoted: bool = False
    """Its image was read, or is being read, although nobody asks for it yet."""
    promote_at_ns: Ns | None = None
    """When to see whether it should be read ahead of its request."""
    load_failures: int = 0
    plain_until_ns: Ns = 0
    """Until then it is loaded from host memory over the device's own link: another way has just failed."""
    build_ns: Ns = 0
    """What building it took when that was done last."""
    gathers_until_ns: Ns | None = None
    """Its first request, which could run, waits for company until then."""
    queue: OrderedDict[RequestId, Request] = field(default_factory=OrderedDict)
    residencies: dict[ExecutorId, Residency] = field(default_factory=dict)
    waits_in: list[ReadyQueue] = field(default_factory=list)
    arrivals: list[OperationId] = field(default_factory=list)
    """Operations that wait until it is in host memory."""
    departures: list[OperationId] = field(default_factory=list)
    """Operations that wait until its memory is free."""
    ledger: Ledger = field(default_factory=Ledger)
    lead: Lead = field(default_factory=Lead)
    recent: Recent = field(default_factory=Recent)
    rhythm: Rhythm = field(default_factory=Rhythm)
    intervals: Intervals = field(default_factory=Intervals)
    """Counted where the host tier's policy goes by them."""

    @property
    def head(self) -> Request | None:
        for request in self.queue.values():
            return request
        return None

    @property
    def accepts(self) -> bool:
        return self.service is READY

    @property
    def leaves(self) -> bool:
        return self.service in (Service.UNLOADING, Service.REMOVING)

    @property
    def is_arriving(self) -> bool:
        return any(residency.state in ON_THE_WAY for residency in self.residencies.values())

    @property
    def is_engaged(self) -> bool:
        """Whether a device runs it or loads it."""
        return any(residency.state not in AT_REST for residency in self.residencies.values())

    @property
    def is_source_of_a_copy(self) -> bool:
        """Whether its image in host memory is being read."""
        return any(r.state in ON_THE_WAY and not r.by_peer for r in self.residencies.values())

    def refused(self, now: Ns, latency_ns: Ns, reason: Reason, guest: str | None = None) -> None:
        """A request has ended without an answer."""
        self.ledger.refused(reason, latency_ns, guest)
        self.recent.ended(now, latency_ns, in_time=False)

    def change_service(self, change: ServiceChange) -> None:
        self.service = step(SERVICE_TRANSITIONS, self.service, change)

    def change_image(self, change: ImageChange) -> None:
        self.image = step(IMAGE_TRANSITIONS, self.image, change)


def new_function(spec: FunctionSpec, settings: Settings) -> Function:
    host_bytes = round_up(spec.image_bytes, settings.host_page_bytes)
    rhythm = Rhythm(gaps=Histogram() if settings.eviction == "keep-alive" else None)
    return Function(spec.id, spec, host_bytes, recent=Recent(settings.slo_window_ns), rhythm=rhythm)


class Want(NamedTuple):
    """What a function's finding no room on a device depended on, besides the device itself."""

    function: FunctionId
    head: RequestId | None
    late: bool
    """Past its deadline: it may displace functions with queued work."""
    look: int
    """Number of the last look at how long functions have been silent."""


@dataclass(slots=True)
class Executor:
    """A process that owns a device: its pool, its compute lane and its inbound copy lane."""

    id: ExecutorId
    device: DeviceId
    capacity_bytes: Bytes
    chunk_bytes: Bytes
    free_bytes: Bytes
    ready: ReadyQueue
    """Functions with queued requests, resident here, also while others of theirs run."""
    arriving: ReadyQueue
    """Functions with queued requests that may begin on what has come of them."""
    pinned_bytes: Bytes = 0
    """Chunks of residencies that a pin keeps."""
    executing: Execute | None = None
    ahead: Execute | None = None
    """Queued behind it, to begin as soon as it ends; its function counts as running already."""
    copying: FunctionId | None = None
    lent_to: ExecutorId | None = None
    """Whose load its link carries a part of; its own copy lane rests meanwhile."""
    routes: dict[ExecutorId, bool] = field(default_factory=dict)
    """Peers whose memory it can copy from, and whether it can take a detour over their links."""
    full_for: Want | None = None
    """There was no room for this, and nothing has happened since that could make any: no need to look again."""
    recency: OrderedDict[FunctionId, Residency] = field(default_factory=OrderedDict)
    """Every residency, least recently used first."""
    built: set[FunctionId] = field(default_factory=set)
    """Functions that it has loaded before: the next load need not build them."""
    known: set[FunctionId] = field(default_factory=set)
    """Functions that it was ever told to load. Even one whose load failed has left something there."""
    unbatched: dict[FunctionId, str] = field(default_factory=dict)
    """Functions whose requests it cannot run together, and why."""
    pending: dict[CommandId, ExecutorCommand] = field(default_factory=dict)

    @property
    def may_load(self) -> bool:
        """Whether its copy lane and its link are free."""
        return self.copying is None and self.lent_to is None

    def region_bytes(self, spec: FunctionSpec) -> Bytes:
        """What a function takes here: whole chunks."""
        return round_up(spec.image_bytes, self.chunk_bytes)


@dataclass(slots=True)
class State:
    """Everything the core knows."""

    settings: Settings
    homeless: ReadyQueue
    """Functions in host memory that are wanted on a device and are on none; where one queue serves all devices
    (``core/binding``), every function that has work and whose work is not under way."""
    cold: ReadyQueue
    """Functions on disk that are wanted."""
    far: ReadyQueue
    """Images in host memory, that whose next request is farthest away first, as it was when they were asked last; kept
    where the host tier's policy goes by it."""
    functions: dict[FunctionId, Function] = field(default_factory=dict)
    deployed: int = 0
    """How many functions there have ever been."""
    executors: dict[ExecutorId, Executor] = field(default_factory=dict)
    requests: dict[RequestId, Request] = field(default_factory=dict)
    host_recency: OrderedDict[FunctionId, None] = field(default_factory=OrderedDict)
    """Images in host memory, least recently used first."""
    stirred: dict[ExecutorId, Executor] = field(default_factory=dict)
    """Executors that have got work for their compute lane, or whose lane has become idle, since lanes were filled."""
    leaving: dict[FunctionId, None] = field(default_factory=dict)
    """Functions that are being unloaded or removed."""
    pinned_host_bytes: Bytes = 0
    """Pages of functions with a pin, wherever they are now."""
    host_used_bytes: Bytes = 0
    """Pages of images that are in host memory or being read."""
    parking_bytes: Bytes = 0
    """Pages promised to functions that are to be parked and are still on disk."""
    reading: int = 0
    queued: int = 0
    next_command: int = 1
    executorless_since_ns: Ns | None = None
    timeouts: list[tuple[Ns, RequestId]] = field(default_factory=list)
    """A heap; entries of ended requests are skipped."""
    replicate_at_ns: Ns | None = None
    """When waiting behind a busy device will have become too long, if nothing happens until then."""
    gatherings: list[tuple[Ns, FunctionId]] = field(default_factory=list)
    """A heap of when functions stop waiting for company; entries that are no longer so are skipped."""
    disk: Disk = field(default_factory=Disk)
    promotions: list[tuple[Ns, FunctionId]] = field(default_factory=list)
    """A heap of when to look at functions that may soon be asked; entries that are no longer so are skipped."""
    timer_ns: Ns | None = None
    """What the shell's timer is set to."""
    groups: Groups = field(default_factory=Groups)
    """What Torpor's queueing has decided last."""
    refresh_at_ns: Ns = 0
    """When the queueing policy wants to look at everything anew."""

    @property
    def host_free_bytes(self) -> Bytes:
        return self.settings.host_capacity_bytes - self.host_used_bytes

    def host_pinned_bytes(self, besides: Function) -> Bytes:
        """Pages that pins of other functions keep."""
        known = self.functions.get(besides.id)
        own = besides.host_bytes if known is not None and besides.spec.pin is not Pin.NONE else 0
        return self.pinned_host_bytes - own


def device_pinned_bytes(executor: Executor, besides: Function) -> Bytes:
    """Chunks that device pins of other functions keep on this executor."""
    own = executor.recency.get(besides.id)
    return executor.pinned_bytes - (own.size_bytes if own is not None and besides.spec.pin is Pin.DEVICE else 0)
