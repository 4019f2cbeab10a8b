"""A module whose tensors are garbage until they arrive gives the right answer, whatever way it takes to them."""

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dormouse.model.access import Watch, first_use_order
from dormouse.model.places import find_places, named_modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.embed.weight[:4] + x)


class BorrowedWeight(nn.Module):
    """Uses a child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        weights: dict[str, Any] = self.last._parameters
        return nn.functional.linear(self.first(x), weights["weight"], weights.get("bias"))


class Experts(nn.Module):
    """Takes another way for negative sums, which a profile with positive ones never sees."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        chosen = self.experts[:2] if x.sum() > 0 else self.experts[2:]
        for expert in chosen:
            x = expert(x)
        return x


class Table:
    def __init__(self) -> None:
        self.rows = torch.randn(8)


class PlainTensors(nn.Module):
    """Keeps tensors where PyTorch does not count them, and is reached by a method, not by a call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.inner.scale = torch.randn(8)
        self.steps: list[Any] = [torch.randn(8), (torch.randn(8), {"deep": torch.randn(8)})]
        self.table = Table()
        self.hidden = [nn.Linear(8, 8)]

    def shifted(self, x: torch.Tensor) -> Any:
        first, (second, third) = self.steps
        scale: Any = self.inner.scale
        return x * scale + first + second + third["deep"] + self.table.rows

    def forward(self, x: torch.Tensor) -> Any:
        return self.hidden[0](self.shifted(x))


class Iterating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(3))
        self.by_name = nn.ParameterDict({"a": nn.Parameter(torch.randn(8))})
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> Any:
        for parameter in self.weights.parameters():
            x = x + parameter
        for _, buffer in self.norm.named_buffers():
            x = x + buffer
        copied = {**self.by_name._parameters} | dict(self.norm._parameters) | self.weights._parameters.copy()
        return x + sum(value for value in copied.values() if value is not None)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, bidirectional=True)
        self.cell = nn.GRUCell(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.cell(self.lstm(x)[0])


class Sliced(nn.Module):
    """A plain attribute hidden behind a property of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["scale"] = torch.randn(8)

    @property
    def scale(self) -> torch.Tensor:
        scale: torch.Tensor = self.__dict__["scale"]
        return scale * 2

    @scale.setter
    def scale(self, value: torch.Tensor) -> None:
        self.__dict__["scale"] = value

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.scale


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def attention() -> nn.Module:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            return self.attention(x[None], x[None], x[None], need_weights=False)[0]

    return SelfAttention()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "borrowed": BorrowedWeight,
    "experts": Experts,
    "plain": PlainTensors,
    "iterating": Iterating,
    "recurrent": Recurrent,
    "property": Sliced,
    "normalised": Normalised,
    "attention fast path": attention,
    "encoder fast path": lambda: nn.Sequential(nn.Unflatten(0, (1, 4)), encoder()),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (8, 1)), nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8)),
}


class Arrivals:
    """Tensors filled with garbage; each gets its bytes when it is asked for in order, as a copy lane would do."""

    def __init__(self, module: nn.Module, order: list[int]) -> None:
        self.tensors = distinct(module)
        unseen = [index for index in range(len(self.tensors)) if index not in order]
        self.order = order + unseen
        self.numbers = {id(self.tensors[index]): number for number, index in enumerate(self.order)}
        self.bytes = [tensor.detach().clone() for tensor in self.tensors]
        for tensor in self.tensors:
            tensor.detach().view(torch.uint8).fill_(255)
        self.watch = Watch(module, lambda tensor: self.numbers.get(id(tensor), -1), self.arrive)
        self.watch.arm()

    def arrive(self, number: int) -> None:
        for index in self.order[self.watch.passed + 1 : number + 1]:
            self.tensors[index].detach().copy_(self.bytes[index])
        self.watch.passed = number


