"""A recorder of graphs for machines without a GPU: what it records is the answer, and a replay gives it again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dormouse.core.types import Bytes
from dormouse.errors import DeviceError
from dormouse.executor.graphs import Forward
from dormouse.model.loaded import Inputs
from dormouse.model.outputs import named_outputs

PLENTY: Bytes = 1000


@dataclass(eq=False)
class Recording:
    """The answer to the inputs that it was made with."""

    recorder: "CpuRecorder"
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    takes_bytes: Bytes
    last_group: int = -1

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.outputs)

    def stage(self, inputs: Inputs) -> None:
        assert all(torch.equal(self.inputs[name], tensor) for name, tensor in tensors_of(inputs).items())

    def replay(self, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        if self.recorder.launches_fail:
            raise DeviceError("launch", "INJECTED")
        self.recorder.replays += 1
        return {name: self.outputs[name] + self.recorder.error for name in wanted or self.names}

    def launch(self) -> None:
        self.recorder.replays += 1

    def close(self) -> None:
        self.recorder.free += self.takes_bytes


@dataclass
class CpuRecorder:
    """Every graph takes ``takes_bytes`` of ``free``."""

    free: Bytes = PLENTY
    takes_bytes: Bytes = 10
    error: float = 0.0
    launches_fail: bool = False
    replays: int = 0
    trims: int = 0
    waits: list[int] = field(default_factory=list)

    def events(self, count: int) -> tuple[int, ...]:
        return (0,) * count  # the CPU's copy lane marks nothing

    def drop_events(self, events: Sequence[int]) -> None:
        assert not any(events)

    def hold_back(self, event: int) -> None:
        self.waits.append(event)

    def record(self, forward: Forward, inputs: Inputs) -> Recording:
        with torch.inference_mode():
            outputs = named_outputs(forward(tensors_of(inputs)))
        self.free -= self.takes_bytes
        return Recording(self, tensors_of(inputs), tensors_of(outputs), self.takes_bytes)

    def free_bytes(self) -> Bytes:
        return self.free

    def trim(self) -> None:
        self.trims += 1


def tensors_of(values: Mapping[str, object]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
