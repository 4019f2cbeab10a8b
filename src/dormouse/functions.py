"""What a user deploys: the manifest, its checks, and how it becomes a FunctionSpec.

Pure: reads no file but the manifest text it is given.
"""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from dormouse.core.types import Batch, FunctionId, Limits, Ns, Pin, Slo
from dormouse.errors import ConfigurationFault
from dormouse.tasks.description import Resampling, Scoring

PROTOCOLS_OWN = ("stats",)
"""Where the V2 protocol has something else in the place of a function's name."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
DTYPES = ("float32", "float16", "bfloat16")
LONGEST_MS = 1e12
"""Thirty years. In nanoseconds, and added to any clock, it still fits in 64 bits."""
DURATION = f"a positive number of milliseconds, at most {LONGEST_MS:g}"
LONGEST_QUEUE = 10**9
MOST_ROWS = 4096
MOST_TOKENS = 10**6
LONGEST_EDGE = 4096
LONGEST_WAIT_MS = 10_000.0
TASKS = ("auto", "raw", "embedding", "next-token", "classification")


class SloManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """``[slo]``: ``percentile`` of requests within ``deadline_ms``."""

    deadline_ms: float = 1000.0
    percentile: float = 98.0


class LimitsManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """``[limits]``."""

    queue_length: int = 256
    timeout_ms: float = 60_000.0


class BatchManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """``[batch]``: up to so many ``rows`` of requests that wait are run together; ``wait_ms``: how long the oldest
    waits for company although a device is free."""

    rows: int = 1
    wait_ms: float = 0.0


class InputManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """``[[inputs]]``: an example input, for sources that do not carry one. -1 in ``shape`` is a free dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ImageManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """``[task.image]``: how a picture becomes an input, for sources that have no ``preprocessor_config.json``."""

    height: int
    width: int
    shortest_edge: int | None = None
    """Resize so that the shorter edge has this length, and take the middle; without: resize to height and width."""
    resampling: Resampling = "bilinear"
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    deviation: tuple[float, float, float] = (1.0, 1.0, 1.0)


class TaskManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """``[task]``: what the function is for, as far as its source does not say it."""

    kind: str = "auto"
    labels: tuple[str, ...] | str = ()
    """Names of the classes, or a text file with one a line."""
    scoring: Scoring | None = None
    output: str | None = None
    """Which of several outputs says it."""
    tokenizer: str | None = None
    """A ``tokenizer.json``."""
    max_tokens: int | None = None
    truncates: bool | None = None
    image: ImageManifest | None = None


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """A function as its owner describes it."""

    name: str
    source: str
    """A Hugging Face directory, a ``.pt2`` file, or ``module:callable``."""
    code: str | None = None
    """The directory a ``module:callable`` is imported from; must be under an ``--allow-code`` directory."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for the callable."""
    like: str | None = None
    """A deployed function of the same architecture: ``source`` gives tensors only, all else is that function's. Then it
    may also be a ``.safetensors`` file, or a callable that returns tensors by name."""
    dtype: str | None = None
    task: str | TaskManifest = "auto"
    """Its kind, or a table of more."""
    pin: Pin = Pin.NONE
    tenant: str = ""
    """Whose it is; who deploys it, if nothing is said. Empty: the server's own."""
    public: bool = False
    """Whether every tenant may see and call it, not its own alone."""
    slo: SloManifest = SloManifest()
    limits: LimitsManifest = LimitsManifest()
    batch: BatchManifest = BatchManifest()
    inputs: tuple[InputManifest, ...] = ()


def parse_manifest(text: str, origin: str) -> Manifest:
    """Read one manifest in TOML. Raises ConfigurationFault naming ``origin`` and the key."""
    try:
        return checked(msgspec.convert(tomllib.loads(text), Manifest), origin)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as fault:
        raise ConfigurationFault(f"{origin}: {fault}") from None


