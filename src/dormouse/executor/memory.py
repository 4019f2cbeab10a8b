"""Memory by address, as torch on a GPU takes it: views that own nothing."""

import torch

from dormouse.core.types import Bytes


def memory_at(address: int, size_bytes: Bytes, device: torch.device) -> torch.Tensor:
    """Bytes that somebody else keeps alive. The first of them must be mapped: torch asks the driver whose they are."""
    return torch.as_tensor(_Raw(address, size_bytes), device=device)


class _Raw:
    def __init__(self, address: int, size_bytes: Bytes) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
