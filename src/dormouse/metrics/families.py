"""The metrics of functions as text, straight from the books: a thousand functions are tens of thousands of lines.

One text for each kind of labels is made once, with a place for the labels and places for numbers. Knows the format,
and no registry: what there are only few of is left to prometheus_client.
"""

from collections.abc import Iterator

from dormouse.core.ledger import Histogram, Ledger
from dormouse.metrics.books import REMOVED, FunctionBook
from dormouse.metrics.edges import SECONDS, cumulated

LATENCY = "dormouse_request_duration_seconds"
COUNTERS = {
    "dormouse_requests_in_time": "Requests answered before their deadline.",
    "dormouse_requests_missed": "Requests answered after their deadline, or refused.",
    "dormouse_refusals": "Requests that ended without an answer, by reason.",
    "dormouse_request_device_seconds": "Time of devices that answers took; what ran as a batch is shared out.",
    "dormouse_requests_cancelled": "Requests that their clients gave up.",
    "dormouse_request_queue_seconds": "How long answered requests had waited before they went to a device.",
    "dormouse_executions": "Runs that ended; fewer than answers where requests are batched.",
    "dormouse_loads": "Images brought to a device, by the way they took.",
    "dormouse_loaded_bytes": "Bytes of those images.",
    "dormouse_evictions": "How often a device took its memory back.",
    "dormouse_resident_seconds": "Time on devices, of stays that have ended.",
    "dormouse_image_reads": "Images read from disk to host memory.",
    "dormouse_image_read_bytes": "Bytes of those images.",
    "dormouse_reads_ahead": "Images read before a request came, by whether one then came in time.",
}
"""Names without the ``_total`` that Prometheus' text adds."""
GAUGES = {
    "dormouse_function_queue_length": "Requests that wait for the function.",
    "dormouse_function_image_bytes": "Weights, buffers and runtime state.",
    "dormouse_function_compliant": "1: the promised share of its requests was in time, since it was deployed last.",
}
HELP = "From a request's arrival to its answer, by the way its model took to the device."

_LABELS = "\0"
_HISTOGRAM = (
    "".join(f'{LATENCY}_bucket{{{_LABELS},le="{edge}"}} %d\n' for edge in SECONDS)
    + f"{LATENCY}_sum{{{_LABELS}}} %s\n{LATENCY}_count{{{_LABELS}}} %d\n"
)

Lines = dict[str, list[str]]
"""Text by family, in the order in which families are written."""


def empty() -> Lines:
    """Of every family nothing yet."""
    return {LATENCY: [], **{name: [] for name in (*COUNTERS, *GAUGES)}}


def write(book: FunctionBook, lines: Lines) -> None:
    """Add everything about one function."""
    everybodys = book.ledger
    others = None
    for tenant, ledger in everybodys.guests.items():
        if book.name != REMOVED:  # those have a book of their own, as they may own what was removed, too
            _write_requests(labels(function=book.name, tenant=tenant), ledger, None, lines)
        others = others or Ledger()
        others.merge(ledger)
    own = labels(function=book.name, tenant=book.tenant)
    _write_requests(own, everybodys, others, lines)
    _write_function(own, everybodys, lines)
    if book.name == REMOVED:
        return
    lines["dormouse_function_queue_length"].append(f"dormouse_function_queue_length{{{own}}} {book.queued}\n")
    lines["dormouse_function_image_bytes"].append(f"dormouse_function_image_bytes{{{own}}} {book.image_bytes}\n")
    lines["dormouse_function_compliant"].append(f"dormouse_function_compliant{{{own}}} {int(book.compliant)}\n")


def _write_requests(who: str, ledger: Ledger, others: Ledger | None, lines: Lines) -> None:
    """What is known by tenant: of a ledger, less what ``others`` had of it."""
    less = others or _NOBODY
    for path, histogram in ledger.latency.items():
        lines[LATENCY].append(_histogram(f'{who},path="{path}"', histogram, less.latency.get(path)))
    _count(lines, "dormouse_requests_in_time", who, ledger.in_time - less.in_time)
    _count(lines, "dormouse_requests_missed", who, ledger.missed - less.missed)
    for reason, number in ledger.refusals.items():
        _count(lines, "dormouse_refusals", f'{who},reason="{reason}"', number - less.refusals[reason])
    _count(lines, "dormouse_request_device_seconds", who, seconds(ledger.device_ns - less.device_ns))


def _write_function(who: str, ledger: Ledger, lines: Lines) -> None:
    """What is known of the function as a whole, and so its owner's."""
    _count(lines, "dormouse_requests_cancelled", who, ledger.cancelled)
    _count(lines, "dormouse_request_queue_seconds", who, seconds(ledger.queued_ns))
    _count(lines, "dormouse_executions", who, ledger.executions)
    for path, number in ledger.loads.items():
        _count(lines, "dormouse_loads", f'{who},path="{path}"', number)
    _count(lines, "dormouse_loaded_bytes", who, ledger.loaded_bytes)
    _count(lines, "dormouse_evictions", who, ledger.evictions)
    _count(lines, "dormouse_resident_seconds", who, seconds(ledger.resident_ns))
    _count(lines, "dormouse_image_reads", who, ledger.reads)
    _count(lines, "dormouse_image_read_bytes", who, ledger.read_bytes)
    if ledger.promotions_used or ledger.promotions_unused:
        _count(lines, "dormouse_reads_ahead", f'{who},used="true"', ledger.promotions_used)
        _count(lines, "dormouse_reads_ahead", f'{who},used="false"', ledger.promotions_unused)


def _count(lines: Lines, name: str, who: str, value: int | str) -> None:
    lines[name].append(f"{name}_total{{{who}}} {value}\n")


def _histogram(who: str, histogram: Histogram, less: Histogram | None) -> str:
    counts = cumulated(histogram, less)
    total_ns = histogram.total_ns if less is None else histogram.total_ns - less.total_ns
    return _HISTOGRAM.replace(_LABELS, who.replace("%", "%%")) % (*counts, seconds(total_ns), counts[-1])


def seconds(duration_ns: int) -> str:
    """Exactly."""
    whole, rest = divmod(duration_ns, 10**9)
    return f"{whole}.{rest:09d}"


def labels(**values: str) -> str:
    """Names and values between the braces."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())


def _escaped(value: str) -> str:
    if value.isalnum():
        return value
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace(_LABELS, "")


def headed(lines: Lines, *, openmetrics: bool) -> Iterator[str]:
    """The text, family by family, each with its head."""
    for name, text in lines.items():
        if not text:
            continue
        kind = "histogram" if name == LATENCY else "gauge" if name in GAUGES else "counter"
        help_text = HELP if name == LATENCY else COUNTERS.get(name) or GAUGES[name]
        shown = f"{name}_total" if kind == "counter" and not openmetrics else name
        yield "".join((f"# HELP {shown} {help_text}\n# TYPE {shown} {kind}\n", *text))


_NOBODY = Ledger()
