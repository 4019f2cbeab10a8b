"""Which functions the demo deploys: several real models, and of each several variants with weights of their own.

Says what a variant is called and how often it is asked for; how it is made is not known here.
"""

from collections.abc import Mapping
from itertools import count, zip_longest

from msgspec import Struct

SKEW = 0.9
"""Exponent of Zipf's law: the n-th most popular function is asked n ** -SKEW times as often as the first."""


class Model(Struct, frozen=True):
    """A real model. ``relative_tolerance`` is of the largest value of an answer; see comparison.py."""

    key: str
    title: str
    source: str
    image_mb: float
    """About."""
    preparation_s: int
    """About, the first time."""
    relative_tolerance: float
    is_ranking: bool = False
    """Its best value is what people use, so that must be the same one."""


class Variant(Struct, frozen=True):
    """One function: a model with weights changed by ``seed``. ``popularity`` is its share of all requests."""

    name: str
    model: Model
    seed: int
    popularity: float


# float32: a few hundred rounding errors. bfloat16 has 8 bits, so one rounding is already 0.4 % of a value.
_FLOAT32, _BFLOAT16 = 1e-4, 1e-2

MODELS = {
    model.key: model
    for model in (
        Model("minilm", "all-MiniLM-L6-v2, text embedding", "Hugging Face directory", 90.9, 8, _FLOAT32),
        Model("lite0", "EfficientNet-lite0, image classes", "module:callable", 18.8, 4, _FLOAT32, is_ranking=True),
        Model("lite1", "EfficientNet-lite1, image classes", "module:callable", 21.9, 4, _FLOAT32, is_ranking=True),
        Model(
            "smollm2",
            "SmolLM2-135M, next-token scores",
            "Hugging Face directory",
            269.1,
            40,
            _BFLOAT16,
            is_ranking=True,
        ),
        Model("crepe", "CREPE full, pitch of sound", ".pt2 file", 89.0, 12, _FLOAT32, is_ranking=True),
    )
}
COPIES = {"minilm": 9, "lite0": 5, "lite1": 5, "smollm2": 4, "crepe": 5}
"""How many variants of each: 28 functions of 2.5 GB."""


def fleet(copies: Mapping[str, int] = COPIES) -> tuple[Variant, ...]:
    """All variants, most popular first: models take turns, so that each has popular and rare ones."""
    rows = [[(MODELS[key], number) for number in range(1, copies[key] + 1)] for key in MODELS if copies.get(key)]
    ranked = [item for column in zip_longest(*rows) for item in column if item is not None]
    weights = [rank**-SKEW for rank, _ in zip(count(1), ranked, strict=False)]
    return tuple(
        Variant(f"{model.key}-{number}", model, number, weight / sum(weights))
        for (model, number), weight in zip(ranked, weights, strict=True)
    )
