"""Whether answers are what they should be."""

import torch
from bench.swap.turns import Bench

from dormouse.executor.runner import Runner
from dormouse.model.outputs import Output

ROUNDING = 0.05
"""How far an answer in low precision may be from the same answer by other kernels, of its size."""


class Checks:
    """Every answer is looked at when it comes and then let go, as a server does.

    ``same``: an answer of a function that has just arrived equals, bit by bit, what the same function answers when it
    is resident. ``close`` and ``equal``: the resident answer against the plain model's; a graph may have been captured
    with other kernels than an ordinary run chooses, so there may be rounding between them.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        expected = bench.expected()
        answers = bench.resident_answers.values()
        self.same = True
        self.close = all(_close(answer, expected) for answer in answers)
        self.equal = all(_equal(answer, expected) for answer in answers)

    def see(self, runner: Runner, answer: dict[str, Output]) -> None:
        self.same = self.same and _equal(answer, self._bench.resident_answers[runner])


def _equal(one: dict[str, Output], other: dict[str, Output]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(_tensor(value), _tensor(other[name])) for name, value in one.items()
    )


def _close(one: dict[str, Output], other: dict[str, Output]) -> bool:
    return one.keys() == other.keys() and all(
        _relative_error(_tensor(value), _tensor(other[name])) <= ROUNDING for name, value in one.items()
    )


def _relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    """In the 2-norm; not a number if one of them is none."""
    return float((one.double() - other.double()).norm()) / float(other.double().norm())


def _tensor(value: Output) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value
