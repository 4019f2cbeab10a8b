"""Whether an answer is the one that the model itself gives.

Shapes and types must be equal. Values may differ by a share of the largest value of the reference: what rounding can
make of another order of summation, and far below what separates two variants. Of scores that rank something, the best
must be the same one.
"""

import numpy as np

from dormouse.demo.fleet import Model
from dormouse.demo.v2 import Array


def difference(answer: Array, reference: Array, model: Model) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if answer.dtype != reference.dtype:
        return f"datatype is {answer.dtype}, expected {reference.dtype}"
    if answer.shape != reference.shape:
        return f"shape is {list(answer.shape)}, expected {list(reference.shape)}"
    if not np.isfinite(answer).all():
        return f"{int((~np.isfinite(answer)).sum())} values are not finite"
    error, allowed = deviation(answer, reference), model.relative_tolerance
    if error > allowed:
        return f"values are off by {error:.2g} of the largest, allowed is {allowed:.2g}"
    if model.is_ranking and (answer.argmax(axis=-1) != reference.argmax(axis=-1)).any():
        return f"the best is number {answer.argmax(axis=-1)}, expected {reference.argmax(axis=-1)}"
    return None


def deviation(answer: Array, reference: Array) -> float:
    """The largest difference of two arrays of one shape, as a share of the reference's largest value."""
    largest = float(np.abs(reference).max())
    return float(np.abs(answer.astype(np.float64) - reference).max()) / (largest or 1.0)
