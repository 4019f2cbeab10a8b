"""V2 datatypes and torch dtypes: one table, read in both directions."""

import torch

from dormouse.errors import RefusedSource

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
_DATATYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def datatype_of(dtype: torch.dtype) -> str:
    """The V2 datatype of a torch dtype. Raises RefusedSource for one that V2 cannot say."""
    if dtype not in _DATATYPES:
        raise RefusedSource(f"a tensor of {dtype} cannot be sent in V2; return one of {', '.join(TORCH_DTYPES)}")
    return _DATATYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """As torch names it, without the module: ``float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype
