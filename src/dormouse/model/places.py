"""Every place in a module where a tensor is kept, so that all of them can be counted, stored and bound again.

PyTorch itself counts parameters and buffers only. A module may also keep tensors as plain attributes, in lists,
tuples, dicts or small objects, and keep whole modules there. All of that is found here. What hides in closures,
globals or C++ objects is not. Knows nothing of images and devices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TypeAlias

import torch
from torch import fx, nn

Key: TypeAlias = str | int
OPAQUE = (
    *(str, bytes, int, float, complex, type, type(None)),
    *(FunctionType, MethodType, BuiltinFunctionType, ModuleType),
    *(fx.Graph, fx.Node),  # their notes on nodes hold stand-ins for tensors
)
_DEEPEST = 6
_MODULE_OWN = frozenset(nn.Module().__dict__)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One place: ``owner``'s parameter, buffer, or what ``path`` leads to from its attribute ``path[0]``."""

    name: str
    kind: str
    owner: nn.Module
    path: tuple[Key, ...]

    @property
    def tensor(self) -> torch.Tensor | None:
        """What is there now; None when a forward has put something else there."""
        value: object = self.owner.__dict__
        for key in self._steps():
            value = _step(value, key)
        return value if isinstance(value, torch.Tensor) else None

    def put(self, tensor: torch.Tensor) -> None:
        """Replace what is there. Tuples on the way are rebuilt."""
        _put(self.owner.__dict__, self._steps(), tensor)

    def _steps(self) -> tuple[Key, ...]:
        inner = {"parameter": ("_parameters",), "buffer": ("_buffers",), "attribute": ()}[self.kind]
        return (*inner, *self.path)


def named_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Every module under ``root`` once, by dotted name; also those that only a plain attribute leads to."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", root)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found[name] = module
        children = [(_dotted(name, key), child) for key, child in module._modules.items() if child is not None]
        hidden = [
            (_dotted(name, *path), value)
            for path, value in _plain_values(module)
            if isinstance(value, nn.Module) and value is not root
        ]
        waiting.extend(reversed(children + hidden))
    return found


def find_places(root: nn.Module) -> list[Place]:
    """Every place under ``root`` that holds a tensor, in module order."""
    return [
        Place(_dotted(name, *path), kind, module, path)
        for name, module in named_modules(root).items()
        for kind, path in _own_tensors(module)
    ]


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, tuple[Key, ...]]]:
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield "parameter", (key,)
    for key, buffer in module._buffers.items():
        if buffer is not None:
            yield "buffer", (key,)
    for path, value in _plain_values(module):
        if isinstance(value, torch.Tensor):
            yield "attribute", path


def _plain_values(module: nn.Module) -> Iterator[tuple[tuple[Key, ...], torch.Tensor | nn.Module]]:
    seen: set[int] = set()
    for key, value in list(module.__dict__.items()):
        if key not in _MODULE_OWN:
            yield from _inside(value, (key,), seen)


def _inside(
    value: object, path: tuple[Key, ...], seen: set[int]
) -> Iterator[tuple[tuple[Key, ...], torch.Tensor | nn.Module]]:
    if isinstance(value, torch.Tensor | nn.Module):
        yield path, value
        return
    if isinstance(value, OPAQUE) or id(value) in seen or len(path) > _DEEPEST:
        return
    seen.add(id(value))
    for key, item in _items(value):
        yield from _inside(item, (*path, key), seen)


def _items(value: object) -> list[tuple[Key, object]]:
    if isinstance(value, dict):
        return [(key, item) for key, item in value.items() if isinstance(key, str | int)]
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    attributes = getattr(value, "__dict__", None)
    return list(attributes.items()) if isinstance(attributes, dict) else []


def _step(value: object, key: Key) -> object:
    """One step down; None when a forward has changed what the path led through."""
    return next((item for name, item in _items(value) if name == key), None) if value is not None else None


def _put(container: object, steps: tuple[Key, ...], tensor: torch.Tensor) -> object:
    """Put ``tensor`` where the steps lead and return the container, or the tuple that must replace it."""
    if not steps:
        return tensor
    key, rest = steps[0], steps[1:]
    inner = _put(_step(container, key), rest, tensor)
    if isinstance(container, tuple):
        items = (inner if index == key else item for index, item in enumerate(container))
        return container._make(items) if hasattr(container, "_make") else type(container)(items)
    if isinstance(container, list):
        assert isinstance(key, int)
        container[key] = inner
    elif isinstance(container, dict):
        container[key] = inner
    else:
        container.__dict__[str(key)] = inner
    return container


def _dotted(*parts: Key) -> str:
    return ".".join(str(part) for part in parts if part != "")
