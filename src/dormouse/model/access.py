"""Which tensor of a module is touched when: exactly, for any control flow, and at no cost once nobody asks.

Python code reaches a parameter or buffer through ``nn.Module.__getattr__``, which looks it up in ``_parameters`` or
``_buffers``. While a Watch is armed, both are dictionaries that tell before they hand out. Plain attributes that lead
to tensors (``_flat_weights`` of recurrent layers among them) become properties of a subclass that the module belongs to
meanwhile. Disarmed, every module is exactly what it was. What cannot be watched is told of at the start of a run.

Knows nothing of devices: what a number means (order of use, a group that arrives) is the caller's affair.
"""

import inspect
import types
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from typing import TypeAlias, TypeVar

import torch
from torch import nn

from dormouse.model.places import Place, find_places

Result = TypeVar("Result")

NumberOf: TypeAlias = Callable[[torch.Tensor], int]
"""The number to tell when this tensor is touched; -1: nothing."""

_Slots: TypeAlias = dict[str, torch.Tensor | None]


class Watch:
    """Tells ``touched(number)`` before a tensor of ``root`` whose number is above ``passed`` is handed out."""

    def __init__(self, root: nn.Module, number_of: NumberOf, touched: Callable[[int], object]) -> None:
        self.passed = -1
        self.touched = touched
        self._root = root
        self._number_of = number_of
        self._armed = False
        self.scan()

    def scan(self) -> None:
        """Look for tensors anew: a forward may have left views of weights in plain attributes."""
        assert not self._armed
        places = [
            (place, self._number_of(tensor))
            for place in find_places(self._root)
            if (tensor := place.tensor) is not None
        ]
        watched = [(place, number) for place, number in places if number >= 0]
        self._dicts = _watched_dicts(watched, self)
        self._classes, self._upfront = _watched_classes(watched, self)

    def arm(self) -> None:
        """Start telling. No run may be in progress."""
        if not self._armed:
            self._armed = True
            for module, slot, watched in self._dicts:
                watched.mirror(module.__dict__[slot])
                module.__dict__[slot] = watched
            for module, _, watched_class in self._classes:
                module.__class__ = watched_class

    def disarm(self) -> None:
        """Stop telling: every module gets its own dictionaries and class back. No run may be in progress."""
        if self._armed:
            self._armed = False
            for module, slot, watched in self._dicts:
                module.__dict__[slot] = watched.restored()
            for module, own_class, _ in self._classes:
                module.__class__ = own_class

    def begin(self) -> None:
        """A run starts: tell of what cannot be watched."""
        if self._armed and self._upfront > self.passed:
            self.touched(self._upfront)


def first_use_order(
    root: nn.Module, tensors: Iterable[torch.Tensor], run: Callable[[], Result]
) -> tuple[list[int], Result]:
    """Indices into ``tensors`` in the order in which ``run`` first touches them (the untouched are left out), and
    what it returned."""
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    order: dict[int, None] = {}
    watch = Watch(root, lambda tensor: numbers.get(id(tensor), -1), order.setdefault)
    watch.arm()
    try:
        watch.begin()
        result = run()
    finally:
        watch.disarm()
    return list(order), result


