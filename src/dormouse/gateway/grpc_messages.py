"""The protobuf messages and services of ``inference.proto`` and ``health.proto``, made when the program starts.

They live in a pool of their own: generated modules would all share one pool, in which the protocol's names may be
defined only once in a process, whoever else brings them along (V2 client libraries do, each its own).
"""

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import msgspec
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from dormouse.errors import InvalidRequest

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"

Message = Any
"""A protobuf message. Its fields are found at run time, so no type checker knows them."""


class Method(msgspec.Struct, frozen=True):
    """One call of a service."""

    name: str
    request: Message
    """The class of its requests."""
    response: Message
    streams: bool


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    described = files("dormouse.gateway").joinpath("protocol.binpb").read_bytes()
    for file in FileDescriptorSet.FromString(described).file:
        pool.Add(file)
    return pool


_POOL = _pool()


def message(name: str, service: str = INFERENCE) -> Message:
    """The class of a message of a service's package."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{service.rpartition('.')[0]}.{name}"))


def methods(service: str) -> Iterator[Method]:
    """The calls of a service."""
    for method in _POOL.FindServiceByName(service).methods:
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        yield Method(method.name, request, response, method.client_streaming)


def decoded(kind: Message, wire: bytes) -> Message:
    """A message from its bytes. Raises InvalidRequest."""
    try:
        return kind.FromString(wire)
    except DecodeError:
        raise InvalidRequest(f"the message is no valid {kind.DESCRIPTOR.full_name}") from None
