"""Submit with tasks: a function that has one also takes texts or pictures, whichever door they come in by.

They come as tensors of bytes (tasks/carriers.py), are turned into the model's own here, beside the event loop where
that takes long, and go on as a few requests of alike rows. Requests without them pass as they are.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from dormouse.core.types import Bytes, Ns
from dormouse.core.types import Path as Way
from dormouse.errors import DeadlineMissed, DormouseError, InvalidRequest, Unavailable
from dormouse.functions import Manifest
from dormouse.gateway import encoding
from dormouse.gateway.chunks import last_of
from dormouse.metrics.books import Books
from dormouse.submit import Chunk, Description, IndexEntry, Inference, Owner, Statistics, Submit
from dormouse.tasks import carriers, rows
from dormouse.tasks.answers import ranked
from dormouse.tasks.carriers import (
    CARRIERS,
    IMAGE,
    LABEL,
    MADE,
    MOST_IMAGES,
    MOST_ITEMS,
    SCORE,
    TEXT,
    TOKEN_COUNT,
    TOKENS,
)
from dormouse.tasks.decoders import Allowance, Decoders
from dormouse.tasks.description import TOKENIZER_FILE, ImageInput, Task, TextInput
from dormouse.tasks.images import Pixels
from dormouse.tasks.text import Tokenizers, token_ids, within
from dormouse.tensors import Signature, Tensor
from dormouse.watch.picture import Picture

MOST_PIXELS = 32_000_000
MOST_PICTURES_BYTES: Bytes = 256 * 1024 * 1024
"""Of one request, as tensors."""
PARTS_AT_ONCE = 4
"""Of one request: more would only fill its function's queue."""
USUAL_LABELS = 5
LONG_CHARACTERS = 1_000
"""From here on tokenizing takes longer than a thread costs."""
SECOND_NS: Ns = 1_000_000_000


class Asked(Struct, frozen=True):
    """A request's texts or pictures as rows of tensors."""

    count: int
    parts: list[rows.Part]
    token_counts: list[int]


