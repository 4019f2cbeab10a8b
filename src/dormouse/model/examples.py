"""Example inputs: what a model is tried with at deploy, made from its configuration or from the manifest.

Every example comes in two sizes, so that the free dimensions of inputs and outputs show. Values are plain and always
the same. Runs nothing.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dormouse.errors import RefusedSource
from dormouse.functions import InputManifest
from dormouse.model.datatypes import TORCH_DTYPES
from dormouse.model.loaded import Inputs, Trial, Value
from dormouse.tensors import TensorSpec

TOKENS, OTHER_TOKENS = 16, 20
SAMPLES = 16_000
"""One second of sound."""


def from_manifest(inputs: tuple[InputManifest, ...]) -> Trial:
    """Inputs as the owner declares them; free dimensions are 1 and 2 where they come first, else 16 and 20."""
    for item in inputs:
        if item.datatype not in TORCH_DTYPES and item.datatype != "BYTES":
            raise RefusedSource(f"inputs: {item.name} has datatype {item.datatype!r}, which V2 does not know")
    small, large = (
        {item.name: _plain(item.datatype, _sized(item.shape, batch, free)) for item in inputs}
        for batch, free in ((1, TOKENS), (2, OTHER_TOKENS))
    )
    declared = tuple(TensorSpec(item.name, item.datatype, item.shape) for item in inputs)
    return Trial(small, large if any(-1 in item.shape for item in inputs) else None, declared)


def from_configuration(config: Any, forward: Callable[..., Any], main_input: str) -> tuple[Trial, ...]:
    """Trials for a Hugging Face model: its main input first, then all that its forward knows."""
    accepted = inspect.signature(forward).parameters
    kinds = [kind for kind in _MAKERS if kind in accepted]
    choices = [[main_input] if main_input in kinds else kinds[:1], kinds]
    return tuple(
        Trial(_inputs(choice, config, accepted, 1), _inputs(choice, config, accepted, 2))
        for index, choice in enumerate(choices)
        if choice and choice not in choices[:index]
    )


def from_values(inputs: Inputs) -> Trial:
    """Examples that the source brought along, and the same with its first dimension doubled."""
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    if len(tensors) < len(inputs) or not tensors or any(tensor.ndim == 0 for tensor in tensors):
        return Trial(inputs)
    return Trial(
        inputs, {name: torch.cat([value, value]) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    )


def _inputs(kinds: list[str], config: Any, accepted: Mapping[str, object], batch: int) -> Inputs:
    inputs = {name: value for kind in kinds for name, value in _MAKERS[kind](config, accepted, batch).items()}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        start = getattr(config, "decoder_start_token_id", None) or 0
        inputs["decoder_input_ids"] = torch.full((batch, 4 if batch == 1 else 6), start)
    return inputs


def _text(config: Any, accepted: Mapping[str, object], batch: int) -> Inputs:
    vocabulary = _setting(config, "vocab_size", 100)
    tokens = TOKENS if batch == 1 else OTHER_TOKENS
    ids = (torch.arange(batch * tokens).reshape(batch, tokens) * 7 + 5) % vocabulary
    end = _setting(config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < vocabulary:
        ids[ids == end] = (end + 1) % vocabulary
        ids[:, -1] = end
    inputs: Inputs = {"input_ids": ids}
    if "attention_mask" in accepted:
        inputs["attention_mask"] = torch.ones_like(ids)
    if "token_type_ids" in accepted and _setting(config, "type_vocab_size", 1) > 1:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return inputs


def _pixels(config: Any, accepted: Mapping[str, object], batch: int) -> Inputs:
    del accepted
    size = _setting(config, "image_size", 224)
    if isinstance(size, Mapping):
        size = [size.get("height", 224), size.get("width", 224)]
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return {"pixel_values": _wave(batch, _setting(config, "num_channels", 3), height, width)}


def _features(config: Any, accepted: Mapping[str, object], batch: int) -> Inputs:
    del accepted
    bins = _setting(config, "num_mel_bins", 80)
    return {"input_features": _wave(batch, bins, 2 * _setting(config, "max_source_positions", 1500))}


def _sound(config: Any, accepted: Mapping[str, object], batch: int) -> Inputs:
    del accepted
    bins, length = _setting(config, "num_mel_bins", None), _setting(config, "max_length", None)
    if isinstance(bins, int) and isinstance(length, int):
        return {"input_values": _wave(batch, length, bins)}
    return {"input_values": _wave(batch, SAMPLES if batch == 1 else SAMPLES + 320)}


_MAKERS = {"input_ids": _text, "pixel_values": _pixels, "input_features": _features, "input_values": _sound}


def _setting(config: Any, name: str, default: Any) -> Any:
    """A setting of the configuration, or of one of the configurations inside it."""
    inner = [
        getattr(config, part, None)
        for part in ("text_config", "vision_config", "audio_config", "encoder", "backbone_config")
    ]
    for holder in (config, *inner):
        value = getattr(holder, name, None)
        if value is not None:
            return value
    return default


def _wave(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float32) * 0.1).reshape(shape)


def _plain(datatype: str, shape: tuple[int, ...]) -> Value:
    if datatype == "BYTES":
        return _texts(shape)
    values = torch.arange(torch.Size(shape).numel()) % 2
    return (_wave(*shape) if datatype in ("FP16", "BF16", "FP32", "FP64") else values.reshape(shape)).to(
        TORCH_DTYPES[datatype]
    )


def _texts(shape: tuple[int, ...]) -> Value:
    return [_texts(shape[1:]) for _ in range(shape[0])] if shape else b"text"


def _sized(shape: tuple[int, ...], batch: int, free: int) -> tuple[int, ...]:
    return tuple((batch if index == 0 else free) if size == -1 else size for index, size in enumerate(shape))
