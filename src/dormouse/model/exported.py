"""A torch.export program (.pt2): load it, strip it of its weights, rebuild it from what is left.

Input names are those of the exported forward; sizes that the export left open stay open, within their limits.
"""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from dormouse.errors import InvalidRequest, RefusedSource
from dormouse.model import archive
from dormouse.model.loaded import Inputs, LoadedModel, Trial, one_line
from dormouse.store.index import ExportedSkeleton

PROGRAM = "program.pt2"
PLATFORM = "pytorch_export"


class Program(nn.Module):
    """An exported program, called with keyword tensors."""

    def __init__(self, exported: ExportedProgram) -> None:
        super().__init__()
        # Its own guards are source code from the file; sizes are checked here instead.
        self.graph_module: Any = exported.module(check_guards=False)
        fetch_late(self.graph_module)
        self.in_spec = exported.call_spec.in_spec
        specs = [spec for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
        self.constants = {spec.arg.name: spec.arg.value for spec in specs if isinstance(spec.arg, ConstantArgument)}
        self.names = [spec.arg.name for spec in specs]
        self.limits = _limits(exported)

    def forward(self, **inputs: torch.Tensor) -> Any:
        self._check(inputs)
        flat = [self.constants[name] if name in self.constants else inputs[name] for name in self.names]
        arguments, keywords = pytree.tree_unflatten(flat, self.in_spec)
        return self.graph_module(*arguments, **keywords)

    def _check(self, inputs: Mapping[str, torch.Tensor]) -> None:
        for name, sizes in self.limits.items():
            if name not in inputs:
                raise InvalidRequest(f"input {name!r} is missing")
            shape = tuple(inputs[name].shape)
            if len(shape) != len(sizes) or any(
                not low <= size <= high for size, (low, high) in zip(shape, sizes, strict=True)
            ):
                said = ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in sizes)
                raise InvalidRequest(f"input {name!r} has shape {list(shape)}, the program was exported for [{said}]")


def load(path: Path, dtype: str | None, trial: Trial | None) -> LoadedModel:
    """The program with its own weights. Raises RefusedSource."""
    if dtype is not None:
        raise RefusedSource(
            f"dtype = {dtype!r}: an exported program keeps its types; cast the model before exporting it"
        )
    archive.check(path)
    exported = _read(path)
    trial = trial or _example(exported)
    if trial is None:
        raise RefusedSource(f"{path} carries no example inputs; export it with them or declare [[inputs]]")
    return LoadedModel(
        module=_program(exported),
        skeleton=ExportedSkeleton(PROGRAM),
        platform=PLATFORM,
        trials=(trial,),
        reload=lambda: _program(_read(path)),
        write_more=lambda directory: _write_stripped(_read(path), directory / PROGRAM),
    )


def rebuild(file: Path) -> nn.Module:
    """The program with tensors of the right shapes and no memory behind them."""
    return _program(_read(file))


def fetch_late(module: Any) -> None:
    """Move the fetch of every weight to just before its first use: the exporter has them all at the start."""
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and node.users:
            min(node.users, key=order.__getitem__).prepend(node)
    module.recompile()


def _program(exported: ExportedProgram) -> nn.Module:
    return Program(exported).requires_grad_(False)


def _read(path: Path) -> ExportedProgram:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return torch.export.load(path)
    except Exception as fault:
        raise RefusedSource(f"{path} cannot be read by torch {torch.__version__}: {one_line(fault)}") from None
    finally:
        logging.disable(before)


def _write_stripped(exported: ExportedProgram, file: Path) -> None:
    """The program alone: each tensor is one zero, stretched to its shape, which takes a few bytes."""
    for tensors in (exported.state_dict, exported.constants):
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor):
                zero = torch.zeros((), dtype=value.dtype).expand(value.shape)
                kept: torch.Tensor = (
                    nn.Parameter(zero, requires_grad=False) if isinstance(value, nn.Parameter) else zero
                )
                tensors[name] = kept
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these are stretched is noticed, and meant
        torch.export.save(exported, file)


def _example(exported: ExportedProgram) -> Trial | None:
    if exported.example_inputs is None:
        return None
    flat, _ = pytree.tree_flatten(exported.example_inputs)
    values = dict(zip(exported.graph_signature.user_inputs, flat, strict=True))
    tensors = {str(name): value for name, value in values.items() if isinstance(value, torch.Tensor)}
    others = _other_sizes(exported, tensors)
    inputs: Inputs = {**tensors}
    return Trial(inputs, {name: _resized(value, others[name]) for name, value in tensors.items()} if others else None)


def _other_sizes(exported: ExportedProgram, tensors: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """Another shape for every input, within what the export allows; empty if no size is open."""
    expressions = {name: _expressions(exported, name) for name in tensors}
    now = {
        expression: size
        for name, tensor in tensors.items()
        for expression, size in zip(expressions[name], tensor.shape, strict=True)
        if getattr(expression, "is_Symbol", False)
    }
    other = {
        symbol: size + 1 if size + 1 <= exported.range_constraints[symbol].upper else size - 1
        for symbol, size in now.items()
    }
    if not other:
        return {}
    return {
        name: [int(item.subs(other)) if hasattr(item, "subs") else int(item) for item in expressions[name]]
        for name in tensors
    }


def _limits(exported: ExportedProgram) -> dict[str, list[tuple[int, int]]]:
    limits: dict[str, list[tuple[int, int]]] = {}
    for name in exported.graph_signature.user_inputs:
        expressions = _expressions(exported, str(name))
        if expressions is not None:
            limits[str(name)] = [_range(exported, item) for item in expressions]
    return limits


def _range(exported: ExportedProgram, size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    known = exported.range_constraints.get(size)
    largest = 2**62
    if known is None:
        return 0, largest
    return int(known.lower), int(known.upper) if known.upper < largest else largest


def _expressions(exported: ExportedProgram, name: str) -> Any:
    """Sizes of an input as the program knows them: integers and symbolic expressions; None if it is no tensor."""
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name == name:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                return [size if isinstance(size, int) else size.node.expr for size in value.shape]
    return None


def _resized(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """The same values over again, or fewer of them."""
    for dim, size in enumerate(shape):
        tensor = tensor.index_select(dim, torch.arange(size) % max(tensor.shape[dim], 1))
    return tensor
