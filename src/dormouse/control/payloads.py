"""Request tensors in shared memory, and who waits for the answer.

The core knows a request by its number; what it carries and whom it belongs to is kept here, from its arrival until
no executor can read its tensors any more, which may be later than its answer.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dormouse.core.messages import Reply
from dormouse.core.types import Bytes, FunctionId, Ns, RequestId
from dormouse.errors import DormouseError, TooLarge, Unavailable
from dormouse.slab import Slab
from dormouse.submit import Inference
from dormouse.tensors import Tensor
from dormouse.wire import TensorRef

RETRY_AFTER_S = 1.0

Outputs: TypeAlias = Mapping[RequestId, tuple[Tensor, ...]]
"""The tensors that came with an event, by the request they answer."""


@dataclass(slots=True)
class Answer:
    """What the core said of one chunk, with its tensors."""

    reply: Reply
    outputs: tuple[Tensor, ...]


@dataclass(slots=True)
class Payload:
    """One request's tensors and the queue its caller reads from."""

    function: FunctionId
    inputs: tuple[TensorRef, ...]
    outputs: tuple[str, ...]
    offsets: tuple[Bytes, ...]
    tenant: str = ""
    began_ns: Ns = 0
    """When it came to the server."""
    entered: bool = False
    """Its entry in the ledger has been made; there is never a second one."""
    answers: "asyncio.Queue[Answer | DormouseError]" = field(default_factory=asyncio.Queue)


class Payloads:
    """The request slab and the open requests."""

    def __init__(self, slab_bytes: Bytes) -> None:
        self.slab = Slab.create(slab_bytes)
        self._open: dict[RequestId, Payload] = {}
        self._next = 1

    def accept(self, function: FunctionId, inference: Inference, began_ns: Ns = 0) -> RequestId:
        """Copy a request's tensors into shared memory. Raises TooLarge or, when others fill the slab, Unavailable."""
        offsets = self._place(inference.inputs)
        inputs = tuple(
            TensorRef(t.name, t.datatype, t.shape, offset, len(t.data))
            for t, offset in zip(inference.inputs, offsets, strict=True)
        )
        request = RequestId(self._next)
        self._next += 1
        self._open[request] = Payload(function, inputs, inference.outputs, offsets, inference.tenant, began_ns)
        return request

    def _place(self, tensors: Sequence[Tensor]) -> tuple[Bytes, ...]:
        total = sum(len(tensor.data) for tensor in tensors)
        if total > self.slab.size_bytes:
            limit = self.slab.size_bytes
            raise TooLarge(f"the input tensors have {total} bytes; request_slab_bytes = {limit} is the most")
        offsets: list[Bytes] = []
        for tensor in tensors:
            offset = self.slab.allocate(len(tensor.data))
            if offset is None:
                self._free(offsets)
                message = f"no room for {total} bytes of input tensors: other requests hold the request slab"
                raise Unavailable(message, retry_after_s=RETRY_AFTER_S)
            offsets.append(offset)
            with self.slab.view(offset, len(tensor.data)) as memory:
                memory[:] = tensor.data
        return tuple(offsets)

    def _free(self, offsets: Sequence[Bytes]) -> None:
        for offset in offsets:
            self.slab.free(offset)

    def __getitem__(self, request: RequestId) -> Payload:
        return self._open[request]

    def get(self, request: RequestId) -> Payload | None:
        return self._open.get(request)

    def open_requests(self) -> tuple[RequestId, ...]:
        return tuple(self._open)

    def release(self, request: RequestId) -> None:
        """No executor reads the request's tensors any more."""
        payload = self._open.pop(request, None)
        if payload is not None:
            self._free(payload.offsets)

    def close(self) -> None:
        self.slab.close()
