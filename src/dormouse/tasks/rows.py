"""Many texts or pictures as a few requests of alike rows, and the requests' answers as one again.

Lengths are filled up to one of few, and numbers of rows are powers of two, so that few shapes, and few graphs, come up.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from dormouse.core.types import Bytes
from dormouse.errors import InvalidRequest
from dormouse.tasks.description import ImageInput, TextInput
from dormouse.tasks.images import Pixels
from dormouse.tensors import Signature, Tensor, TensorSpec

LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
MOST_ROWS = 32
MOST_TOKENS = 1024
"""Of one request, filling included."""
MOST_PICTURES = 8
MOST_PART_BYTES: Bytes = 16 * 1024 * 1024
"""Of the pictures of one request; a larger one goes alone."""
DTYPES: dict[str, np.dtype[Any]] = {"INT32": np.dtype("<i4"), "INT64": np.dtype("<i8")}
FLOATS: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP16": np.dtype("<f2")}

Values = npt.NDArray[np.generic]


class Part(Struct, frozen=True):
    """One request, and whose rows it carries."""

    places: tuple[int, ...]
    inputs: tuple[Tensor, ...]


def of_tokens(text: TextInput, signature: Signature, rows: Sequence[Sequence[int]]) -> Iterator[Part]:
    """Requests for rows of token ids, alike lengths together."""
    specs = {spec.name: spec for spec in signature.inputs}
    limit = specs["input_ids"].shape[0]
    by_length: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        by_length.setdefault(_filled_length(text, specs, len(row)), []).append(place)
    for length, places in by_length.items():
        most = max(1, min(MOST_ROWS, MOST_TOKENS // length))
        for some in in_powers(places, most if limit == -1 else limit):
            yield Part(some, _token_tensors(text, specs, [rows[place] for place in some], length))


def of_pictures(image: ImageInput, signature: Signature, pictures: Sequence[Pixels]) -> Iterator[Part]:
    """Requests for pictures."""
    (spec,) = (spec for spec in signature.inputs if spec.name == image.name)
    most = max(1, min(MOST_PICTURES, MOST_PART_BYTES // bytes_of(image)))
    for some in in_powers(range(len(pictures)), most if spec.shape[0] == -1 else spec.shape[0]):
        stacked = np.stack([pictures[place] for place in some]).astype(FLOATS[spec.datatype])
        yield Part(some, (_tensor(spec, stacked),))


def bytes_of(image: ImageInput) -> Bytes:
    """What one picture takes as a tensor."""
    return 3 * 4 * image.height * image.width


def in_powers(places: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """In order, as many as possible together and always a power of two of them."""
    start = 0
    while start < len(places):
        count = 1 << (min(most, len(places) - start).bit_length() - 1)
        yield tuple(places[start : start + count])
        start += count


def joined(count: int, parts: Sequence[tuple[Part, Tensor]], dtype: npt.DTypeLike) -> Values:
    """The rows of all answers, in the order of what was asked. Raises InvalidRequest where an answer has no rows."""
    whole: Values | None = None
    for part, tensor in parts:
        if tensor.shape[:1] != (len(part.places),):
            raise InvalidRequest(f"output {tensor.name!r} has the shape {list(tensor.shape)}, no row for every input")
        values = np.frombuffer(tensor.data, dtype).reshape(tensor.shape)
        if whole is None:
            whole = np.empty((count, *tensor.shape[1:]), values.dtype)
        if values.shape[1:] != whole.shape[1:]:
            raise InvalidRequest(f"output {tensor.name!r} differs in shape by length; ask for one text at a time")
        whole[list(part.places)] = values
    assert whole is not None, "no parts"
    return whole


def _filled_length(text: TextInput, specs: dict[str, TensorSpec], length: int) -> int:
    fixed = specs["input_ids"].shape[1]
    if fixed != -1:
        if length > fixed:
            raise InvalidRequest(f"a text has {length} tokens, the function takes {fixed}")
        return fixed
    if "attention_mask" not in specs:
        return length  # nothing would tell the model what is filling
    return min(next((each for each in LENGTHS if each >= length), length), max(length, text.max_tokens))


def _token_tensors(
    text: TextInput, specs: dict[str, TensorSpec], rows: Sequence[Sequence[int]], length: int
) -> tuple[Tensor, ...]:
    ids = np.full((len(rows), length), text.pad_id, np.int64)
    mask = np.zeros((len(rows), length), np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    given = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in specs and not specs["token_type_ids"].optional:
        given["token_type_ids"] = np.zeros_like(ids)
    return tuple(
        _tensor(spec, given[name].astype(DTYPES[spec.datatype])) for name, spec in specs.items() if name in given
    )


def _tensor(spec: TensorSpec, values: Values) -> Tensor:
    return Tensor(spec.name, spec.datatype, values.shape, values.tobytes())
