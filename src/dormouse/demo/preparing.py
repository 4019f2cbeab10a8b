"""Makes variants of one model, with right answers: ``python -m dormouse.demo.preparing``, a process of its own.

Reads a Start, then Orders, one JSON line each; answers an Order with a line, a Manifest to deploy. So there is one
model in memory at a time, and whoever orders says how far ahead sources are written.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import msgspec
import torch

from dormouse.demo.examples import save
from dormouse.demo.fleet import MODELS
from dormouse.demo.messages import Order, Start
from dormouse.demo.realmodel import RealModel
from dormouse.demo.references import examples_of


def model_of(key: str, cache: Path) -> RealModel:
    """The real model; only the libraries that it needs are imported."""
    return _MODELS[key](cache)


def _text(key: str, cache: Path) -> RealModel:
    from dormouse.demo import text

    return text.MiniLm() if key == "minilm" else text.SmolLm2(cache)


def _classifier(size: int) -> RealModel:
    from dormouse.demo.images import Lite

    return Lite(size)


def _pitch(cache: Path) -> RealModel:
    from dormouse.demo.sound import Crepe

    return Crepe(cache)


_MODELS: dict[str, Callable[[Path], RealModel]] = {
    "minilm": lambda cache: _text("minilm", cache),
    "smollm2": lambda cache: _text("smollm2", cache),
    "lite0": lambda _: _classifier(0),
    "lite1": lambda _: _classifier(1),
    "crepe": _pitch,
}


def device_of(setting: str) -> torch.device:
    """Where the server's ``--device`` runs a model."""
    if setting == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return torch.device("cuda:0" if setting == "cuda" else setting)


def prepare(start: Start, orders: TextIO, out: TextIO) -> None:
    torch.set_num_threads(start.threads)
    model, device = model_of(start.model, Path(start.cache)), device_of(start.device)
    model.prepare()
    questions = model.questions()
    for line in orders:
        order = msgspec.json.decode(line, type=Order)
        directory = Path(order.directory)
        manifest = model.write_source(order.name, order.seed, directory)
        direct = model.direct(order.seed, directory, device)
        save(
            Path(order.examples),
            examples_of(direct, questions, device, is_ranking=MODELS[start.model].is_ranking),
        )
        del direct
        print(msgspec.json.encode(manifest).decode(), file=out, flush=True)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    start = msgspec.json.decode(sys.stdin.readline(), type=Start)
    prepare(start, sys.stdin, out)


if __name__ == "__main__":
    main()
