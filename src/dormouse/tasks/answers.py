"""What a model says, as an answer for people: embeddings of a wanted length, labels with scores."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from dormouse.errors import InvalidRequest
from dormouse.tasks.description import Scoring, Task

Array = npt.NDArray[np.float32]


class Ranked(Struct, frozen=True):
    """Of every row the classes that are most likely, the likeliest first."""

    labels: list[list[str]]
    scores: Array


def ranked(task: Task, logits: Array, most: int) -> Ranked:
    """So many labels with their scores for every row of logits."""
    scores = scored(task.scoring, logits.reshape(len(logits), -1))
    # Stable, so that equal scores come in order of their classes.
    order = np.argsort(-scores, axis=1, kind="stable")[:, :most]
    labels = [[label(task, int(number)) for number in row] for row in order]
    return Ranked(labels, np.take_along_axis(scores, order, axis=1))


def label(task: Task, number: int) -> str:
    """What a class is called: its number, if nothing else."""
    return task.labels[number] if number < len(task.labels) else str(number)


def scored(scoring: Scoring, logits: Array) -> Array:
    if scoring == "softmax":
        raised = np.exp(logits - logits.max(axis=1, keepdims=True))
        softened: Array = raised / raised.sum(axis=1, keepdims=True)
        return softened
    if scoring == "sigmoid":
        with np.errstate(over="ignore"):  # to infinity, and its inverse is the 0 that is meant
            return (1 / (1 + np.exp(-logits))).astype(np.float32)
    return logits


def check_dimensions(task: Task, have: int, dimensions: int | None) -> None:
    """Raises InvalidRequest where embeddings of ``have`` numbers cannot be of the wanted length."""
    if dimensions is None or dimensions == have:
        return
    allowed = task.dimensions
    if allowed is None or dimensions > have or (allowed and dimensions not in allowed):
        raise InvalidRequest(f"dimensions is {dimensions}, {_possible(allowed, have)}")


def shortened(task: Task, vectors: Array, dimensions: int | None) -> Array:
    """Embeddings of the wanted length, again of length one. Raises InvalidRequest where the model is not made so."""
    have = vectors.shape[1]
    check_dimensions(task, have, dimensions)
    if dimensions is None or dimensions == have:
        return vectors
    cut = vectors[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    whole: Array = cut / np.maximum(lengths, np.float32(1e-12))
    return whole


def _possible(allowed: Sequence[int] | None, have: int) -> str:
    if allowed is None:
        return f"the model's embeddings have {have} and are not made to be cut"
    return f"the model's embeddings can have {', '.join(map(str, allowed)) if allowed else f'1 to {have}'}"
