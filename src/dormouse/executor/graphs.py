"""The graphs of one device: forward passes recorded once and replayed, kept within bounds, the least used dropped.

A graph holds for one function and one shape of inputs. It refers to the function's memory by address, and to the
groups of its image by events, both of which stay while chunks come and go: so one graph serves a function that is on
the device and one that is still arriving, and outlives evictions. How a graph is recorded is the recorder's business.

Threads: graphs are recorded, found and replayed by the compute lane; any thread may drop those of a function that is
not running.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from dormouse.core.types import Bytes
from dormouse.executor.shapes import Shape
from dormouse.model.loaded import Inputs

AT_MOST = 1024
"""Each also costs a few megabytes of host memory."""
SHARE_OF_FREE_PERCENT = 25
"""Of the device memory that is free when the first graph is recorded: so much may all of them take."""

Forward = Callable[[dict[str, torch.Tensor]], object]


class NotCaptured(Exception):
    """A forward pass that cannot be a graph; the message completes "it runs eagerly: ..."."""


class Interrupted(Exception):
    """Raised inside a forward pass that is being recorded, because somebody else wants the lane or the memory."""


class Graph(Protocol):
    """One recorded forward pass."""

    last_group: int
    """The last group of the image that it waits for; -1: none. Set by who records."""

    @property
    def names(self) -> Sequence[str]:
        """Of its outputs."""

    def stage(self, inputs: Inputs) -> None:
        """CPU inputs of its shape for the next replay, which must be the next of any graph."""

    def replay(self, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        """One forward pass, to its end; outputs on the CPU, ``wanted`` empty: all. Raises DeviceError."""

    def launch(self) -> None:
        """Queue the graph alone, with the inputs that are staged."""

    def close(self) -> None: ...


class Recorder(Protocol):
    """Makes graphs on one device."""

    def events(self, count: int) -> tuple[int, ...]:
        """Events that graphs can wait for; each is to be queued by the copy lane before a graph that waits for it."""

    def drop_events(self, events: Sequence[int]) -> None: ...

    def hold_back(self, event: int) -> None:
        """Inside ``record``: what follows waits for the event."""

    def record(self, forward: Forward, inputs: Inputs) -> Graph:
        """Record ``forward`` of tensors on the device. Inside the compute lane. Raises NotCaptured, or Interrupted as
        ``forward`` does."""

    def free_bytes(self) -> Bytes:
        """Of device memory, as the driver sees it."""

    def trim(self) -> None:
        """There are no graphs any more: give back what they shared."""


class Graphs:
    """``at_most_bytes`` None: a share of what is free when the first graph is recorded."""

    def __init__(self, recorder: Recorder, at_most: int = AT_MOST, at_most_bytes: Bytes | None = None) -> None:
        self.recorder = recorder
        self.used_bytes: Bytes = 0
        """Measured: how much free device memory went with every recording, less what came back."""
        self._at_most = at_most
        self._at_most_bytes = at_most_bytes
        self._kept: dict[tuple[object, Shape], Graph] = {}
        """The least recently used first."""
        self._changing = threading.Lock()

    def find(self, owner: object, shape: Shape | None) -> Graph | None:
        with self._changing:
            if shape is None or (graph := self._kept.pop((owner, shape), None)) is None:
                return None
            self._kept[owner, shape] = graph
            return graph

    def count(self, owner: object) -> int:
        with self._changing:
            return sum(of is owner for of, _ in self._kept)

    def record(self, owner: object, shape: Shape, forward: Forward, inputs: Inputs) -> Graph:
        """Record and keep. Raises NotCaptured, also if it is too large; Interrupted as ``forward`` does."""
        free_before = self.recorder.free_bytes()
        if self._at_most_bytes is None:
            self._at_most_bytes = free_before * SHARE_OF_FREE_PERCENT // 100
        try:
            graph = self.recorder.record(forward, inputs)
        finally:
            self.used_bytes += free_before - self.recorder.free_bytes()
        with self._changing:
            self._kept[owner, shape] = graph
            while len(self._kept) > self._at_most or (self.used_bytes > self._at_most_bytes and len(self._kept) > 1):
                self._drop(next(iter(self._kept)))
        if self.used_bytes > self._at_most_bytes:
            taken = self.used_bytes
            self.drop(owner)
            raise NotCaptured(f"its graph takes {taken} bytes of device memory, of {self._at_most_bytes} for graphs")
        return graph

    def drop(self, owner: object) -> None:
        """Every graph of a function."""
        with self._changing:
            for key in [key for key in self._kept if key[0] is owner]:
                self._drop(key)

    def _drop(self, key: tuple[object, Shape]) -> None:
        free_before = self.recorder.free_bytes()
        self._kept.pop(key).close()
        self.used_bytes -= self.recorder.free_bytes() - free_before
        if not self._kept:
            self.recorder.trim()
            self.used_bytes = 0
