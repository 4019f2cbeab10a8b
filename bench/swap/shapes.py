"""Which models are measured: their configurations, and what they are asked."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from dormouse.model.loaded import Inputs


@dataclass(frozen=True)
class Shape:
    """A model by its configuration: which class, and what it is asked."""

    name: str
    architecture: str
    config: Any
    inputs: Inputs
    dtype: str = "float32"
    task: str = "raw"
    tuned: bool = False
    """CPU only: a link so slow that the copy takes as long as the forward pass."""


def tokens(count: int, vocabulary: int) -> Inputs:
    return {"input_ids": (torch.arange(count).reshape(1, count) * 7 + 5) % vocabulary}


def picture() -> Inputs:
    return {"pixel_values": torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))}


def resnet_152() -> Any:
    return transformers.ResNetConfig(depths=[3, 8, 36, 3], hidden_sizes=[256, 512, 1024, 2048], layer_type="bottleneck")


def shapes(device: str) -> list[Shape]:
    bert, resnet = transformers.BertConfig(), resnet_152()
    if device == "cpu":
        minilm = transformers.BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536)
        return [
            Shape("MiniLM-L6 shape, 64 tokens", "BertModel", minilm, tokens(64, 30522)),
            Shape("ResNet-152 shape", "ResNetForImageClassification", resnet, picture()),
            Shape("BERT-base shape, 128 tokens", "BertModel", bert, tokens(128, 30522)),
            Shape("BERT-base shape, 128 tokens, tuned link", "BertModel", bert, tokens(128, 30522), tuned=True),
            Shape("ResNet-152 shape, tuned link", "ResNetForImageClassification", resnet, picture(), tuned=True),
        ]
    large = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    llama = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    return [
        Shape("ResNet-152 fp32", "ResNetForImageClassification", resnet, picture()),
        Shape("BERT-large fp32, 384 tokens", "BertModel", large, tokens(384, 30522)),
        Shape(
            "Llama-3-8B shape bf16, prefill 128",
            "LlamaForCausalLM",
            llama,
            tokens(128, 128256),
            dtype="bfloat16",
            task="next-token",
        ),
    ]
