"""What a Hugging Face model is asked for: hidden states as they are, an embedding, scores of the next token, or logits.

A task is a thin module around the model, called with keyword tensors. Knows no files but the sentence-embedding
description that lies beside a configuration.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dormouse.errors import RefusedSource

POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_TRANSFORMER, _POOLING, _NORMALIZE = "Transformer", "Pooling", "Normalize"


class Raw(nn.Module):
    """Every tensor of the model's output, by its key."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self.arguments: dict[str, Any] = {"return_dict": True}
        if "use_cache" in accepted:
            self.arguments["use_cache"] = False
        self.keeps_logits = "logits_to_keep" in accepted

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.tensors(inputs)

    def tensors(self, inputs: dict[str, torch.Tensor], **more: Any) -> dict[str, torch.Tensor]:
        result = self.model(**inputs, **more, **self.arguments)
        return {key: value for key, value in result.items() if isinstance(value, torch.Tensor)}


class Classification(Raw):
    """The logits alone, as float32."""

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.tensors(inputs)["logits"].float()}


class Embedding(Raw):
    """One vector a text: hidden states pooled over the tokens that the attention mask keeps."""

    def __init__(self, model: nn.Module, pooling: str, normalize: bool) -> None:
        super().__init__(model)
        self.pooling = pooling
        self.normalize = normalize

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.tensors(inputs)["last_hidden_state"].float()
        mask = inputs.get("attention_mask")
        vectors = self._pooled(hidden, torch.ones(hidden.shape[:2], device=hidden.device) if mask is None else mask)
        return {"embedding": nn.functional.normalize(vectors, dim=-1) if self.normalize else vectors}

    def _pooled(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.pooling == "cls":
            return hidden[:, 0]
        if self.pooling == "last":
            return hidden[torch.arange(len(hidden), device=hidden.device), last_kept(mask)]
        weights = mask.to(hidden.dtype)[..., None]
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


class NextToken(Raw):
    """Scores over the vocabulary after the last token that the attention mask keeps, as float32."""

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = inputs.get("attention_mask")
        if mask is None:
            return {"logits": self._of_the_last(inputs)}
        columns, rows = last_kept(mask), torch.arange(len(mask), device=mask.device)
        if not self.keeps_logits:
            return {"logits": self.tensors(inputs)["logits"][rows, columns].float()}
        # The output layer is the largest of all: give it only the positions that are asked for.
        kept, place = torch.unique(columns, return_inverse=True) if len(columns) > 1 else (columns, rows)
        return {"logits": self.tensors(inputs, logits_to_keep=kept)["logits"][rows, place].float()}

    def _of_the_last(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if not self.keeps_logits:
            return self.tensors(inputs)["logits"][:, -1].float()
        # A position, not the count 1: that makes a slice, for which torch copies the whole output layer before it
        # multiplies, many times as slow, unless its weights want gradients.
        tokens = inputs[str(self.model.main_input_name)]
        last = torch.full((1,), tokens.shape[1] - 1, device=tokens.device)
        return self.tensors(inputs, logits_to_keep=last)["logits"][:, -1].float()


def last_kept(mask: torch.Tensor) -> torch.Tensor:
    """By row, the last position that an attention mask keeps, whichever side is padded."""
    return ((mask != 0) * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(dim=1)


def resolved(task: str, architecture: str, directory: Path) -> str:
    """What ``auto`` means for this architecture and directory."""
    if task != "auto":
        return task
    if (directory / "modules.json").exists():
        return "embedding"
    if architecture.endswith(("ForSequenceClassification", "ForImageClassification")):
        return "classification"
    return "next-token" if architecture.endswith(("ForCausalLM", "LMHeadModel")) else "raw"


def wrapped(model: nn.Module, task: str, directory: Path) -> nn.Module:
    """The model behind its task. Raises RefusedSource for a sentence embedding that is not understood."""
    if task == "embedding":
        return Embedding(model, *_sentence_embedding(directory))
    return {"raw": Raw, "classification": Classification, "next-token": NextToken}[task](model)


def description_files(directory: Path) -> list[str]:
    """Names of the files beside config.json that ``wrapped`` reads."""
    if not (directory / "modules.json").exists():
        return []
    pooling = [f"{path}/config.json" for kind, path in _sentence_modules(directory) if kind == _POOLING]
    return ["modules.json", *pooling]


def _sentence_embedding(directory: Path) -> tuple[str, bool]:
    """Pooling and whether vectors are normalized."""
    if not (directory / "modules.json").exists():
        return "mean", False
    modules = _sentence_modules(directory)
    for kind, _ in modules:
        if kind not in (_TRANSFORMER, _POOLING, _NORMALIZE):
            raise RefusedSource(f"{directory}/modules.json has a {kind} module; use task = 'raw' and apply it yourself")
    poolings = [_pooling(directory / path / "config.json") for kind, path in modules if kind == _POOLING]
    return (poolings or ["mean"])[0], any(kind == _NORMALIZE for kind, _ in modules)


def _pooling(file: Path) -> str:
    settings = _json(file)
    chosen = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    if isinstance(settings.get("pooling_mode"), str):
        chosen = [key for key, name in POOLINGS.items() if settings["pooling_mode"] in (name, f"{name}token")]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise RefusedSource(f"{file} pools by {chosen or settings}; known are {', '.join(POOLINGS)}: use task = 'raw'")
    return POOLINGS[chosen[0]]


def _sentence_modules(directory: Path) -> list[tuple[str, str]]:
    """Kind and folder of every step, in order."""
    try:
        steps = [(step["type"].rpartition(".")[2], step["path"]) for step in _json(directory / "modules.json")]
    except (TypeError, KeyError, AttributeError):
        raise RefusedSource(f"{directory}/modules.json does not list modules with a type and a path") from None
    for _, path in steps:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise RefusedSource(f"{directory}/modules.json leads out of its directory: {path}")
    return steps


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as fault:
        raise RefusedSource(f"{file} cannot be read: {fault}") from None