class _WatchedDict(_Slots):
    """A module's ``_parameters`` or ``_buffers`` that tells before it hands out."""

    __slots__ = ("_changed", "_numbers", "_plain", "_watch")

    def __init__(self, numbers: dict[str, int], watch: Watch) -> None:
        super().__init__()
        self._numbers = numbers
        self._watch = watch
        self._plain: _Slots = {}
        self._changed = False

    def mirror(self, plain: _Slots) -> None:
        dict.clear(self)
        dict.update(self, plain)
        self._plain = plain
        self._changed = False

    def restored(self) -> _Slots:
        """The module's own dictionary, with what a forward has assigned meanwhile."""
        if self._changed:
            self._plain.clear()
            self._plain.update(dict.items(self))
        return self._plain

    def __getitem__(self, key: str) -> torch.Tensor | None:
        number = self._numbers.get(key, -1)
        if number > self._watch.passed:
            self._watch.touched(number)
        return dict.__getitem__(self, key)

    def __setitem__(self, key: str, value: torch.Tensor | None) -> None:
        self._changed = True
        dict.__setitem__(self, key, value)

    def __delitem__(self, key: str) -> None:
        self._changed = True
        dict.__delitem__(self, key)

    def __iter__(self) -> Iterator[str]:
        # Not for its own sake: a subclass that iterates for itself is copied key by key, through __getitem__.
        return dict.__iter__(self)

    def get(self, key: str, default: torch.Tensor | None = None) -> torch.Tensor | None:  # type: ignore[override]
        if key not in self:
            return default
        return self[key]

    def pop(self, key: str, *default: torch.Tensor | None) -> torch.Tensor | None:  # type: ignore[override]
        if key in self:
            self.__getitem__(key)
        self._changed = True
        return dict.pop(self, key, *default)

    # Views that fetch item by item: ``next(module.parameters())`` touches one tensor, not all.
    def items(self) -> ItemsView[str, torch.Tensor | None]:  # type: ignore[override]
        return ItemsView(self)

    def values(self) -> ValuesView[torch.Tensor | None]:  # type: ignore[override]
        return ValuesView(self)


def _watched_dicts(places: list[tuple[Place, int]], watch: Watch) -> list[tuple[nn.Module, str, _WatchedDict]]:
    numbers: dict[tuple[int, str], tuple[nn.Module, dict[str, int]]] = {}
    for place, number in places:
        if place.kind != "attribute":
            slot = "_parameters" if place.kind == "parameter" else "_buffers"
            numbers.setdefault((id(place.owner), slot), (place.owner, {}))[1][str(place.path[0])] = number
    return [(module, slot, _WatchedDict(keys, watch)) for (_, slot), (module, keys) in numbers.items()]


def _watched_classes(
    places: list[tuple[Place, int]], watch: Watch
) -> tuple[list[tuple[nn.Module, type[nn.Module], type[nn.Module]]], int]:
    """A subclass for each module with tensors in plain attributes, and the highest number that none can watch."""
    numbers: dict[int, tuple[nn.Module, dict[str, int]]] = {}
    upfront = -1
    for place, number in places:
        if place.kind == "attribute":
            name = str(place.path[0])
            if hasattr(inspect.getattr_static(type(place.owner), name, None), "__set__"):
                upfront = max(upfront, number)
            else:
                keys = numbers.setdefault(id(place.owner), (place.owner, {}))[1]
                keys[name] = max(number, keys.get(name, -1))
    return [(module, type(module), _subclass(type(module), keys, watch)) for module, keys in numbers.values()], upfront


def _subclass(own: type[nn.Module], numbers: dict[str, int], watch: Watch) -> type[nn.Module]:
    body: dict[str, object] = {name: _watched_attribute(own, name, number, watch) for name, number in numbers.items()}
    body |= {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return types.new_class(own.__name__, (own,), exec_body=lambda namespace: namespace.update(body))


def _watched_attribute(own: type[nn.Module], name: str, number: int, watch: Watch) -> property:
    def read(module: nn.Module) -> object:
        if number > watch.passed:
            watch.touched(number)
        if name in module.__dict__:
            return module.__dict__[name]
        # Deleted meanwhile: what the class itself would answer, then nn.Module.__getattr__.
        descriptor = inspect.getattr_static(own, name, None)
        if descriptor is None:
            raise AttributeError(name)
        return descriptor.__get__(module, own) if hasattr(descriptor, "__get__") else descriptor

    def write(module: nn.Module, value: object) -> None:
        module.__dict__[name] = value

    def delete(module: nn.Module) -> None:
        del module.__dict__[name]

    return property(read, write, delete)
