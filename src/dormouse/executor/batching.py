"""Several requests as one: inputs laid one behind the other along the first dimension, the answer cut to its rows.

Whole batches only: whose rows are whose is for the control side to know, since a request's rows are neighbours.
"""

from collections.abc import Sequence

import torch

from dormouse.errors import DormouseError, InvalidRequest
from dormouse.model.datatypes import TORCH_DTYPES, bytes_of
from dormouse.model.loaded import Inputs
from dormouse.model.outputs import Output
from dormouse.slab import Slab
from dormouse.wire import TensorRef


class Unbatchable(DormouseError):
    """Requests cannot be run together, though each alone may be fine."""


def rows_of(parts: Sequence[tuple[TensorRef, ...]]) -> tuple[int, ...]:
    """The first dimension of each request's inputs."""
    return tuple(refs[0].shape[0] for refs in parts)


def joined(parts: Sequence[tuple[TensorRef, ...]], padded_rows: int, slab: Slab) -> Inputs:
    """The inputs of all requests, from the slab into one tensor each; the last row is repeated up to ``padded_rows``.

    The requests must be alike: same names, datatypes and shapes behind the first dimension. Raises InvalidRequest.
    """
    by_name = [{ref.name: ref for ref in refs} for refs in parts]
    return {ref.name: _joined([refs[ref.name] for refs in by_name], padded_rows, slab) for ref in parts[0]}


def _joined(refs: Sequence[TensorRef], padded_rows: int, slab: Slab) -> torch.Tensor:
    dtype = TORCH_DTYPES.get(refs[0].datatype)
    if dtype is None:
        raise InvalidRequest(f"{refs[0].datatype} is no datatype of a tensor")
    whole = torch.empty((padded_rows, *refs[0].shape[1:]), dtype=dtype)
    memory, rows, row_bytes = bytes_of(whole), 0, whole.nbytes // padded_rows
    for ref in refs:
        begin, rows = rows * row_bytes, rows + ref.shape[0]
        if ref.size_bytes != rows * row_bytes - begin:
            raise InvalidRequest(f"{ref.size_bytes} bytes are no {ref.datatype} tensor of shape {list(ref.shape)}")
        with slab.view(ref.offset, ref.size_bytes) as data:
            memory[begin : begin + ref.size_bytes] = data
    whole[rows:] = whole[rows - 1]
    return whole


def cut(answer: dict[str, Output], rows: int, padded_rows: int) -> dict[str, Output]:
    """The answer without the rows that were filled up. Raises Unbatchable if it does not have a row for each row."""
    whole: dict[str, Output] = {}
    for name, value in answer.items():
        if not isinstance(value, torch.Tensor):
            raise Unbatchable(f"its output {name!r} is text")
        if value.ndim == 0 or value.shape[0] != padded_rows:
            raise Unbatchable(f"its output {name!r} has shape {list(value.shape)} for {padded_rows} rows of input")
        whole[name] = value[:rows]
    return whole


def no_chunks(_: dict[str, Output]) -> bool:
    """Where chunks go that a batch cannot have."""
    raise Unbatchable("it streams its answer")