class WithTasks:
    """A Submit around another. Leaving it ends the processes it has started."""

    def __init__(
        self, inner: Submit, most_pixels: int = MOST_PIXELS, clock: Callable[[], Ns] = time.monotonic_ns
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._tokenizers = Tokenizers()
        self._decoders = Decoders(most_pixels)
        self._widened: dict[str, tuple[Signature, Signature]] = {}

    async def __aenter__(self) -> "WithTasks":
        return self

    async def __aexit__(self, *fault: object) -> None:
        await self._decoders.close()

    # ------------------------------------------------------------------ as it is

    def live(self) -> bool:
        return self._inner.live()

    def ready(self) -> bool:
        return self._inner.ready()

    def owner(self, name: str) -> Owner:
        return self._inner.owner(name)

    def function_ready(self, name: str, version: str | None = None) -> bool:
        return self._inner.function_ready(name, version)

    def index(self) -> Sequence[IndexEntry]:
        return self._inner.index()

    def statistics(self, name: str | None = None, version: str | None = None) -> Sequence[Statistics]:
        return self._inner.statistics(name, version)

    async def load(self, name: str) -> None:
        await self._inner.load(name)

    async def unload(self, name: str) -> None:
        await self._inner.unload(name)

    async def deploy(self, manifest: Manifest) -> str:
        return await self._inner.deploy(manifest)

    async def remove(self, name: str) -> None:
        await self._inner.remove(name)
        self._widened.pop(name, None)

    async def check(self, manifest: Manifest) -> dict[str, Any]:
        return await self._inner.check(manifest)

    def functions(self) -> list[dict[str, Any]]:
        return self._inner.functions()

    def node(self) -> dict[str, Any]:
        return self._inner.node()

    def function(self, name: str) -> dict[str, Any]:
        return self._inner.function(name)

    def picture(self) -> Picture:
        return self._inner.picture()

    def books(self) -> Books:
        return self._inner.books()

    # ------------------------------------------------------------------ with tasks

    def describe(self, name: str, version: str | None = None) -> Description:
        described = self._inner.describe(name, version)
        if described.task is None:
            return described
        plain, widened = self._widened.get(name, (None, None))
        if plain is not described.signature or widened is None:
            widened = carriers.widened_by(described.task, described.signature)
            self._widened[name] = described.signature, widened
        return msgspec.structs.replace(described, signature=widened)

    def infer(self, inference: Inference) -> AsyncGenerator[Chunk, None]:
        described = self._inner.describe(inference.name, inference.version)
        given = {tensor.name for tensor in inference.inputs}
        if described.task is None or not (given & CARRIERS or MADE & set(inference.outputs)):
            _check_complete(described, given)
            return self._inner.infer(inference)
        began = inference if inference.began_ns is not None else _begun(inference, self._clock())
        return self._answered(began, described, described.task)

    async def _answered(self, inference: Inference, described: Description, task: Task) -> AsyncGenerator[Chunk, None]:
        given = [tensor for tensor in inference.inputs if tensor.name in CARRIERS]
        if not given:
            asked = _of_tensors(inference, described)
        elif len(inference.inputs) > 1:
            others = ", ".join(repr(tensor.name) for tensor in inference.inputs if tensor is not given[0])
            raise InvalidRequest(f"input {given[0].name!r} stands for all inputs; leave out {others}")
        else:
            async with self._within(inference, described):
                asked = await self._asked(given[0], described, task, inference.tenant)
        outputs = inference.outputs or (*(spec.name for spec in described.signature.outputs), *carriers.made_by(task))
        wanted = {name for name in outputs if name not in MADE}
        if {LABEL, SCORE} & set(outputs):
            wanted.add(task.output)
        plain = msgspec.structs.replace(inference, outputs=tuple(sorted(wanted or {task.output})))
        chunks = await self._chunks(plain, asked.parts)
        yield _answer(outputs, task, inference.top_k, asked, chunks)

    @asynccontextmanager
    async def _within(self, inference: Inference, described: Description) -> AsyncIterator[None]:
        """No longer than the request may take. Raises DeadlineMissed."""
        limit_ns = round(described.limits.timeout_ms * 1e6) if inference.timeout_ns is None else inference.timeout_ns
        assert inference.began_ns is not None, "it has begun"
        left_ns = inference.began_ns + limit_ns - self._clock()
        try:
            async with asyncio.timeout(left_ns / SECOND_NS) as ending:
                yield
        except TimeoutError:
            if not ending.expired():
                raise
            limit = f"{limit_ns / 1e6:.0f} ms"
            raise DeadlineMissed(
                f"'{inference.name}' gave no answer within {limit}; its inputs were prepared"
            ) from None

    async def _asked(self, carrier: Tensor, described: Description, task: Task, tenant: str) -> Asked:
        items = list(encoding.elements(f"input {carrier.name!r}", carrier.data))
        most = MOST_IMAGES if carrier.name == IMAGE else MOST_ITEMS
        if not 0 < len(items) <= most:
            raise InvalidRequest(f"input {carrier.name!r} has {len(items)} elements, expected 1 to {most}")
        if carrier.name == IMAGE:
            assert task.image is not None, "the signature has no pictures"
            if len(items) * rows.bytes_of(task.image) > MOST_PICTURES_BYTES:
                fitting = MOST_PICTURES_BYTES // rows.bytes_of(task.image)
                raise InvalidRequest(f"input {IMAGE!r} has {len(items)} pictures, of this size {fitting} are the most")
            pictures = await self._pictures(task.image, items, tenant)
            return Asked(len(items), list(rows.of_pictures(task.image, described.signature, pictures)), [])
        assert task.text is not None, "the signature has no texts"
        if carrier.name == TOKENS:
            ids: list[Sequence[int]] = [within(task.text, n, carriers.ids_in(n, item)) for n, item in enumerate(items)]
        else:
            ids = await self._token_ids(
                task.text, Path(described.directory), carriers.texts_in(items), len(carrier.data)
            )
        parts = list(rows.of_tokens(task.text, described.signature, ids))
        return Asked(len(ids), parts, [len(row) for row in ids])

    async def _token_ids(
        self, text: TextInput, directory: Path, texts: Sequence[str], size: int
    ) -> list[Sequence[int]]:
        tokenizer = self._tokenizers.find(text)
        if tokenizer is None:
            try:
                tokenizer = await asyncio.to_thread(self._tokenizers.read, text, directory / TOKENIZER_FILE)
            except (OSError, ValueError):  # gone with a version that has just been replaced
                raise Unavailable("the function's tokenizer is not there; it may just be replaced") from None
        if size < LONG_CHARACTERS:
            return token_ids(text, tokenizer, texts)
        return await asyncio.to_thread(token_ids, text, tokenizer, texts)

    async def _pictures(self, image: ImageInput, items: Sequence[memoryview], tenant: str) -> list[Pixels]:
        allowance, found = Allowance(), []
        for number, item in enumerate(items):
            try:
                found.append(await self._decoders.pixels(image, item, allowance, tenant))
            except InvalidRequest as fault:
                if len(items) == 1:
                    raise
                raise InvalidRequest(f"picture {number}: {fault.message}") from None
        return found

    async def _chunks(self, plain: Inference, parts: Sequence[rows.Part]) -> list[tuple[rows.Part, Chunk]]:
        """The answer to every part, a few under way at a time. The first failure ends the others."""
        if len(parts) == 1:
            return [(parts[0], await self._one(plain, parts[0]))]
        few = asyncio.Semaphore(PARTS_AT_ONCE)

        async def answered(part: rows.Part) -> Chunk:
            async with few:
                return await self._one(plain, part)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answered(part)) for part in parts]
        except* DormouseError as faults:
            first = faults.exceptions[0]
            assert isinstance(first, DormouseError), "a group in a group of tasks"
            raise first from None
        return [(part, task.result()) for part, task in zip(parts, tasks, strict=True)]

    async def _one(self, plain: Inference, part: rows.Part) -> Chunk:
        async with aclosing(self._inner.infer(msgspec.structs.replace(plain, inputs=part.inputs))) as chunks:
            return await last_of(chunks)


