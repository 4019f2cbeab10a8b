"""A small Submit over plain numpy, for testing the doors: it computes, keeps versions, counts, and can be cancelled.

Functions are built from manifests whose source is ``arithmetic:NAME`` for a NAME in ``PROGRAMS``.
"""

import asyncio
import atexit
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dormouse.core.ledger import Ledger
from dormouse.core.types import Path as Way
from dormouse.errors import (
    DeadlineMissed,
    ExecutionFault,
    HostMemoryFull,
    RefusedSource,
    Unavailable,
    UnknownFunction,
    unknown_function,
)
from dormouse.functions import Manifest
from dormouse.metrics.books import Books, FunctionBook
from dormouse.submit import Chunk, Description, IndexEntry, Inference, Owner, Statistics, Tally
from dormouse.tasks.description import ImageInput, Task, TextInput
from dormouse.tensors import DATATYPE_BYTES, Signature, Tensor, TensorSpec
from dormouse.watch.picture import Device, Host, Picture, Point, Watched, totals_of
from tests.shell.tiny_models import save_tokenizer

QUEUED_NS, DEVICE_NS, ENDED_MS = 1_500_000, 2_000, 1_700_000_000_000
"""Of every answer."""
DEPLOYED_S = 1_600_000_000
"""Of every function with a task."""

Program = Callable[[Sequence[Tensor], dict[str, Any]], list[tuple[Tensor, ...]]]
"""Inputs and the manifest's arguments to the chunks of an answer."""


