"""Memory by address, as torch on a GPU takes it: views that own nothing; and memory that was freed."""

import ctypes

import torch

from dormouse.core.types import Bytes


def memory_at(address: int, size_bytes: Bytes, device: torch.device) -> torch.Tensor:
    """Bytes that somebody else keeps alive. The first of them must be mapped: torch asks the driver whose they are."""
    return torch.as_tensor(_Raw(address, size_bytes), device=device)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Of glibc; None on systems whose allocator gives memory back by itself."""


def give_back_freed_memory() -> None:
    """To the system. Tensors of less than 32 MiB leave holes in the heap that only this returns."""
    if _trim is not None:
        _trim(0)


class _Raw:
    def __init__(self, address: int, size_bytes: Bytes) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
