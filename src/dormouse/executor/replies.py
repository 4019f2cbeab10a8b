"""The executor's side of the reply slab: answers wait there until the control side has read them."""

import threading

from dormouse.core.types import Bytes, round_up
from dormouse.errors import TooLarge
from dormouse.executor.payload import encoded
from dormouse.model.outputs import Output
from dormouse.slab import ALIGNMENT_BYTES, Slab
from dormouse.wire import TensorRef


class Replies:
    """``place`` is called by the compute lane, ``read`` by the loop that receives."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._changed = threading.Condition()
        self._blocks: dict[Bytes, Bytes] = {}
        """By offset of an unread tensor: the offset of its block."""
        self._unread: dict[Bytes, int] = {}
        """By offset of a block: how many of its tensors have not been read."""

    def place(self, outputs: dict[str, Output]) -> tuple[TensorRef, ...]:
        """Copy an answer into the slab, waiting for room. Raises TooLarge if there can never be enough."""
        parts = [(name, *encoded(output)) for name, output in outputs.items()]
        if not parts:
            return ()
        # One block for all: two answers that each hold a part and wait for the rest would wait for ever.
        rooms = [round_up(max(len(data), 1), ALIGNMENT_BYTES) for *_, data in parts]
        offset = self._allocated(sum(rooms), len(parts))
        refs = []
        for (name, datatype, shape, data), room in zip(parts, rooms, strict=True):
            with self._slab.view(offset, len(data)) as view:
                view[:] = data
            refs.append(TensorRef(name, datatype, shape, offset, len(data)))
            offset += room
        with self._changed:
            for ref in refs:
                self._blocks[ref.offset] = refs[0].offset
        return tuple(refs)

    def read(self, offsets: tuple[Bytes, ...]) -> None:
        """The control side has read these tensors; a block is free when all of it has been read."""
        with self._changed:
            for offset in offsets:
                block = self._blocks.pop(offset)
                self._unread[block] -= 1
                if self._unread[block] == 0:
                    del self._unread[block]
                    self._slab.free(block)
            self._changed.notify_all()

    def _allocated(self, size_bytes: Bytes, tensors: int) -> Bytes:
        if size_bytes > self._slab.size_bytes:
            raise TooLarge(
                f"the answer has {size_bytes} bytes, the reply slab {self._slab.size_bytes}; start with a larger "
                "--reply-slab-bytes, or ask for fewer outputs"
            )
        with self._changed:
            while (offset := self._slab.allocate(size_bytes)) is None:
                self._changed.wait()
            self._unread[offset] = tensors
            return offset
