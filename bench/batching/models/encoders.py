"""The model that the bench serves: a small transformer encoder over 32 tokens, and a vector for the whole."""

import torch
from torch import nn

TOKENS = 32
WIDTH = 128


class Encoder(nn.Module):
    """Six layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        vector: torch.Tensor = self.layers(self.words(ids)).mean(1)
        return vector


def encoder() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return Encoder(), {"ids": torch.arange(TOKENS).reshape(1, TOKENS)}
