"""Which requests are alike enough to be run together, and whose rows are whose in the answer."""

from collections.abc import Sequence

from dormouse.submit import Inference
from dormouse.tensors import Tensor
from dormouse.wire import TensorRef


def likeness(inference: Inference) -> tuple[int, str]:
    """A request's rows, and a word that is the same for all it may be run with; empty: for none.

    Alike are requests for the same outputs, with inputs of the same names, datatypes and shapes but for their first
    dimension, which all inputs of a request share: its rows.
    """
    first = next(iter(inference.inputs), None)
    rows = first.shape[0] if first is not None and first.shape else 0
    for tensor in inference.inputs:
        if tensor.datatype == "BYTES" or not tensor.shape or tensor.shape[0] != rows:
            return 1, ""
    if not rows:
        return 1, ""
    inputs = sorted((tensor.name, tensor.datatype, tuple(tensor.shape[1:])) for tensor in inference.inputs)
    return rows, repr((inputs, inference.outputs))


def parted(ref: TensorRef, memory: memoryview, rows: Sequence[int]) -> list[Tensor]:
    """One output of a batch as one tensor for each request, in memory of its own."""
    total, parts, done = ref.shape[0], [], 0
    assert sum(rows) == total, f"{ref.name} has {total} rows for {rows}"
    for count in rows:
        begin, done = ref.size_bytes * done // total, done + count
        data = bytes(memory[begin : ref.size_bytes * done // total])
        parts.append(Tensor(ref.name, ref.datatype, (count, *ref.shape[1:]), data))
    return parts
