"""What a module returns, as named tensors: the rule by which an answer's outputs get their names.

A single value is ``output``, items of a sequence are ``output_0``, ``output_1`` ... (``output_1_0`` inside another),
mappings and named tuples keep their keys. Values that are no tensors, numbers or text (caches, None) are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TypeAlias

import torch

Strings: TypeAlias = list["Strings"] | bytes
"""A BYTES tensor: a nested list of bytes."""
Output: TypeAlias = torch.Tensor | Strings


def named_outputs(result: object) -> dict[str, Output]:
    """The outputs by name, in the order in which the module gives them."""
    single = _output(result)
    if single is not None:
        return {"output": single}
    return {name: value for key, item in _named(result, "output") for name, value in _flat(key, item)}


def _flat(name: str, value: object) -> list[tuple[str, Output]]:
    output = _output(value)
    if output is not None:
        return [(name, output)]
    return [pair for key, item in _named(value, name) for pair in _flat(key, item)]


def _named(result: object, name: str) -> list[tuple[str, object]]:
    if isinstance(result, Mapping):
        return [(str(key), value) for key, value in result.items()]
    names = getattr(result, "_fields", None)
    if isinstance(result, tuple) and isinstance(names, tuple):
        return [(str(key), value) for key, value in zip(names, result, strict=True)]
    if isinstance(result, Sequence):
        return [(f"{name}_{index}", value) for index, value in enumerate(result)]
    if is_dataclass(result) and not isinstance(result, type):
        return [(field.name, getattr(result, field.name)) for field in fields(result)]
    return []


def _output(value: object) -> Output | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if isinstance(value, str | bytes):
        return [_strings(value)]
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return torch.as_tensor(value)
    return _strings(value) if isinstance(value, list) and _is_text(value) else None


def _is_text(value: list[object]) -> bool:
    return bool(value) and all(
        isinstance(item, str | bytes) or (isinstance(item, list) and _is_text(item)) for item in value
    )


def _strings(value: object) -> Strings:
    if isinstance(value, list):
        return [_strings(item) for item in value]
    assert isinstance(value, str | bytes)
    return value.encode() if isinstance(value, str) else value
