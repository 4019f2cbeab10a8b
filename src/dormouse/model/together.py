"""Proves at deploy that a model answers two samples together as it answers each alone, so requests may be batched."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from dormouse.errors import RefusedSource
from dormouse.functions import Manifest
from dormouse.model.loaded import Inputs, one_line
from dormouse.model.outputs import Output
from dormouse.model.profiling import Profile, run

Alike = Callable[[dict[str, Output], dict[str, Output]], bool]


def prove_together(manifest: Manifest, module: nn.Module, profile: Profile, alike: Alike) -> None:
    """Raises RefusedSource if the manifest asks for batches that the model cannot have."""
    if manifest.batch.rows == 1:
        return
    why = _obstacle(module, profile, alike)
    if why:
        raise RefusedSource(f"batch.rows = {manifest.batch.rows}: requests cannot be run together: {why}")


def _obstacle(module: nn.Module, profile: Profile, alike: Alike) -> str:
    if profile.changed:
        return "a forward pass changes the model's state"
    one = {name: value for name, value in profile.trial.inputs.items() if isinstance(value, torch.Tensor)}
    if len(one) < len(profile.trial.inputs):
        return "text goes in"
    rows = {value.shape[0] if value.ndim else 0 for value in one.values()}
    if len(rows) != 1 or 0 in rows:
        return "its inputs have no first dimension in common"
    if _streams(module, dict(one)):
        return "it streams its answer"
    other = _another(one)
    try:
        run(module, dict(other))
    except Exception:  # whatever it dislikes about such numbers, it need not take them
        other = one
    return _difference(module, one, other, rows.pop(), alike)


def _difference(
    module: nn.Module, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], rows: int, alike: Alike
) -> str:
    both: Inputs = {name: torch.cat((value, other[name])) for name, value in one.items()}
    try:
        answer = run(module, both)
    except Exception as fault:
        return f"it fails with two samples: {one_line(fault)}"
    for name, value in answer.items():
        if not isinstance(value, torch.Tensor):
            return f"its output {name!r} is text"
        if value.ndim == 0 or value.shape[0] != 2 * rows:
            return f"its output {name!r} has shape {list(value.shape)} for {2 * rows} rows of input"
    for sample, part in ((one, slice(0, rows)), (other, slice(rows, None))):
        own: dict[str, Output] = {name: value[part] for name, value in answer.items()}
        if not alike(own, run(module, dict(sample))):
            return "two samples together get other answers than each alone"
    return ""


def _streams(module: nn.Module, inputs: Inputs) -> bool:
    with torch.inference_mode():
        return isinstance(module(**inputs), Iterator)


def _another(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A second sample: other numbers where any number will do, else the same ones in another order."""
    chance = torch.Generator().manual_seed(1)

    def varied(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point():
            return value + torch.randn(value.shape, generator=chance).to(value.dtype)
        return value.flip(-1) if value.ndim > 1 else value

    return {name: varied(value) for name, value in inputs.items()}
