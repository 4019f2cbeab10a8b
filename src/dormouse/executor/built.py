"""What an executor keeps of one function after its first load: its place on the device, and what it has been asked.

The module is not among it: functions of one architecture share that (``skeletons``), and it is bound to the memory of
whoever runs. Knows no lanes and no copies.
"""

import torch

from dormouse.core.types import Bytes
from dormouse.device.base import Region
from dormouse.executor.shapes import Shapes
from dormouse.store.index import ImageIndex


class Built:
    """One function on one device. ``memory`` is its whole region as bytes."""

    def __init__(self, index: ImageIndex, region: Region, memory: torch.Tensor, group_bytes: Bytes) -> None:
        self.image_bytes = index.image_bytes
        self.weight_bytes = index.weight_bytes
        self.state_bytes = index.state_bytes
        self.region = region
        self.storage = memory.untyped_storage()
        self.groups = -(-index.image_bytes // group_bytes)
        self.events: tuple[int, ...] = (0,) * self.groups
        """By group: the event that its copies are marked with. 0 where nobody needs to know which."""
        self.shapes = Shapes("a forward pass changes its state" if index.state_bytes else "")
