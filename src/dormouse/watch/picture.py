"""The vocabulary of those who watch: one picture of a node at one moment. Values only, made to be sent as JSON.

Times are milliseconds since 1970, durations milliseconds, rates a second. Decides nothing.
"""

from collections.abc import Mapping

from msgspec import Struct

from dormouse.core.types import Bytes


class Place(Struct, frozen=True):
    """A function's memory on a device."""

    function: str
    bytes: Bytes
    """Whole chunks."""
    state: str
    """See ``core.state.ResidencyState``."""
    pinned: bool = False


class Device(Struct, frozen=True):
    """An executor and the device memory it owns."""

    executor: str
    device: str
    description: str
    here: bool
    """False: its process is gone, and a new one is expected."""
    capacity_bytes: Bytes = 0
    chunk_bytes: Bytes = 0
    free_bytes: Bytes = 0
    waste_bytes: Bytes = 0
    """In last chunks, unused."""
    link_bytes_per_s: int = 0
    lent_to: str | None = None
    """The executor for which its link carries a part of a load."""
    executing: str | None = None
    together: int = 0
    """How many requests run as one."""
    restarts: int = 0
    places: tuple[Place, ...] = ()
    """In order of arrival. Where in memory their chunks lie is nobody's business but the driver's."""


class Load(Struct, frozen=True):
    """An image on its way: to an executor, or from disk to host memory (``to`` is ``host``)."""

    function: str
    to: str
    path: str
    bytes: Bytes
    started_ms: float
    expected_ms: float
    """How long it takes, by the rates of its links; building is not in it."""
    source: str | None = None
    """The executor from whose memory it comes; None: host memory, or disk."""
    helpers: tuple[str, ...] = ()
    """Executors whose links carry a part of it."""


class Waiting(Struct, frozen=True):
    """A function whose requests wait."""

    function: str
    requests: int
    since_ms: float
    """When the oldest arrived."""
    why: str


class Point(Struct, frozen=True, array_like=True):
    """How a function was served for a few seconds."""

    p98_ms: float
    answers: int
    """By which the percentile is."""
    requests: int
    """Those refused are among them."""
    in_time: int


class Watched(Struct, frozen=True):
    """A function. What it has counted is since it was deployed or the server started."""

    name: str
    version: str
    tenant: str
    public: bool
    state: str
    tier: str
    pin: str
    image_bytes: Bytes
    state_bytes: Bytes
    deadline_ms: float
    percentile: float
    on: tuple[str, ...] = ()
    queued: int = 0
    requests: int = 0
    in_time: int = 0
    cancelled: int = 0
    compliant: bool = True
    requests_per_s: float = 0
    p50_ms: float = 0
    p95_ms: float = 0
    p98_ms: float = 0
    paths: Mapping[str, int] = {}
    """Answers by path."""
    loads: Mapping[str, int] = {}
    refusals: Mapping[str, int] = {}
    evictions: int = 0
    waste_bytes: Bytes = 0
    eager_because: str = ""
    cost_nanos: int | None = None
    """Of its answers and its memory since the server started, by the ledger, in billionths of the currency. None: there
    is no ledger, or it has not said yet."""
    cost_in_time: int = 0
    """Its requests in time that are in the cost."""


class Host(Struct, frozen=True):
    """The host tier."""

    capacity_bytes: Bytes = 0
    used_bytes: Bytes = 0
    peak_bytes: Bytes = 0
    images: int = 0
    images_in: str = "disk"


class Totals(Struct, frozen=True):
    """Over all functions that the watcher sees."""

    functions: int = 0
    compliant: int = 0
    requests: int = 0
    in_time: int = 0
    requests_per_s: float = 0
    queued: int = 0
    paths: Mapping[str, int] = {}
    cost_nanos: int | None = None
    nanos_per_request_in_time: int | None = None
    """The price of success: all that was charged, by the requests in time."""


class Picture(Struct, frozen=True):
    """Everything, at one moment."""

    at_ms: float
    bucket_ms: float
    """For so long each point of the histories stands."""
    bucket: int
    """The number of the last point of every history."""
    functions: Mapping[str, Watched]
    histories: Mapping[str, tuple[Point | None, ...]]
    """By function, oldest first, as far as they reach back; None: nobody asked."""
    totals: Totals
    node: bool = True
    """Whether devices, loads and host memory are shown; a tenant does not see them."""
    devices: tuple[Device, ...] = ()
    loads: tuple[Load, ...] = ()
    queue: tuple[Waiting, ...] = ()
    """Those who have waited longest, first; not all, where there are many."""
    host: Host | None = None
    currency: str = ""


def totals_of(functions: Mapping[str, Watched]) -> Totals:
    """Of these functions."""
    paths: dict[str, int] = {}
    for each in functions.values():
        for path, count in each.paths.items():
            paths[path] = paths.get(path, 0) + count
    rows = functions.values()
    costs = [row.cost_nanos for row in rows if row.cost_nanos is not None]
    in_time = sum(row.cost_in_time for row in rows)
    return Totals(
        functions=len(functions),
        compliant=sum(row.compliant for row in rows),
        requests=sum(row.requests for row in rows),
        in_time=sum(row.in_time for row in rows),
        requests_per_s=round(sum(row.requests_per_s for row in rows), 1),
        queued=sum(row.queued for row in rows),
        paths=paths,
        cost_nanos=sum(costs) if costs else None,
        nanos_per_request_in_time=sum(costs) // in_time if costs and in_time else None,
    )