def checked(manifest: Manifest, origin: str) -> Manifest:
    """The manifest itself, if every value makes sense. Raises ConfigurationFault naming the key."""
    rules = (
        (
            NAME.fullmatch(manifest.name) is not None,
            "name",
            manifest.name,
            "letters, digits, '.', '_' and '-', at most 128",
        ),
        (manifest.name not in PROTOCOLS_OWN, "name", manifest.name, "another: /v2/models/stats is not of a function"),
        (manifest.source != "", "source", manifest.source, "a directory, a .pt2 file or module:callable"),
        (manifest.dtype is None or manifest.dtype in DTYPES, "dtype", manifest.dtype, f"one of {', '.join(DTYPES)}"),
        (manifest.like != "", "like", manifest.like, "the name of a deployed function"),
        (
            manifest.like is None or not (manifest.inputs or manifest.dtype or manifest.task != "auto"),
            "like",
            manifest.like,
            "no inputs, dtype or task beside it: those are the other function's",
        ),
        (
            manifest.tenant == "" or NAME.fullmatch(manifest.tenant) is not None,
            "tenant",
            manifest.tenant,
            "letters, digits, '.', '_' and '-', at most 128",
        ),
        (task_of(manifest).kind in TASKS, "task", task_of(manifest).kind, f"one of {', '.join(TASKS)}"),
        *_rules_of_task(task_of(manifest)),
        (_is_duration(manifest.slo.deadline_ms), "slo.deadline_ms", manifest.slo.deadline_ms, DURATION),
        (0 < manifest.slo.percentile < 100, "slo.percentile", manifest.slo.percentile, "between 0 and 100"),
        (_is_duration(manifest.limits.timeout_ms), "limits.timeout_ms", manifest.limits.timeout_ms, DURATION),
        (
            0 < manifest.limits.queue_length <= LONGEST_QUEUE,
            "limits.queue_length",
            manifest.limits.queue_length,
            f"at least 1 and at most {LONGEST_QUEUE}",
        ),
        (1 <= manifest.batch.rows <= MOST_ROWS, "batch.rows", manifest.batch.rows, f"1 to {MOST_ROWS}; 1: no batches"),
        (
            0 <= manifest.batch.wait_ms <= LONGEST_WAIT_MS,
            "batch.wait_ms",
            manifest.batch.wait_ms,
            f"0 to {LONGEST_WAIT_MS:g} milliseconds",
        ),
    )
    for sound, key, value, expected in rules:
        if not sound:
            raise ConfigurationFault(f"{origin}: {key} = {value!r} cannot be used; expected {expected}")
    return manifest


def task_of(manifest: Manifest) -> TaskManifest:
    """What the manifest says of the task, in either form."""
    return TaskManifest(manifest.task) if isinstance(manifest.task, str) else manifest.task


def _rules_of_task(task: TaskManifest) -> Iterator[tuple[bool, str, object, str]]:
    most = task.max_tokens
    yield most is None or 1 <= most <= MOST_TOKENS, "task.max_tokens", most, f"1 to {MOST_TOKENS}"
    if (image := task.image) is not None:
        for key, edge in (("height", image.height), ("width", image.width), ("shortest_edge", image.shortest_edge)):
            yield edge is None or 1 <= edge <= LONGEST_EDGE, f"task.image.{key}", edge, f"1 to {LONGEST_EDGE} pixels"
        yield 0 not in image.deviation, "task.image.deviation", image.deviation, "no zeros"


def slo_of(manifest: Manifest) -> Slo:
    return Slo(_ns(manifest.slo.deadline_ms), round(manifest.slo.percentile * 10_000))


def limits_of(manifest: Manifest) -> Limits:
    return Limits(manifest.limits.queue_length, _ns(manifest.limits.timeout_ms))


def batch_of(manifest: Manifest) -> Batch:
    return Batch(manifest.batch.rows, _ns(manifest.batch.wait_ms))


def function_id(name: str, revision: int) -> FunctionId:
    return FunctionId(f"{name}/{revision}")


def name_of(function: FunctionId) -> str:
    return function.rpartition("/")[0]


def revision_of(function: FunctionId) -> int:
    return int(function.rpartition("/")[2])


def _ns(milliseconds: float) -> Ns:
    return round(milliseconds * 1_000_000)


def _is_duration(milliseconds: float) -> bool:
    return 0 < milliseconds <= LONGEST_MS
