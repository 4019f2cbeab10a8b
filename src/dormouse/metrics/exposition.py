"""The whole answer to a scrape, in pieces, so that whoever asks for it can let others have their turn in between.

Functions come straight from the books (families.py); the few other metrics go through prometheus_client, as do those
of the process.
"""

import platform
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dormouse import __version__
from dormouse.metrics import families
from dormouse.metrics.books import Books, DeviceBook

AT_ONCE = 20
"""Functions, in one piece."""
SECOND_NS = 1_000_000_000

Answers = Counter[tuple[str, int]]
"""How many answers have left, by door and status; statuses of gRPC are those of HTTP that mean the same."""


class Exposition:
    """Of one server. ``answers`` is read whenever somebody asks."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)
        PlatformCollector(registry=self._process)

    def content_type(self, accept: str) -> str:
        """What will be sent to whoever accepts this."""
        return choose_encoder(accept)[1]

    def pieces(self, books: Books, accept: str) -> Iterator[str]:
        """The text; most pieces are empty and only give others a chance."""
        encoder, content_type = choose_encoder(accept)
        lines = families.empty()
        for number, book in enumerate((*books.functions, *books.gone)):
            families.write(book, lines)
            if number % AT_ONCE == AT_ONCE - 1:
                yield ""
        openmetrics = content_type.startswith("application/openmetrics-text")
        for family in families.headed(lines, openmetrics=openmetrics):
            yield family
            yield ""
        registry = _Registry(books, self._answers, self._process)
        yield encoder(registry).decode()


class _Registry(Collector):
    """What there are few of, at one moment."""

    def __init__(self, books: Books, answers: Answers, process: CollectorRegistry) -> None:
        self._books = books
        self._answers = answers
        self._process = process

    def collect(self) -> Iterable[Metric]:
        yield from _of_node(self._books)
        yield from _of_devices(self._books.devices)
        yield _of_doors(self._answers)
        build = InfoMetricFamily("dormouse_build", "What is running.")
        build.add_metric([], {"version": __version__, "python": platform.python_version()})
        yield build
        yield from self._process.collect()


def _gauge(name: str, text: str, labels: tuple[str, ...], *samples: tuple[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _of_node(books: Books) -> Iterator[Metric]:
    compliant = sum(book.compliant for book in books.functions)
    yield _gauge("dormouse_functions", "Functions that are deployed.", (), ((), len(books.functions)))
    yield _gauge("dormouse_functions_compliant", "Those of them that keep their promise.", (), ((), compliant))
    yield _gauge("dormouse_queue_length", "Requests that wait.", (), ((), books.queued))
    oldest_s = books.oldest_wait_ns / SECOND_NS
    yield _gauge("dormouse_queue_oldest_wait_seconds", "How long the oldest of them has waited.", (), ((), oldest_s))
    yield _gauge("dormouse_image_reads_under_way", "Images being read from disk.", (), ((), books.reading))
    tier = ("tier", "device")
    devices = books.devices
    yield _gauge(
        "dormouse_images",
        "Images by where they are; those on a device are in host memory or on disk, too.",
        tier,
        (("host", ""), books.host_images),
        (("disk", ""), books.disk_images),
        *((("device", device.device), device.images) for device in devices),
    )
    yield _gauge(
        "dormouse_memory_capacity_bytes",
        "Memory for images.",
        tier,
        (("host", ""), books.host_capacity_bytes),
        *((("device", device.device), device.capacity_bytes) for device in devices),
    )
    yield _gauge(
        "dormouse_memory_used_bytes",
        "What is taken of it.",
        tier,
        (("host", ""), books.host_used_bytes),
        *((("device", device.device), device.used_bytes) for device in devices),
    )
    yield _gauge(
        "dormouse_memory_waste_bytes",
        "What is taken and holds nothing, because pages and chunks are handed out whole.",
        tier,
        (("host", ""), books.host_waste_bytes),
        *((("device", device.device), device.waste_bytes) for device in devices),
    )
    peak = books.host_peak_bytes
    yield _gauge("dormouse_host_memory_peak_bytes", "The most that images have taken of host memory.", (), ((), peak))


def _of_devices(devices: Iterable[DeviceBook]) -> Iterator[Metric]:
    devices = tuple(devices)
    label = ("device",)
    yield _gauge("dormouse_executor_up", "1: its process has joined.", label, *(((d.device,), d.up) for d in devices))
    yield _counter(
        "dormouse_executor_restarts",
        "How often an executor's process was lost and started again.",
        label,
        (((d.device,), d.restarts) for d in devices),
    )
    yield _gauge("dormouse_graphs", "CUDA graphs that are held.", label, *(((d.device,), d.graphs) for d in devices))
    yield _gauge(
        "dormouse_device_unaccounted_bytes",
        "What the driver has mapped less what the pool believes, at the last eviction; anything but 0 is a fault.",
        label,
        *(((d.device,), d.unaccounted_bytes) for d in devices),
    )
    yield _counter(
        "dormouse_link_bytes",
        "Bytes of images that have come to a device: over its own link (host), with neighbours' links (detour), or "
        "from another device (peer).",
        ("device", "link", "source"),
        (((d.device, *way), size) for d in devices for way, size in d.link_bytes.items()),
    )


def _of_doors(answers: Answers) -> Metric:
    return _counter(
        "dormouse_answers",
        "Answers by door and status, whatever was asked; for gRPC, HTTP's status of the same meaning.",
        ("door", "status"),
        (((door, str(status)), number) for (door, status), number in answers.items()),
    )
