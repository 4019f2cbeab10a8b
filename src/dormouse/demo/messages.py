"""What the demo's processes tell each other, one JSON line a message: the whole vocabulary.

foreground --Start, Order--> preparing --Manifest--> foreground
foreground --LoadPlan--> replay --Asked, Paced--> foreground
"""

from enum import StrEnum, unique
from typing import TypeAlias

from msgspec import Struct


class Start(Struct, frozen=True):
    """``device`` is what the server is started with; right answers are computed on the same kind."""

    model: str
    cache: str
    device: str
    threads: int


class Order(Struct, frozen=True):
    """Make a variant: its source under ``directory``; questions and right answers into the file ``examples``."""

    name: str
    seed: int
    directory: str
    examples: str


@unique
class Phase(StrEnum):
    FIRST = "first"
    """Every function once: it is built."""
    CALIBRATION = "calibration"
    """One request at a time, to learn what a request takes."""
    LOAD = "load"


@unique
class Verdict(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    FAILED = "failed"
    """Answered with an error."""
    LOST = "lost"
    """Not answered."""


class Asked(Struct, frozen=True, tag=True):
    """One request and how it ended. ``latency_ms`` counts from when it was due, so a client that is late counts too."""

    function: str
    phase: Phase
    verdict: Verdict
    latency_ms: float
    path: str = ""
    queued_ms: float = 0.0
    device_ms: float = 0.0
    detail: str = ""


class Paced(Struct, frozen=True, tag=True):
    """What calibration has shown, and what the load is made from: milliseconds by model."""

    resident_ms: dict[str, float]
    host_ms: dict[str, float]
    deadline_ms: dict[str, float]
    rate_per_s: float
    requests: int


Line: TypeAlias = Asked | Paced


class Target(Struct, frozen=True):
    """A deployed function to ask."""

    name: str
    model: str
    popularity: float
    examples: str


class LoadPlan(Struct, frozen=True):
    """``targets`` in the order in which they were deployed."""

    url: str
    targets: tuple[Target, ...]
    seconds: float
    seed: int