def echo(inputs: Sequence[Tensor], _: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    (x,) = inputs
    return [(Tensor("y", x.datatype, x.shape, x.data),)]


def affine(inputs: Sequence[Tensor], arguments: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    (x,) = inputs
    values = np.frombuffer(x.data, "<f4").reshape(x.shape)
    with np.errstate(all="ignore"):
        y = values * np.float32(arguments.get("scale", 2)) + np.float32(arguments.get("offset", 1))
        total = y.sum(axis=1, dtype=np.float64)
    return [(Tensor("y", "FP32", x.shape, y.tobytes()), Tensor("total", "FP64", x.shape[:1], total.tobytes()))]


def classifier(inputs: Sequence[Tensor], _: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    (x,) = inputs
    with np.errstate(all="ignore"):
        scores = np.frombuffer(x.data, "<f4").reshape(x.shape).sum(axis=1, keepdims=True).repeat(10, axis=1)
    return [(Tensor("output", "FP32", scores.shape, scores.astype("<f4").tobytes()),)]


def upper(inputs: Sequence[Tensor], _: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    (x,) = inputs
    return [(Tensor("y", "BYTES", x.shape, bytes(x.data).upper()),)]


def running_total(inputs: Sequence[Tensor], _: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    (x,) = inputs
    totals = np.cumsum(np.frombuffer(x.data, "<i8"))
    return [(Tensor("y", "INT64", (1,), total.tobytes()),) for total in totals]


def fault(inputs: Sequence[Tensor], _: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    (x,) = inputs
    failures: dict[bytes, Exception] = {
        b"bug": ZeroDivisionError("secret detail"),
        b"busy": Unavailable("function 'fault' has 256 requests waiting", retry_after_s=2.5),
        b"late": DeadlineMissed("the request took longer than its timeout of 5 ms"),
        b"raised": ExecutionFault("function 'fault' raised ValueError: no"),
    }
    raise failures[bytes(x.data)[4:]]


def embedder(inputs: Sequence[Tensor], _: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    """How many tokens, their sum, the first and the last one: of length one."""
    given_ = {tensor.name: np.frombuffer(tensor.data, "<i8").reshape(tensor.shape) for tensor in inputs}
    ids, mask = given_["input_ids"], given_["attention_mask"]
    kept = ids * mask
    last = np.take_along_axis(ids, mask.sum(axis=1, keepdims=True) - 1, axis=1)[:, 0]
    vectors = np.stack([mask.sum(axis=1), kept.sum(axis=1), ids[:, 0], last], axis=1).astype("<f4")
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-9))
    return [(Tensor("embedding", "FP32", vectors.shape, vectors.tobytes()),)]


def reader(inputs: Sequence[Tensor], _: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    """Scores of a text are how often it has each of three words."""
    ids = np.frombuffer(inputs[0].data, "<i8").reshape(inputs[0].shape)
    logits = np.stack([(ids == word).sum(axis=1) for word in (5, 6, 11)], axis=1).astype("<f4")
    return [(Tensor("logits", "FP32", logits.shape, logits.tobytes()),)]


def looker(inputs: Sequence[Tensor], _: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    """Scores of a picture are its mean colours, ten times over."""
    (x,) = inputs
    logits = 10 * np.frombuffer(x.data, "<f4").reshape(x.shape).mean(axis=(2, 3))
    return [(Tensor("logits", "FP32", logits.shape, logits.astype("<f4").tobytes()),)]


PROGRAMS: dict[str, tuple[Program, Signature]] = {
    "affine": (
        affine,
        Signature(
            (TensorSpec("x", "FP32", (-1, 3)),), (TensorSpec("y", "FP32", (-1, 3)), TensorSpec("total", "FP64", (-1,)))
        ),
    ),
    "classifier": (
        classifier,
        Signature((TensorSpec("input", "FP32", (-1, 3)),), (TensorSpec("output", "FP32", (-1, 10)),)),
    ),
    "upper": (upper, Signature((TensorSpec("x", "BYTES", (-1, 1)),), (TensorSpec("y", "BYTES", (-1, 1)),))),
    "running_total": (
        running_total,
        Signature((TensorSpec("x", "INT64", (-1,)),), (TensorSpec("y", "INT64", (1,)),)),
    ),
    "fault": (fault, Signature((TensorSpec("x", "BYTES", (1,)),), (TensorSpec("y", "BYTES", (1,)),))),
} | {
    f"echo_{datatype}": (
        echo,
        Signature((TensorSpec("x", datatype, (-1, -1)),), (TensorSpec("y", datatype, (-1, -1)),)),
    )
    for datatype in (*DATATYPE_BYTES, "BYTES")
}


_TEXTS = (TensorSpec("input_ids", "INT64", (-1, -1)), TensorSpec("attention_mask", "INT64", (-1, -1), optional=True))
_WORDS = TextInput(digest="words", max_tokens=16, truncates=False, vocabulary=14)
_LOGITS = (TensorSpec("logits", "FP32", (-1, 3)),)
TASKED: dict[str, tuple[Program, Signature, Task]] = {
    "embedder": (
        embedder,
        Signature(_TEXTS, (TensorSpec("embedding", "FP32", (-1, 4)),)),
        Task("embedding", "embedding", text=_WORDS, dimensions=(2, 3)),
    ),
    "reader": (
        reader,
        Signature(_TEXTS, _LOGITS),
        Task("classification", "logits", text=_WORDS, labels=("dormouse", "sleep", "food")),
    ),
    "looker": (
        looker,
        Signature((TensorSpec("pixel_values", "FP32", (-1, 3, 4, 4)),), _LOGITS),
        Task("classification", "logits", image=ImageInput("pixel_values", 4, 4), labels=("red", "green", "blue")),
    ),
}
"""Functions that take texts or pictures; the tokenizer is the one of tiny models."""


@cache
def directory_of_words() -> str:
    """Where the tokenizer is, as long as the tests run."""
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    save_tokenizer(Path(directory.name))
    return directory.name


@dataclass
class Deployed:
    manifest: Manifest
    revision: int
    program: Program
    signature: Signature
    task: Task | None = None
    loaded: bool = True
    requests: int = 0
    answers: int = 0

    def statistics(self) -> Statistics:
        count, failures = self.answers, self.requests - self.answers
        took = Tally(count, count * (QUEUED_NS + DEVICE_NS))
        return Statistics(
            self.manifest.name,
            str(self.revision),
            answered=took,
            failed=Tally(failures, failures * QUEUED_NS),
            queued_ns=count * QUEUED_NS,
            device_ns=count * DEVICE_NS,
            executions=count,
            last_ms=ENDED_MS if count else 0,
            paths={Way.HOST: took} if count else {},
        )


@dataclass
class InMemory:
    """``gate``, when set, holds every inference back until its event is set; ``cancelled`` counts those given up."""

    deployed: dict[str, Deployed] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    entered: asyncio.Event | None = None
    cancelled: int = 0
    given_up: asyncio.Event | None = None
    arrivals: asyncio.Semaphore | None = None
    """Released by each inference that begins."""
    operations: asyncio.Event | None = None
    """Holds loads and unloads back until it is set."""
    host_is_full: bool = False
    departures: asyncio.Semaphore | None = None
    """Released by each that is cancelled."""
    break_after_first: str = ""
    """Fail after the first chunk: ``bug`` or ``late``."""
    seen: list[Inference] = field(default_factory=list)
    is_live: bool = True
    is_ready: bool = True

    def furnish(self) -> None:
        """Forget everything and deploy every program under its own name."""
        vars(self).update(vars(InMemory()))
        for name, (program, signature) in PROGRAMS.items():
            self.deployed[name] = Deployed(Manifest(name, f"arithmetic:{name}"), 1, program, signature)
        for name, (program, signature, task) in TASKED.items():
            self.deployed[name] = Deployed(Manifest(name, f"arithmetic:{name}"), 1, program, signature, task)

    def live(self) -> bool:
        return self.is_live

    def ready(self) -> bool:
        return self.is_ready

    def owner(self, name: str) -> Owner:
        manifest = self._find(name, None).manifest
        return Owner(manifest.tenant, manifest.public)

    def describe(self, name: str, version: str | None = None) -> Description:
        found = self._find(name, version)
        manifest = found.manifest
        versions = (str(found.revision),)
        plain = Description(name, versions, "numpy", found.signature, manifest.batch, manifest.slo, manifest.limits)
        if found.task is None:
            return plain
        return msgspec.structs.replace(plain, task=found.task, directory=directory_of_words(), deployed_s=DEPLOYED_S)

    def statistics(self, name: str | None = None, version: str | None = None) -> Sequence[Statistics]:
        """Of answers, each of which has waited and run for as long as its chunks say."""
        found = self.deployed.values() if name is None else [self._find(name, version)]
        return [each.statistics() for each in found]

    def function_ready(self, name: str, version: str | None = None) -> bool:
        return self._find(name, version).loaded

    def index(self) -> Sequence[IndexEntry]:
        return [
            IndexEntry(
                name,
                str(found.revision),
                "READY" if found.loaded else "UNAVAILABLE",
                "host" if found.loaded else "unloaded",
            )
            for name, found in self.deployed.items()
        ]

    async def infer(self, inference: Inference) -> AsyncGenerator[Chunk, None]:
        found = self._find(inference.name, inference.version)
        if not found.loaded:
            raise Unavailable(f"function {inference.name!r} is unloaded; load it first")
        self.seen.append(inference)
        if self.arrivals is not None:
            self.arrivals.release()
        found.requests += 1
        chunks = found.program(inference.inputs, found.manifest.arguments)
        try:
            for index, outputs in enumerate(chunks):
                if self.entered is not None:
                    self.entered.set()
                if self.gate is not None:
                    await self.gate.wait()
                wanted = tuple(
                    tensor for tensor in outputs if tensor.name in inference.outputs or not inference.outputs
                )
                found.answers += index == len(chunks) - 1
                yield Chunk(wanted, index == len(chunks) - 1, str(found.revision), Way.HOST, QUEUED_NS, DEVICE_NS)
                self._break()
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            if self.given_up is not None:
                self.given_up.set()
            if self.departures is not None:
                self.departures.release()
            raise

    async def load(self, name: str) -> None:
        await self._operated(name)
        self._find(name, None).loaded = True

    async def unload(self, name: str) -> None:
        await self._operated(name)
        self._find(name, None).loaded = False

    async def _operated(self, name: str) -> None:
        self._find(name, None)
        if self.operations is not None:
            await self.operations.wait()
        if self.host_is_full:
            raise HostMemoryFull(f"function {name!r} needs 9.0 GiB of host memory, 4.0 GiB are there")

    async def deploy(self, manifest: Manifest) -> str:
        program, signature = self._program(manifest)
        before = self.deployed.get(manifest.name)
        revision = 1 if before is None else before.revision + 1
        self.deployed[manifest.name] = Deployed(manifest, revision, program, signature)
        return str(revision)

    async def remove(self, name: str) -> None:
        self._find(name, None)
        del self.deployed[name]

    async def check(self, manifest: Manifest) -> dict[str, Any]:
        _, signature = self._program(manifest)
        before = self.deployed.get(manifest.name)
        too_large = manifest.arguments.get("scale") == "huge"
        return {
            "name": manifest.name,
            "replaces_version": None if before is None else str(before.revision),
            "image_bytes": 4096,
            "platform": "numpy",
            "inputs": [{"name": t.name, "datatype": t.datatype, "shape": t.shape} for t in signature.inputs],
            "outputs": [{"name": t.name, "datatype": t.datatype, "shape": t.shape} for t in signature.outputs],
            "admitted": not too_large,
            "refusal": "needs 9.0 GiB of host memory, 4.0 GiB are there" if too_large else None,
        }

    def functions(self) -> list[dict[str, Any]]:
        """Rows as a node gives them, as far as the command line reads them."""
        return [
            {
                "name": name,
                "version": str(found.revision),
                "state": "READY" if found.loaded else "UNAVAILABLE",
                "tier": "host" if found.loaded else "disk",
                "image_bytes": 4096,
                "pin": str(found.manifest.pin),
                "requests": found.requests,
                "compliant": True,
                "evictions": 3,
                "graphs": {"cuda:0": {"shapes": 0, "eager_because": "text goes in" if name == "upper" else ""}},
                "paths": {"host": {"requests": found.requests, "p50_ms": 1.5, "p95_ms": 2.0, "p98_ms": 2.5}}
                if found.requests
                else {},
            }
            for name, found in self.deployed.items()
        ]

    def books(self) -> Books:
        owned = ((name, each.manifest.tenant) for name, each in self.deployed.items())
        return Books(functions=[FunctionBook(name, tenant, Ledger()) for name, tenant in owned])

    def node(self) -> dict[str, Any]:
        return {
            "host": {"capacity_bytes": 2**30, "used_bytes": 4096, "images": len(self.deployed)},
            "devices": [
                {"device": "cpu:0", "capacity_bytes": 2**26, "free_bytes": 2**25, "resident": 1, "waste_bytes": 2**20}
            ],
            "functions": len(self.deployed),
            "functions_compliant": len(self.deployed),
        }

    def function(self, name: str) -> dict[str, Any]:
        self._find(name, None)
        return next(row for row in self.functions() if row["name"] == name)

    def picture(self) -> Picture:
        """Of functions only."""
        rows = {name: _watched(name, found) for name, found in self.deployed.items()}
        return Picture(
            at_ms=0,
            bucket_ms=5000,
            bucket=1,
            functions=rows,
            histories={name: (Point(2.5, 1, 1, 1),) for name in rows},
            totals=totals_of(rows),
            devices=(Device("cpu:0", "cpu:0", "numpy", True, capacity_bytes=2**26, free_bytes=2**25),),
            host=Host(2**30, 4096, 4096, len(rows)),
        )

    def _break(self) -> None:
        if self.break_after_first == "bug":
            raise KeyError("x")
        if self.break_after_first == "late":
            raise DeadlineMissed("too late for the rest")

    def _find(self, name: str, version: str | None) -> Deployed:
        found = self.deployed.get(name)
        if found is None:
            raise unknown_function(name)
        if version is not None and version != str(found.revision):
            raise UnknownFunction(f"function {name!r} has no version {version!r}; it has {found.revision}")
        return found

    def _program(self, manifest: Manifest) -> tuple[Program, Signature]:
        module, _, name = manifest.source.rpartition(":")
        if module != "arithmetic" or name not in PROGRAMS:
            raise RefusedSource(f"source {manifest.source!r} is none of this node's programs")
        return PROGRAMS[name]


def _watched(name: str, found: Deployed) -> Watched:
    manifest = found.manifest
    return Watched(
        name=name,
        version=str(found.revision),
        tenant=manifest.tenant,
        public=manifest.public,
        state="READY" if found.loaded else "UNAVAILABLE",
        tier="host" if found.loaded else "disk",
        pin=str(manifest.pin),
        image_bytes=4096,
        state_bytes=0,
        deadline_ms=manifest.slo.deadline_ms,
        percentile=manifest.slo.percentile,
        requests=found.requests,
        in_time=found.requests,
        paths={"host": found.answers} if found.answers else {},
    )


def furnished() -> InMemory:
    """A node with every program deployed under its own name."""
    node = InMemory()
    node.furnish()
    return node
