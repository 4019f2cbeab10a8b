"""What a function is sent: requests written out beforehand, from what the server says of it, or from a file. Pure."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec
import numpy as np
from msgspec import Struct

from dormouse.errors import ConfigurationFault
from dormouse.load.connection import Address

Protocol = Literal["v2", "openai"]
VARIANTS = 16
"""Different requests of a function, sent in turn."""
DTYPES = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BOOL": "?"}
DTYPES |= {f"INT{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)}
DTYPES |= {f"UINT{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)}
WORDS = ("the", "dormouse", "sleeps", "all", "winter", "long", "and", "eats", "nuts", "when", "days", "are", "warm")
CARRIERS = ("tokens", "image")
"""Other ways to send what ``text``, or tensors, say as well."""


class Sizes(Struct, frozen=True):
    """What free dimensions become: the first one, and the others; and the words of a text."""

    rows: int = 1
    free: int = 16
    words: int = 8


class Target(Struct, frozen=True):
    """A function: its requests, and its SLO."""

    name: str
    requests: Sequence[bytes]
    deadline_ms: float
    percentile: float


def of_metadata(
    metadata: Mapping[str, Any], protocol: Protocol, sizes: Sizes, seed: int
) -> list[tuple[bytes, dict[str, str]]]:
    """Bodies with their headers, the same for the same seed. Raises ConfigurationFault."""
    draw = random.Random(f"{seed} {metadata['name']}")
    if protocol == "openai":
        texts = [_text(draw, sizes.words) for _ in range(VARIANTS)]
        return [(msgspec.json.encode({"model": metadata["name"], "input": text}), {}) for text in texts]
    inputs = _chosen(metadata["inputs"])
    return [_v2(inputs, sizes, draw) for _ in range(VARIANTS)]


def _chosen(inputs: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Texts where a function takes them; then they stand for all tensors."""
    names = {spec["name"] for spec in inputs}
    if {"text", "tokens"} <= names:
        return [spec for spec in inputs if spec["name"] == "text"]
    return [spec for spec in inputs if spec["name"] not in CARRIERS or spec["datatype"] != "BYTES"]


def _v2(inputs: Sequence[Mapping[str, Any]], sizes: Sizes, draw: random.Random) -> tuple[bytes, dict[str, str]]:
    described, tails = [], []
    for spec in inputs:
        shape = [_size(place, size, sizes) for place, size in enumerate(spec["shape"])]
        tensor = {"name": spec["name"], "datatype": spec["datatype"], "shape": shape}
        count = int(np.prod(shape))
        if spec["datatype"] == "BYTES":
            described.append(tensor | {"data": [_text(draw, sizes.words) for _ in range(count)]})
            continue
        raw = _elements(spec["name"], spec["datatype"], count, draw)
        described.append(tensor | {"parameters": {"binary_data_size": len(raw)}})
        tails.append(raw)
    head = msgspec.json.encode({"inputs": described, "parameters": {"binary_data_output": True}})
    return b"".join((head, *tails)), {"Inference-Header-Content-Length": str(len(head))}


def _size(place: int, size: int, sizes: Sizes) -> int:
    return size if size != -1 else (sizes.rows if place == 0 else sizes.free)


def _elements(name: str, datatype: str, count: int, draw: random.Random) -> bytes:
    """Numbers that models survive: masks of ones, types of zeros, small ids, and noise."""
    numbers = np.random.default_rng(draw.getrandbits(63))
    if datatype == "BF16":
        return (numbers.standard_normal(count).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    dtype = np.dtype(DTYPES[datatype])
    if dtype.kind == "f":
        return numbers.standard_normal(count).astype(dtype).tobytes()
    if dtype.kind == "b" or "mask" in name:
        return np.ones(count, dtype).tobytes()
    return (np.zeros(count, dtype) if "type" in name else numbers.integers(1, 90, count)).astype(dtype).tobytes()


def _text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def of_file(file: Path) -> list[tuple[bytes, dict[str, str]]]:
    """A body in JSON, or a list of them. Raises ConfigurationFault."""
    try:
        given = msgspec.json.decode(file.read_bytes())
    except OSError as fault:
        raise ConfigurationFault(f"--input {file} cannot be read: {fault.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as fault:
        raise ConfigurationFault(f"--input {file} is no JSON: {fault}") from None
    bodies = given if isinstance(given, list) else [given]
    if not bodies or not all(isinstance(body, dict) for body in bodies):
        raise ConfigurationFault(f"--input {file} is no request and no list of requests")
    return [(msgspec.json.encode(body), {}) for body in bodies]


def path_of(protocol: Protocol, name: str) -> str:
    return "/v1/embeddings" if protocol == "openai" else f"/v2/models/{quote(name, safe='')}/infer"


def written(
    address: Address, path: str, key: str | None, body: bytes = b"", more: Mapping[str, str] | None = None
) -> bytes:
    """A request as it goes over the wire; without a body it is a GET."""
    headers = {"Host": address.authority, "Content-Length": str(len(body)), **(more or {})}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    if body:
        headers["Content-Type"] = "application/json"
    lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body
