"""The demo's image classifiers, EfficientNet-lite, deployed as a factory: ``module:callable`` and its arguments."""

from pathlib import Path

import numpy as np
import torch

from dormouse.demo.code.classifiers import PIXELS, lite
from dormouse.demo.realmodel import Direct
from dormouse.demo.v2 import Array, Arrays
from dormouse.functions import Manifest

CODE = Path(__file__).parent / "code"
PICTURES = 8
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet, by colour."""


class Lite:
    def __init__(self, size: int) -> None:
        self._size = size

    def prepare(self) -> None:
        """Nothing: the factory reads the package's weights."""

    def write_source(self, name: str, seed: int, directory: Path) -> Manifest:
        del directory  # the source is code
        arguments = {"size": self._size, "seed": seed}
        return Manifest(name, "classifiers:lite", code=str(CODE), arguments=arguments)

    def direct(self, seed: int, directory: Path, device: torch.device) -> Direct:
        del directory
        model = lite(self._size, seed)[0].to(device)
        return lambda inputs: model(inputs["inputs"])

    def questions(self) -> list[Arrays]:
        return [{"inputs": picture(number, PIXELS[self._size])} for number in range(PICTURES)]


def picture(number: int, pixels: int) -> Array:
    """Waves of colour and a disc, normalized as photographs are for ImageNet models: ``[1, 3, pixels, pixels]``."""
    random = np.random.default_rng(number)
    across, down = np.meshgrid(np.linspace(0, 1, pixels), np.linspace(0, 1, pixels))
    disc = np.hypot(across - random.uniform(0.3, 0.7), down - random.uniform(0.3, 0.7)) < random.uniform(0.1, 0.4)
    colours = []
    for mean, deviation in zip(MEAN, DEVIATION, strict=True):
        along, over, phase = random.uniform(2, 40, 3)
        wave = 0.5 + 0.4 * np.sin(along * across + over * down + phase)
        colours.append((np.where(disc, random.uniform(), wave) - mean) / deviation)
    return np.stack(colours)[None].astype("<f4")
