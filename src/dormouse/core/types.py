"""The nouns of the core: ids, integer nanoseconds and bytes, and what a function is.

Decides nothing and knows no clock, no device and no process. Everything here is a value that can be
written to a journal.
"""

from enum import StrEnum, unique
from functools import cached_property
from typing import NewType, TypeAlias

from msgspec import Struct

Ns: TypeAlias = int
"""A point in time or a duration, in integer nanoseconds of a monotonic clock."""

Bytes: TypeAlias = int
"""A size in bytes."""

FunctionId = NewType("FunctionId", str)
"""One revision of a deployed function, written ``name/revision`` (``minilm/3``)."""

ExecutorId = NewType("ExecutorId", str)
"""The process that owns a device, or a share of one. Several may name the same device later."""

DeviceId = NewType("DeviceId", str)
"""A device as its driver names it: ``cpu:0``, ``cuda:1``."""

RequestId = NewType("RequestId", int)
OperationId = NewType("OperationId", int)
"""An administrative act (deploy, load, unload, remove) that somebody waits for."""

CommandId = NewType("CommandId", int)
"""Serial number of a command to an executor; its answer repeats it."""

FOREVER_NS: Ns = 2**62
"""A window that never closes."""

DEFAULT_PRIORITY = 100
"""Where a request without a priority stands; 1 is the most urgent (KServe V2 ``priority``)."""


@unique
class Path(StrEnum):
    """How a request found its model."""

    __hash__ = str.__hash__  # ledgers look it up at every answer, and Enum hashes in Python

    RESIDENT = "resident"
    PEER = "peer"
    HOST = "host"
    DISK = "disk"
    BUILD = "build"


@unique
class Pin(StrEnum):
    """The tier below which a function's image never falls."""

    NONE = "none"
    HOST = "host"
    DEVICE = "device"


@unique
class Reason(StrEnum):
    """Why something was refused or failed. A refusal is a value, never an exception."""

    __hash__ = str.__hash__

    UNKNOWN_FUNCTION = "unknown_function"
    NOT_READY = "not_ready"
    QUEUE_FULL = "queue_full"
    TIMEOUT = "timeout"
    SHED = "shed"
    CANCELLED = "cancelled"
    HOST_MEMORY_FULL = "host_memory_full"
    LARGER_THAN_DEVICE = "larger_than_device"
    IMAGE_UNREADABLE = "image_unreadable"
    LOAD_FAILED = "load_failed"
    INVALID_INPUT = "invalid_input"
    EXECUTION_FAILED = "execution_failed"
    UNBATCHABLE = "unbatchable"
    """Requests that ran together cannot be told apart in the answer. No caller is told: they run one by one."""
    OUTPUT_TOO_LARGE = "output_too_large"
    EXECUTOR_LOST = "executor_lost"
    TOO_EARLY = "too_early"
    TOO_LATE = "too_late"
    ALREADY_DEPLOYED = "already_deployed"
    IN_MEMORY_ONLY = "in_memory_only"
    SHUTTING_DOWN = "shutting_down"


class Slo(Struct, frozen=True):
    """A share of requests, in parts per million, that must end within a deadline."""

    deadline_ns: Ns = 1_000_000_000
    share_ppm: int = 980_000


class Limits(Struct, frozen=True):
    """What one function may take."""

    queue_length: int = 256
    timeout_ns: Ns = 60_000_000_000
    """A request that has not ended by then is answered with ``Reason.TIMEOUT``."""


class Batch(Struct, frozen=True):
    """How requests of one function are run together."""

    rows: int = 1
    """The most, counted along the first dimension of the inputs; 1: never together."""
    wait_ns: Ns = 0
    """How long the oldest waits for company although a device is free."""


class FunctionSpec(Struct, frozen=True):
    """What the core needs to know of a deployed function."""

    id: FunctionId
    image_bytes: Bytes
    """Weights, buffers and runtime state together, as laid out for one device."""
    state_bytes: Bytes = 0
    """The tail of the image that a forward pass changes; 0 for nearly every model."""
    slo: Slo = Slo()
    pin: Pin = Pin.NONE
    limits: Limits = Limits()
    batch: Batch = Batch()


