"""The Submit seam: what the gateway asks of the control side, and nothing else.

A request goes in, a stream of chunks comes out, because generation streams. Tensors carry raw little-endian
row-major bytes; BYTES elements carry a 4-byte little-endian length each, as on the V2 wire.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from dormouse.core.types import DEFAULT_PRIORITY, Ns, Path
from dormouse.functions import BatchManifest, LimitsManifest, Manifest, SloManifest
from dormouse.metrics.books import Books
from dormouse.tasks.description import Task
from dormouse.tensors import Signature, Tensor
from dormouse.watch.picture import Picture


class Inference(Struct, frozen=True):
    """One request. ``outputs`` empty: all. Durations count from ``began_ns``."""

    name: str
    inputs: tuple[Tensor, ...]
    version: str | None = None
    outputs: tuple[str, ...] = ()
    priority: int = DEFAULT_PRIORITY
    timeout_ns: Ns | None = None
    slo_ns: Ns | None = None
    top_k: int | None = None
    """So many labels are wanted of a classification; None: a few."""
    tenant: str = ""
    """Who asks, and pays. Empty: the server's own, as where nobody has to say who they are."""
    began_ns: Ns | None = None
    """On the monotonic clock, when it came to the server; None: now."""


class Chunk(Struct, frozen=True):
    """A part of the answer; models that do not stream send one, and it is final."""

    outputs: tuple[Tensor, ...]
    final: bool
    version: str
    path: Path
    queued_ns: Ns
    device_ns: Ns
    request: str = ""
    """What the ledger calls the request. Empty: there is none."""


class Description(Struct, frozen=True):
    """What V2 model metadata and configuration are made from."""

    name: str
    versions: tuple[str, ...]
    platform: str
    signature: Signature
    batch: BatchManifest = BatchManifest()
    slo: SloManifest = SloManifest()
    limits: LimitsManifest = LimitsManifest()
    task: Task | None = None
    """What texts or pictures are answered with, if anything."""
    directory: str = ""
    """Where what a task needs is kept."""
    deployed_s: int = 0
    """When, in seconds since 1970; 0: nobody knows."""


class Owner(Struct, frozen=True):
    """Whose a function is, and who else may see it: see ``Manifest``."""

    tenant: str
    public: bool


class IndexEntry(Struct, frozen=True):
    """``state`` is READY, LOADING, UNLOADING or UNAVAILABLE; ``reason`` says the tier or what went wrong."""

    name: str
    version: str
    state: str
    reason: str


class Tally(Struct, frozen=True):
    """So many, and how long they took together."""

    count: int = 0
    ns: Ns = 0


class Statistics(Struct, frozen=True):
    """How a function has been served since it was deployed or the server started."""

    name: str
    version: str
    answered: Tally = Tally()
    failed: Tally = Tally()
    """Refused ones too; those that their clients gave up are in neither."""
    queued_ns: Ns = 0
    """How long those answered waited before they were given to a device."""
    device_ns: Ns = 0
    executions: int = 0
    """Runs that were answered from; fewer than answers where requests are batched."""
    last_ms: int = 0
    """When a request last ended, in milliseconds since 1970; 0: never."""
    paths: Mapping[Path, Tally] = {}
    """Answers by the way the model took to the device."""


class Submit(Protocol):
    """Every method may raise a DormouseError, which says its own status."""

    def live(self) -> bool: ...

    def ready(self) -> bool: ...

    def owner(self, name: str) -> Owner:
        """Asked for every request, so it should cost next to nothing. Raises UnknownFunction."""

    def describe(self, name: str, version: str | None = None) -> Description: ...

    def function_ready(self, name: str, version: str | None = None) -> bool:
        """False for a known function that cannot be served now; UnknownFunction for an unknown one."""

    def index(self) -> Sequence[IndexEntry]: ...

    def statistics(self, name: str | None = None, version: str | None = None) -> Sequence[Statistics]:
        """Of one function, or of all. Raises UnknownFunction."""

    def infer(self, inference: Inference) -> AsyncGenerator[Chunk, None]:
        """Closing the generator (``aclose``), or cancelling the task that waits on it, cancels the request."""

    async def load(self, name: str) -> None:
        """Idempotent; returns when the function is admitted to host memory."""

    async def unload(self, name: str) -> None:
        """Idempotent; returns when its memory is free."""

    async def deploy(self, manifest: Manifest) -> str:
        """Import the source and admit it; returns the new version."""

    async def remove(self, name: str) -> None: ...

    async def check(self, manifest: Manifest) -> dict[str, Any]:
        """A dry run: what a deploy would do, and whether it would be admitted."""

    def functions(self) -> list[dict[str, Any]]:
        """One row a function for ``ps``: tier, bytes, requests by path with percentiles, evictions, compliance."""

    def node(self) -> dict[str, Any]:
        """Devices, host memory, totals."""

    def function(self, name: str) -> dict[str, Any]:
        """The row of one. Raises UnknownFunction."""

    def picture(self) -> Picture:
        """All of it as it is now, for those who watch. Asked several times a second, so it should cost little."""

    def books(self) -> Books:
        """What metrics are made from, as it is now."""
