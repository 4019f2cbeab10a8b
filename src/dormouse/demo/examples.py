"""Questions with their right answers, in a file: written where the references are made, read where answers arrive."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from safetensors.numpy import load_file, save_file

from dormouse.demo.v2 import Array, Arrays


class Example(Struct, frozen=True):
    question: Arrays
    answer: Array


def save(file: Path, examples: Sequence[Example]) -> None:
    arrays = {f"{number}/answer": example.answer for number, example in enumerate(examples)}
    for number, example in enumerate(examples):
        arrays |= {f"{number}/question/{name}": value for name, value in example.question.items()}
    save_file(arrays, file)


def load(file: Path) -> list[Example]:
    questions: dict[int, Arrays] = {}
    answers: dict[int, Array] = {}
    for key, array in load_file(file).items():
        number, kind, *name = key.split("/")
        if kind == "question":
            questions.setdefault(int(number), {})[name[0]] = array
        else:
            answers[int(number)] = array
    return [Example(questions[number], answers[number]) for number in sorted(answers)]