class Link(Struct, frozen=True):
    """A device's own way to host memory."""

    device: DeviceId
    bytes_per_s: int


class Pair(Struct, frozen=True):
    """What two devices are to each other, in one direction. A rate of 0: there is no such way."""

    source: DeviceId
    destination: DeviceId
    peer_bytes_per_s: int = 0
    """From the memory of one to the memory of the other."""
    detour_bytes_per_s: int = 0
    """From host memory to the destination, over the link of the source."""


class Topology(Struct, frozen=True, dict=True):
    """How fast images move, as measured or assumed. Which ways are open at a moment is for executors to say."""

    host_bytes_per_s: int = 50_000_000_000
    """Of links that are not listed."""
    peer_bytes_per_s: int = 200_000_000_000
    detour_bytes_per_s: int = 45_000_000_000
    """These two of pairs that are not listed."""
    detour_ns: Ns = 1_000_000
    """What a detour costs beside its copies."""
    links: tuple[Link, ...] = ()
    pairs: tuple[Pair, ...] = ()
    switches: tuple[tuple[DeviceId, ...], ...] = ()
    """Devices whose links share a way to host memory."""

    def host_rate(self, device: DeviceId) -> int:
        """Bytes a second from host memory over the device's own link."""
        return next((link.bytes_per_s for link in self.links if link.device == device), self.host_bytes_per_s)

    @cached_property
    def host_rate_of_all(self) -> int:
        """Where it does not matter over which link: of the slowest that was measured."""
        return min((link.bytes_per_s for link in self.links), default=self.host_bytes_per_s)

    def neighbours(self, device: DeviceId) -> tuple[DeviceId, ...]:
        """Other devices behind the same switch."""
        return tuple(other for switch in self.switches if device in switch for other in switch if other != device)

    def pair(self, source: DeviceId, destination: DeviceId) -> Pair:
        for pair in self.pairs:
            if (pair.source, pair.destination) == (source, destination):
                return pair
        return Pair(source, destination, self.peer_bytes_per_s, self.detour_bytes_per_s)


class Settings(Struct, frozen=True):
    """What the core is told at start and never changes; the head of every journal."""

    host_capacity_bytes: Bytes
    host_page_bytes: Bytes = 2 * 1024 * 1024
    host_is_last: bool = False
    """Images have no copy on disk: none leaves host memory but with its function."""
    binding: str = "lanes"
    """When a request gets its device (``core/binding``)."""
    queueing: str = "edf"
    alpha_ppm: int = 1_000_000
    """Where ``torpor-fixed`` queueing has its threshold: the share of all that is lacking which the high group may."""
    placement: str = "least-displacing"
    eviction: str = "lru"
    replication: str = "worthwhile"
    host_tier: str = "lru"
    load_ahead: bool = True
    """A device loads while it computes; else it does one thing after another, as Torpor's do."""
    shed_late: bool = False
    """Requests that still wait at their deadline are refused, unless nothing could have served them in time."""
    queue_length: int = 10_000
    """Requests waiting over all functions."""
    concurrent_reads: int = 2
    """Images read from disk at the same time."""
    attempts: int = 2
    """How often a request is started before a lost executor ends it."""
    command_window_ns: Ns = 120_000_000_000
    ahead_ns: Ns = 3_000_000
    """Behind a run that is no longer than this the next one is queued on its device at once; 0: never."""
    slo_window_ns: Ns = 300_000_000_000
    """So far back policies look at how a function was served; 0: to its beginning, as in Torpor's published runs."""
    executor_grace_ns: Ns = 30_000_000_000
    """How long requests wait for an executor when none is there."""
    topology: Topology = Topology()
    detour_pause_ns: Ns = 1_000_000_000
    """After a load from a peer or over a neighbour's link has failed: how long the function goes the plain way."""

    @property
    def one_queue(self) -> bool:
        """All devices are served from one queue; else each lane has its own."""
        return self.binding == "late"


def round_up(amount: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``amount``."""
    return -(-amount // unit) * unit
