"""The right answers: questions to one variant, answered by PyTorch alone."""

import numpy as np
import torch

from dormouse.demo.examples import Example
from dormouse.demo.realmodel import Direct
from dormouse.demo.v2 import Array, Arrays

QUESTIONS = 4
"""So many are kept for each variant."""


def examples_of(direct: Direct, questions: list[Arrays], device: torch.device, *, is_ranking: bool) -> list[Example]:
    """Ask the model itself. Of a ranking, keep the questions whose best answer stands out most."""
    asked = questions if is_ranking else questions[:QUESTIONS]
    examples = [Example(question, _answered(direct, question, device)) for question in asked]
    if is_ranking:
        examples.sort(key=lambda example: -lead(example.answer))
    return examples[:QUESTIONS]


def _answered(direct: Direct, question: Arrays, device: torch.device) -> Array:
    with torch.inference_mode():
        answer: Array = (
            direct({name: torch.from_numpy(value).to(device) for name, value in question.items()}).cpu().numpy()
        )
    return answer


def lead(scores: Array) -> float:
    """How far the best is ahead of the second, as a share of the largest value."""
    second, best = np.sort(scores, axis=None)[-2:]
    return float((best - second) / np.abs(scores).max())
