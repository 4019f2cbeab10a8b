"""Two forward passes of a loaded model: in which order it uses its tensors, which it changes, and its signature.

Runs the real module on the CPU. Where the image will lie, and how, is decided elsewhere.
"""

import inspect
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import nn

from dormouse.core.types import Bytes
from dormouse.errors import RefusedSource
from dormouse.model.access import first_use_order
from dormouse.model.datatypes import bytes_of, datatype_of
from dormouse.model.loaded import Inputs, LoadedModel, Trial, Value, cast, one_line
from dormouse.model.outputs import Output, named_outputs
from dormouse.model.places import Place, find_places
from dormouse.tensors import Signature, TensorSpec

CHUNKS = 3
"""So many chunks of a streamed answer are looked at."""

SMALL_BYTES: Bytes = 64 * 1024


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """One tensor of a module, with every place that holds it."""

    tensor: torch.Tensor
    places: tuple[Place, ...]

    @property
    def kind(self) -> str:
        kinds = {place.kind for place in self.places}
        return next(kind for kind in ("parameter", "buffer", "attribute") if kind in kinds)


@dataclass(frozen=True, slots=True)
class Profile:
    """``order`` has every tensor, in order of first use; ``changed`` are those that a forward writes to."""

    order: tuple[KeptTensor, ...]
    changed: frozenset[int]
    """Indices into ``order``."""
    signature: Signature
    trial: Trial
    outputs: dict[str, Output]
    """The answer to the trial's inputs."""


def kept_tensors(module: nn.Module) -> list[KeptTensor]:
    """Every tensor once, in module order. Raises RefusedSource for one that cannot be stored as plain bytes."""
    found: dict[object, tuple[torch.Tensor, list[Place]]] = {}
    for place in find_places(module):
        tensor = place.tensor
        assert tensor is not None, place.name
        _check_storable(place.name, tensor)
        found.setdefault(_identity(tensor), (tensor, []))[1].append(place)
    return [KeptTensor(tensor, tuple(places)) for tensor, places in found.values()]


def profiled(loaded: LoadedModel) -> Profile:
    """Run the model twice. Raises RefusedSource if it works with none of its examples."""
    kept = kept_tensors(loaded.module)
    before = [_fingerprint(item) for item in kept]
    trial, order, outputs = _first_that_works(loaded, kept)
    varied = _run_again(loaded.module, trial)
    order = _with_unseen(order, kept)
    changed = {index for index, item in enumerate(kept) if _fingerprint(item) != before[index]}
    return Profile(
        order=tuple(kept[index] for index in order),
        changed=frozenset(place for place, index in enumerate(order) if index in changed),
        signature=Signature(_inputs(loaded, trial, varied is not None), _outputs(outputs, varied or outputs)),
        trial=trial,
        outputs=outputs,
    )


def run(module: nn.Module, inputs: Inputs) -> dict[str, Output]:
    """One forward pass; of a streamed answer, the first chunk. Tensors are copies."""
    with torch.inference_mode():
        result = module(**{name: _fresh(value) for name, value in inputs.items()})
        if isinstance(result, Iterator):
            chunks = [_copied(named_outputs(chunk)) for chunk in islice(result, CHUNKS)]
            return chunks[0] if chunks else {}
        return _copied(named_outputs(result))


def _candidates(loaded: LoadedModel) -> Iterator[Trial]:
    """The trials as they are; then, unless the owner declared their types, in the precision of the weights."""
    yield from loaded.trials
    floating = next((p.dtype for p in loaded.module.parameters() if p.is_floating_point()), torch.float32)
    for trial in loaded.trials:
        if not trial.declared and any(_is_of_another(value, floating) for value in trial.inputs.values()):
            varied = None if trial.varied is None else cast(trial.varied, floating)
            yield Trial(cast(trial.inputs, floating), varied)


def _is_of_another(value: Value, floating: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != floating


def _first_that_works(loaded: LoadedModel, kept: list[KeptTensor]) -> tuple[Trial, list[int], dict[str, Output]]:
    failures: list[str] = []
    for trial in _candidates(loaded):
        try:
            order, outputs = first_use_order(
                loaded.module, [item.tensor for item in kept], partial(run, loaded.module, trial.inputs)
            )
        except Exception as fault:
            failures.append(one_line(fault))
            continue
        if outputs:
            return trial, order, outputs
        failures.append("it returns no tensor, number or text")
    raise RefusedSource(f"the model fails with its example inputs: {'; '.join(failures)}; declare [[inputs]] for it")


def _with_unseen(order: list[int], kept: list[KeptTensor]) -> list[int]:
    """What the example did not touch, another request may: small tables (a default for an input that was given) cost
    nothing at the front, and at the end would make the request wait for everything. Unused weights go last."""
    seen = set(order)
    unseen = [index for index in range(len(kept)) if index not in seen]
    small = [i for i in unseen if kept[i].kind != "parameter" and kept[i].tensor.nbytes <= SMALL_BYTES]
    return [*small, *order, *(index for index in unseen if index not in set(small))]


def _run_again(module: nn.Module, trial: Trial) -> dict[str, Output] | None:
    """With other sizes if the model takes them, else (and then None) with the same."""
    if trial.varied is not None:
        try:
            return run(module, trial.varied)
        except Exception:  # whatever it raises, it does not take other sizes
            pass
    run(module, trial.inputs)
    return None


def _inputs(loaded: LoadedModel, trial: Trial, free: bool) -> tuple[TensorSpec, ...]:
    if trial.declared:
        return trial.declared
    varied = trial.varied if free and trial.varied else trial.inputs
    optional = loaded.optional or _with_defaults(loaded.module)
    return tuple(
        TensorSpec(name, _datatype(value), _free(_shape(value), _shape(varied[name])), name in optional)
        for name, value in trial.inputs.items()
    )


def _with_defaults(module: nn.Module) -> set[str]:
    parameters = inspect.signature(module.forward).parameters
    return {name for name, item in parameters.items() if item.default is not inspect.Parameter.empty}


def _outputs(outputs: dict[str, Output], varied: dict[str, Output]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, _datatype(value), _free(_shape(value), _shape(varied.get(name, value))))
        for name, value in outputs.items()
    )


def _free(shape: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) != len(other):
        return tuple(-1 for _ in shape)
    return tuple(size if size == varied else -1 for size, varied in zip(shape, other, strict=True))


def _datatype(value: Value | Output) -> str:
    return datatype_of(value.dtype) if isinstance(value, torch.Tensor) else "BYTES"


def _shape(value: object) -> tuple[int, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return (len(value), *_shape(value[0])) if isinstance(value, list) and value else ()


def _identity(tensor: torch.Tensor) -> object:
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _check_storable(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise RefusedSource(f"{name} is on the meta device and has no value")
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
        raise RefusedSource(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout}; only plain tensors are served"
        )
    if tensor.is_quantized or tensor.device.type != "cpu":
        raise RefusedSource(f"{name} is quantized or on {tensor.device}; only plain tensors on the CPU are served")


def _fingerprint(item: KeptTensor) -> int:
    """Of what is in its place now, since a forward may also assign a new tensor. One of another shape is no state that
    could be stored; the module keeps it for itself."""
    now = item.places[0].tensor
    same_kind = now is not None and now.shape == item.tensor.shape and now.dtype == item.tensor.dtype
    return zlib.crc32(bytes_of(now if now is not None and same_kind else item.tensor))


def _fresh(value: Value) -> Value:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _copied(outputs: dict[str, Output]) -> dict[str, Output]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in outputs.items()}
