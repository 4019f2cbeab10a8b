"""OpenAI's door: models, embeddings, and classification in the same manner. Generation has its place and says so.

Decides nothing: openai_form.py reads and writes bodies, the tasks behind Submit turn texts into tensors.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from dormouse.core.types import Bytes
from dormouse.errors import DormouseError, InvalidRequest
from dormouse.gateway import content, kserve, notes, openai_form
from dormouse.gateway.answers import Handler, json_answer, unless_gone
from dormouse.gateway.chunks import last_of
from dormouse.gateway.openai_form import WrongField
from dormouse.submit import Chunk, Description, Inference, Submit
from dormouse.tasks.answers import check_dimensions, shortened
from dormouse.tasks.carriers import LABEL, SCORE, TOKEN_COUNT
from dormouse.tasks.description import Task
from dormouse.tensors import Tensor

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class NotYet(DormouseError):
    """What this server will do one day."""

    status = 501


class V1:
    """The handlers of one server."""

    def __init__(self, submit: Submit, body_limit_bytes: Bytes) -> None:
        self._submit = submit
        self._body_limit_bytes = body_limit_bytes

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Handlers by path and method."""
        return {
            "/v1/models": {"GET": self._models},
            "/v1/models/{name}": {"GET": self._model},
            "/v1/embeddings": {"POST": self._embeddings},
            "/v1/classify": {"POST": self._classify},
            **{path: {"POST": self._generating} for path in GENERATING},
        }

    async def _models(self, _: Request) -> Response:
        described = [self._submit.describe(entry.name) for entry in self._submit.index()]
        return json_answer({"object": "list", "data": [openai_form.model_answer(each) for each in described]})

    async def _model(self, request: Request) -> Response:
        return json_answer(openai_form.model_answer(self._submit.describe(request.path_params["name"])))

    async def _generating(self, _: Request) -> Response:
        raise NotYet("this server does not generate text yet; it serves /v1/embeddings and /v1/classify")

    async def _embeddings(self, request: Request) -> Response:
        body = await content.read_body(request, self._body_limit_bytes)
        asked = openai_form.decoded(openai_form.embeddings_decoder, body)
        task = self._task(asked.model, "embedding", "embeds nothing")
        self._check_dimensions(asked.model, task, asked.dimensions)
        if task.text is None:
            raise WrongField("model", f"the model {asked.model!r} has no tokenizer; call it with tensors over V2")
        chunk = await self._answered(
            request, asked.model, openai_form.texts_of(asked.input), (task.output, TOKEN_COUNT)
        )
        with _about("dimensions"):
            vectors = shortened(task, _floats(chunk, task.output), asked.dimensions)
        answer = openai_form.embeddings_answer(asked.model, vectors, _tokens(chunk), asked.encoding_format)
        return json_answer(answer, headers=_told(chunk))

    async def _classify(self, request: Request) -> Response:
        body = await content.read_body(request, self._body_limit_bytes)
        asked = openai_form.decoded(openai_form.classify_decoder, body)
        task = self._task(asked.model, "classification", "classifies nothing")
        if asked.input is not None and asked.image is None:
            if task.text is None:
                raise WrongField("input", f"the model {asked.model!r} takes no texts")
            carrier = openai_form.texts_of(asked.input)
        elif asked.image is not None and asked.input is None:
            if task.image is None:
                raise WrongField("image", f"the model {asked.model!r} takes no pictures")
            carrier = openai_form.images_of(asked.image)
        else:
            raise WrongField("input", "send either input (texts) or image (pictures)")
        counted = () if asked.input is None else (TOKEN_COUNT,)
        chunk = await self._answered(request, asked.model, carrier, (LABEL, SCORE, *counted), asked.top_k)
        answer = openai_form.classify_answer(asked.model, chunk, _tokens(chunk) if counted else None)
        return json_answer(answer, headers=_told(chunk))

    def _task(self, model: str, kind: str, otherwise: str) -> Task:
        task = self._described(model).task
        if task is None or task.kind != kind:
            raise WrongField(
                "model", f"the model {model!r} {otherwise}: its task is another, or it was deployed as raw"
            )
        return task

    def _check_dimensions(self, model: str, task: Task, wanted: int | None) -> None:
        """Before anything is computed, and billed, if the signature says how long the model's vectors are."""
        outputs = self._described(model).signature.outputs
        have = next((output.shape[-1] for output in outputs if output.name == task.output and output.shape), -1)
        if have > 0:
            with _about("dimensions"):
                check_dimensions(task, have, wanted)

    def _described(self, model: str) -> Description:
        openai_form.check_name(model)
        return self._submit.describe(model)

    async def _answered(
        self, request: Request, model: str, carrier: Tensor, outputs: tuple[str, ...], top_k: int | None = None
    ) -> Chunk:
        slo_ns = kserve.promised_ns(request.headers)
        inference = Inference(model, (carrier,), outputs=outputs, slo_ns=slo_ns, top_k=top_k)
        notes.asks(model)
        async with contextlib.aclosing(self._submit.infer(inference)) as chunks:
            answer = await unless_gone(request.receive, last_of(chunks))
        notes.answered(answer)
        return answer


@contextlib.contextmanager
def _about(field: str) -> Iterator[None]:
    """What is wrong with the request is wrong with this field."""
    try:
        yield
    except InvalidRequest as fault:
        raise WrongField(field, fault.message) from None


def _told(chunk: Chunk) -> dict[str, str]:
    """How the model was found and what the ledger calls the request, where V2 has parameters for them."""
    headers = {"X-Dormouse-Path": str(chunk.path)}
    return {**headers, "X-Dormouse-Request": chunk.request} if chunk.request else headers


def _floats(chunk: Chunk, name: str) -> openai_form.Vectors:
    tensor = next(each for each in chunk.outputs if each.name == name)
    dtype = "<f2" if tensor.datatype == "FP16" else "<f4"
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape).astype(np.float32)


def _tokens(chunk: Chunk) -> int:
    counts = next(each for each in chunk.outputs if each.name == TOKEN_COUNT)
    return int(np.frombuffer(counts.data, "<i8").sum())
