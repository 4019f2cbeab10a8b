"""A plain gRPC client of our own messages: it can say anything, also what no V2 client would."""

from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from dormouse.gateway.grpc_messages import HEALTH, INFERENCE, Method, message, methods

METHODS: dict[str, Method] = {
    f"/{service}/{method.name}": method for service in (INFERENCE, HEALTH) for method in methods(service)
}
InferRequest = message("ModelInferRequest")
LIMIT_S = 30.0


class Refused(Exception):
    """A call that ended with another status than OK."""

    def __init__(self, fault: Any) -> None:
        super().__init__(f"{fault.code().name}: {fault.details()}")
        self.status: str = fault.code().name
        self.text: str = fault.details()
        trailing = dict(fault.trailing_metadata() or ())
        self.id = trailing.pop("x-request-id", "")
        """Of the request."""
        self.trailing = trailing


class Caller:
    """Calls to one server; use it as a context."""

    def __init__(self, address: str, metadata: Iterable[tuple[str, str]] = ()) -> None:
        self._always = {"metadata": tuple(metadata)}
        # Each its own connection, as grpc would share one.
        self._channel = grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),))

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def send(self, path: str, wire: bytes, **options: Any) -> bytes:
        """Bytes there and back. Raises Refused."""
        try:
            answer: bytes = self._channel.unary_unary(path)(wire, **{"timeout": LIMIT_S} | self._always | options)
        except grpc.RpcError as fault:
            raise Refused(fault) from None
        return answer

    def ask(self, method: str, **fields: Any) -> Any:
        """A call of the inference service (or of health, by its whole path) with these fields."""
        path = method if method.startswith("/") else f"/{INFERENCE}/{method}"
        found = METHODS[path]
        return found.response.FromString(self.send(path, found.request(**fields).SerializeToString()))

    def infer(self, request: Any, **options: Any) -> Any:
        wire = self.send(f"/{INFERENCE}/ModelInfer", request.SerializeToString(), **options)
        return message("ModelInferResponse").FromString(wire)

    def begin(self, request: Any, **options: Any) -> Any:
        """An inference that is not waited for."""
        call = self._channel.unary_unary(f"/{INFERENCE}/ModelInfer")
        return call.future(request.SerializeToString(), **self._always | options)

    def open_stream(self, wires: Iterable[bytes]) -> Any:
        """A stream whose answers nobody asks for yet."""
        return self._channel.stream_stream(f"/{INFERENCE}/ModelStreamInfer")(iter(wires), **self._always)

    def stream(self, wires: Iterable[bytes], **options: Any) -> Iterator[Any]:
        """What a stream of requests is answered. Raises Refused."""
        call = self._channel.stream_stream(f"/{INFERENCE}/ModelStreamInfer")
        try:
            for wire in call(iter(wires), **{"timeout": LIMIT_S} | self._always | options):
                yield message("ModelStreamInferResponse").FromString(wire)
        except grpc.RpcError as fault:
            raise Refused(fault) from None


def raw_request(model: str, datatype: str, values: npt.NDArray[Any], **fields: Any) -> Any:
    """One input ``x`` as raw bytes."""
    request = InferRequest(model_name=model, **fields)
    request.inputs.add(name="x", datatype=datatype, shape=values.shape)
    request.raw_input_contents.append(values.tobytes())
    return request


def typed_request(model: str, datatype: str, shape: Iterable[int], field: str, values: Any, **fields: Any) -> Any:
    """One input ``x`` as typed contents."""
    request = InferRequest(model_name=model, **fields)
    given = request.inputs.add(name="x", datatype=datatype, shape=shape)
    getattr(given.contents, field).extend(values)
    return request


def total_request(count: int, **fields: Any) -> Any:
    """A model that answers in ``count`` chunks."""
    return raw_request("running_total", "INT64", np.arange(1, count + 1), **fields)
