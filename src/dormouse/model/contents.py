"""What can be reached from a module, as it was at one moment, to see later whether a forward pass left anything in it.

Compares by identity: every module's attributes, parameters, buffers and children, and the dictionaries, lists and plain
objects behind them. What hides in closures, globals or C++ objects is not seen, as with ``places``.
"""

from collections import deque
from collections.abc import Iterable
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import nn

from dormouse.model.places import OPAQUE

Container: TypeAlias = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
_LEAVES = (*OPAQUE, torch.Tensor)
_NOT_LOOKED_INTO = frozenset(nn.Module().__dict__) - {"_parameters", "_buffers", "_modules"}
"""A module's hooks and switches are compared as they are; only what makes it this module is looked into."""


class Contents:
    """A snapshot of ``root``. It keeps alive what it has seen, so that no identity is given twice."""

    def __init__(self, root: nn.Module) -> None:
        self._seen: list[tuple[Container, list[object]]] = []
        known: set[int] = set()
        waiting: list[object] = [root]
        while waiting:
            value = waiting.pop()
            if isinstance(value, _LEAVES) or id(value) in known:
                continue
            known.add(id(value))
            if (container := _container(value)) is not None:
                self._seen.append((container, _now(container)))
            waiting.extend(_inside(value, container))

    @property
    def changed(self) -> bool:
        """Whether anything is there now that was not, or is gone, or is another object."""
        return any(not _same(_now(container), before) for container, before in self._seen)


def _same(now: list[object], before: list[object]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _container(value: object) -> Container | None:
    """What can change in a value: itself, or its attributes."""
    if isinstance(value, dict | list | set | deque):
        return value
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def _now(container: Container) -> list[object]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    return sorted(container, key=id) if isinstance(container, set) else list(container)


def _inside(value: object, container: Container | None) -> Iterable[object]:
    if isinstance(value, nn.Module):
        return [item for key, item in value.__dict__.items() if key not in _NOT_LOOKED_INTO]
    if isinstance(value, tuple):
        return value
    return () if container is None else _now(container)