def distinct(module: nn.Module) -> list[torch.Tensor]:
    tensors = [tensor for place in find_places(module) if (tensor := place.tensor) is not None]
    return list({id(tensor): tensor for tensor in tensors if tensor.ndim}.values())


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval().requires_grad_(False)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
@given(sign=st.sampled_from([1.0, -1.0]), seed=st.integers(0, 2**31))
@settings(max_examples=8, deadline=None)
def test_garbage_never_shows_in_an_answer(make: Callable[[], nn.Module], sign: float, seed: int) -> None:
    module = made(make)
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(seed)) * sign
    with torch.inference_mode():
        expected = module(x)
        order, _ = first_use_order(module, distinct(module), lambda: module(torch.ones(4, 8)))
        arrivals = Arrivals(module, order)
        arrivals.watch.begin()
        assert torch.equal(module(x), expected)
        arrivals.watch.disarm()
        arrivals.arrive(len(arrivals.order) - 1)
        assert torch.equal(module(x), expected)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
def test_without_the_watch_garbage_would_show(make: Callable[[], nn.Module]) -> None:
    """The test above can fail."""
    module = made(make)
    with torch.inference_mode():
        expected = module(torch.ones(4, 8))
        Arrivals(module, []).watch.disarm()
        assert not torch.equal(module(torch.ones(4, 8)), expected)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
def test_disarmed_a_module_is_what_it_was(make: Callable[[], nn.Module]) -> None:
    module = made(make)
    before = {name: (type(inner), dict(inner.__dict__)) for name, inner in named_modules(module).items()}
    dicts = {name: (inner._parameters, inner._buffers) for name, inner in named_modules(module).items()}
    with torch.inference_mode():
        first_use_order(module, distinct(module), lambda: module(torch.ones(4, 8)))
    for name, inner in named_modules(module).items():
        assert type(inner) is before[name][0]
        assert inner.__dict__.keys() == before[name][1].keys()
        assert all(inner.__dict__[key] is value for key, value in before[name][1].items())
        assert type(inner._parameters) is type(inner._buffers) is dict
        assert inner._parameters is dicts[name][0] and inner._buffers is dicts[name][1]


def test_the_order_is_that_of_use_and_the_unused_are_left_out() -> None:
    module = made(BorrowedWeight)
    module.unused = nn.Linear(2, 2)
    names = [place.name for place in find_places(module)]
    order, _ = first_use_order(module, distinct(module), lambda: module(torch.ones(4, 8)))
    assert [names[index] for index in order] == ["first.weight", "first.bias", "last.weight", "last.bias"]


def test_asking_for_one_parameter_touches_one() -> None:
    """Libraries ask ``next(module.parameters()).dtype`` at the start of a forward."""
    module = made(encoder)
    order, _ = first_use_order(module, distinct(module), lambda: next(module.parameters()))
    assert len(order) == 1


def test_what_a_forward_assigns_while_watched_is_kept() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.last = torch.zeros(1)
            self.gone = torch.zeros(1)

        def forward(self, x: torch.Tensor) -> Any:
            self.count: torch.Tensor = self.count + 1
            self.last = x
            if hasattr(self, "gone"):
                del self.gone
            return x

    module: Any = made(Counting)
    x = torch.ones(3)
    first_use_order(module, distinct(module), lambda: module(x))
    assert module.count.item() == 1
    assert module.last is x
    assert not hasattr(module, "gone")
    assert set(dict(module.named_buffers())) == {"count"}


def test_a_failing_run_leaves_the_module_unwatched() -> None:
    module: Any = made(Tied)
    with pytest.raises(RuntimeError):
        first_use_order(module, distinct(module), lambda: module(torch.ones(3, 3)))
    assert type(module.embed._parameters) is dict


def test_places_can_be_put_and_read_back_everywhere() -> None:
    class Everywhere(PlainTensors):
        def __init__(self) -> None:
            super().__init__()
            self.mapping = UserDict({"a": torch.randn(2)})
            self.register_buffer("buffer", torch.randn(2))

    module = made(Everywhere)
    places = find_places(module)
    assert {place.name for place in places} == {
        "buffer",
        "inner.scale",
        "steps.0",
        "steps.1.0",
        "steps.1.1.deep",
        "table.rows",
        "mapping.data.a",
        "hidden.0.weight",
        "hidden.0.bias",
    }
    for place in places:
        tensor = place.tensor
        assert tensor is not None
        other = copy.deepcopy(tensor)
        place.put(other)
        assert place.tensor is other
