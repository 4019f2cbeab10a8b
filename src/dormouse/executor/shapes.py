"""What one function has been asked: which shapes of input, and whether a graph of them is worth having.

The first run of a shape is an ordinary one. It is kept as a sample, from which a graph is captured when there is time.
Knows nothing of devices and of how a graph is made.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from dormouse.model.loaded import Inputs
from dormouse.model.outputs import Output

Shape: TypeAlias = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Name, size and type of every input: what a graph is made for, to the letter."""

SAMPLES = 4
"""So many shapes of a function wait for a graph at once; of more, the oldest is forgotten."""
PATIENCE_RUNS = 16
"""After so many ordinary runs of a shape its graph is captured though others wait: on a device that is never idle,
the runs that are saved are worth more than the wait."""


def shape_of(inputs: Inputs) -> Shape | None:
    """None: there is text among the inputs."""
    parts = [
        (name, tuple(value.shape), value.dtype) for name, value in inputs.items() if isinstance(value, torch.Tensor)
    ]
    return tuple(sorted(parts, key=lambda part: part[0])) if len(parts) == len(inputs) else None


@dataclass(eq=False)
class Sample:
    """Inputs of a shape and the module's own answer to them."""

    shape: Shape
    inputs: Inputs
    answer: dict[str, torch.Tensor]
    runs: int = 1


class Shapes:
    """``refusal``: why every run of this function is an ordinary one; empty while graphs are possible."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self._samples: dict[Shape, Sample] = {}

    @property
    def wanted(self) -> Sample | None:
        """The sample to capture next."""
        return next(iter(self._samples.values()), None)

    @property
    def overdue(self) -> bool:
        """Whether it should be captured now, although others wait."""
        return any(sample.runs >= PATIENCE_RUNS for sample in self._samples.values())

    def ran(self, inputs: Inputs, answer: dict[str, Output]) -> None:
        """An ordinary run has ended. Inputs and answer are on the CPU and are not changed by anybody."""
        if self.refusal:
            return
        shape = shape_of(inputs)
        if shape is None:
            self.refuse("text goes in")
        elif known := self._samples.get(shape):
            known.runs += 1
        else:
            tensors = {name: value for name, value in answer.items() if isinstance(value, torch.Tensor)}
            if len(tensors) < len(answer):
                self.refuse("text comes out")
                return
            self._samples[shape] = Sample(shape, inputs, tensors)
            if len(self._samples) > SAMPLES:
                del self._samples[next(iter(self._samples))]

    def done(self, sample: Sample) -> None:
        """It is not wanted any more, until its shape is run eagerly again."""
        self._samples.pop(sample.shape, None)

    def refuse(self, why: str) -> None:
        """No more graphs of this function."""
        self.refusal = why
        self._samples.clear()
