"""What is kept of a model beside its weights, so that callers may send texts or pictures: pure data.

A deploy finds it out and it goes with the image; the gateway reads it for every request.
"""

from typing import Literal

from msgspec import Struct

TOKENIZER_FILE = "tokenizer.json"
"""In the image directory, as the tokenizers library writes it."""

Kind = Literal["embedding", "classification"]
Scoring = Literal["softmax", "sigmoid", "none"]
Resampling = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]


class TextInput(Struct, frozen=True):
    """How texts become token ids."""

    digest: str
    """Of the tokenizer's file: functions that share one share it in memory, too."""
    max_tokens: int
    truncates: bool
    """Whether the model's own configuration cuts texts that are longer; else they are refused."""
    pad_id: int = 0
    vocabulary: int = 0
    """Token ids are below this; 0: not known."""
    prompt: str = ""
    """Goes before every text."""
    lowers: bool = False
    """Texts are put into lower case first."""


class ImageInput(Struct, frozen=True):
    """How a picture becomes a tensor of colour, height and width."""

    name: str
    height: int
    width: int
    shortest_edge: int | None = None
    """The picture is resized so that its shorter edge has this length, and its middle taken; None: it is resized to
    height and width whatever its proportions."""
    resampling: Resampling = "bilinear"
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    deviation: tuple[float, ...] = (1.0, 1.0, 1.0)


class Task(Struct, frozen=True):
    """What a function answers texts or pictures with. ``output`` is the model's own output that says it."""

    kind: Kind
    output: str
    text: TextInput | None = None
    image: ImageInput | None = None
    labels: tuple[str, ...] = ()
    """By class; empty: the classes have numbers only."""
    scoring: Scoring = "softmax"
    dimensions: tuple[int, ...] | None = None
    """To which lengths an embedding may be cut and still be one; empty: to any; None: to none."""