def _check_complete(described: Description, given: set[str]) -> None:
    """The doors let tensors be left out, since texts or pictures stand for them. Raises InvalidRequest."""
    if described.task is not None:
        missing = [spec.name for spec in described.signature.inputs if not spec.optional and spec.name not in given]
        if missing:
            instead = [TEXT] * (described.task.text is not None) + [IMAGE] * (described.task.image is not None)
            raise InvalidRequest(f"input {missing[0]!r} is missing; or send {' or '.join(instead)}")


def _begun(inference: Inference, now: Ns) -> Inference:
    """The same request, which counts its time from now on, whatever it waits for."""
    return msgspec.structs.replace(inference, began_ns=now)


# ------------------------------------------------------------------ in


def _of_tensors(inference: Inference, described: Description) -> Asked:
    """Tensors as they came, of which labels are asked."""
    _check_complete(described, {tensor.name for tensor in inference.inputs})
    if TOKEN_COUNT in inference.outputs:
        raise InvalidRequest(f"output {TOKEN_COUNT!r} is of texts and tokens only")
    count = inference.inputs[0].shape[0] if inference.inputs and inference.inputs[0].shape else 0
    return Asked(count, [rows.Part(tuple(range(count)), inference.inputs)], [])


# ------------------------------------------------------------------ out


def _answer(
    outputs: Sequence[str], task: Task, top_k: int | None, asked: Asked, chunks: Sequence[tuple[rows.Part, Chunk]]
) -> Chunk:
    """One chunk of the chunks of all parts."""
    made: dict[str, Tensor] = {}
    if {LABEL, SCORE} & set(outputs):
        logits = _joined(task.output, asked, chunks).astype(np.float32)
        best = ranked(task, logits, USUAL_LABELS if top_k is None else top_k)
        texts = encoding.prefixed(name.encode() for row in best.labels for name in row)
        made[LABEL] = Tensor(LABEL, "BYTES", best.scores.shape, texts)
        made[SCORE] = Tensor(SCORE, "FP32", best.scores.shape, best.scores.astype("<f4").tobytes())
    if TOKEN_COUNT in outputs:
        counts = np.array(asked.token_counts, "<i8")
        made[TOKEN_COUNT] = Tensor(TOKEN_COUNT, "INT64", counts.shape, counts.tobytes())
    tensors = tuple(made[name] if name in made else _whole(name, asked, chunks) for name in outputs)
    slowest = max((chunk for _, chunk in chunks), key=lambda chunk: (_SLOWNESS[chunk.path], chunk.queued_ns))
    return Chunk(
        tensors,
        final=True,
        version=slowest.version,
        path=slowest.path,
        queued_ns=max(chunk.queued_ns for _, chunk in chunks),
        device_ns=sum(chunk.device_ns for _, chunk in chunks),
        request=",".join(chunk.request for _, chunk in chunks if chunk.request),
    )


_SLOWNESS = {way: place for place, way in enumerate(Way)}


def _of(name: str, chunk: Chunk) -> Tensor:
    return next(tensor for tensor in chunk.outputs if tensor.name == name)


def _whole(name: str, asked: Asked, chunks: Sequence[tuple[rows.Part, Chunk]]) -> Tensor:
    first = _of(name, chunks[0][1])
    if len(chunks) == 1:
        return first
    values = _joined(name, asked, chunks)
    return Tensor(name, first.datatype, values.shape, values.tobytes())


def _joined(name: str, asked: Asked, chunks: Sequence[tuple[rows.Part, Chunk]]) -> rows.Values:
    tensors = [(part, _of(name, chunk)) for part, chunk in chunks]
    datatype = tensors[0][1].datatype
    if datatype in ("BYTES", "BF16"):
        raise InvalidRequest(f"output {name!r} is {datatype}, which cannot be put together; ask for one at a time")
    return rows.joined(asked.count, tensors, {**encoding.DTYPES, **rows.FLOATS}[datatype])
