"""Questions with their right answers, in a file: written where the references are made, read where answers arrive."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct

from dormouse.demo.v2 import Array, Arrays


class Example(Struct, frozen=True):
    question: Arrays
    answer: Array


def save(file: Path, examples: Sequence[Example]) -> None:
    arrays = {f"{number}/answer": example.answer for number, example in enumerate(examples)}
    for number, example in enumerate(examples):
        arrays |= {f"{number}/question/{name}": value for name, value in example.question.items()}
    with file.open("wb") as out:
        np.savez(out, **arrays)


def load(file: Path) -> list[Example]:
    with np.load(file, allow_pickle=False) as arrays:
        examples: dict[int, tuple[Arrays, list[Array]]] = {}
        for key in arrays.files:
            number, kind, *name = key.split("/")
            question, answers = examples.setdefault(int(number), ({}, []))
            if kind == "question":
                question[name[0]] = arrays[key]
            else:
                answers.append(arrays[key])
    return [Example(question, answer) for question, (answer,) in examples.values()]
