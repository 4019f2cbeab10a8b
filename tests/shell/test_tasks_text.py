"""Texts to tensors and back: tokens, what is too long, alike rows together, labels, shortened embeddings."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.errors import InvalidRequest
from dormouse.tasks import rows
from dormouse.tasks.answers import ranked, shortened
from dormouse.tasks.description import ImageInput, Task, TextInput
from dormouse.tasks.text import MOST_TOKENIZERS, Tokenizers, TooLong, digest_of, token_ids, tokenizer_of
from dormouse.tensors import Signature, Tensor, TensorSpec
from tests.shell.tiny_models import save_tokenizer

BERT = Signature(
    (
        TensorSpec("input_ids", "INT64", (-1, -1)),
        TensorSpec("attention_mask", "INT32", (-1, -1), optional=True),
        TensorSpec("token_type_ids", "INT64", (-1, -1), optional=True),
    ),
    (TensorSpec("embedding", "FP32", (-1, 4)),),
)


def text_input(**changes: object) -> TextInput:
    values = {"digest": "d", "max_tokens": 6, "truncates": False, "vocabulary": 14} | changes
    return TextInput(**values)  # type: ignore[arg-type]  # values of a test


@pytest.fixture(scope="module")
def definition(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return (directory / "tokenizer.json").read_bytes()


# ------------------------------------------------------------------ tokens


def test_texts_become_ids_with_special_tokens_and_the_prompt(definition: bytes) -> None:
    tokenizer = tokenizer_of(definition)
    assert token_ids(text_input(), tokenizer, ["a dormouse", "what"]) == [[2, 4, 5, 3], [2, 1, 3]]
    assert token_ids(text_input(prompt="all ", lowers=True), tokenizer, ["A NUTS"]) == [[2, 7, 4, 11, 3]]


def test_what_is_too_long_is_refused_or_cut_as_the_model_says(definition: bytes) -> None:
    long = "a a a a a a a"
    with pytest.raises(TooLong, match="text 1 has 9 tokens; the model takes 6 at most"):
        token_ids(text_input(), tokenizer_of(definition), ["a", long])
    cutting = text_input(truncates=True)
    assert token_ids(cutting, tokenizer_of(definition, cutting), [long]) == [[2, 4, 4, 4, 4, 3]]


def test_what_is_absurdly_long_is_not_read_to_its_end(definition: bytes) -> None:
    absurd = " " * 100_000 + "a"
    with pytest.raises(TooLong, match="text 0 has 100001 characters"):
        token_ids(text_input(), tokenizer_of(definition), [absurd])
    cutting = text_input(truncates=True)
    assert token_ids(cutting, tokenizer_of(definition, cutting), [absurd]) == [[2, 3]]


def test_tokenizers_are_shared_by_what_they_are_and_the_oldest_goes(definition: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(definition)
    known, text = Tokenizers(), text_input(digest=digest_of(definition))
    assert known.find(text) is None
    first = known.read(text, tmp_path / "t.json")
    assert known.find(text) is first
    assert known.find(text_input(digest=text.digest, truncates=True)) is None
    for number in range(MOST_TOKENIZERS):
        known.read(text_input(digest=str(number)), tmp_path / "t.json")
    assert known.find(text) is None


def test_what_is_no_tokenizer_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="Cannot instantiate Tokenizer"):
        tokenizer_of(b"no")


# ------------------------------------------------------------------ rows


@given(st.lists(st.lists(st.integers(0, 13), min_size=1, max_size=40), min_size=1, max_size=120), st.booleans())
def test_every_row_is_in_one_request_unharmed_and_the_answers_come_back_in_order(
    asked: list[list[int]], masked: bool
) -> None:
    signature = BERT if masked else Signature(BERT.inputs[:1], BERT.outputs)
    found: list[tuple[rows.Part, Tensor]] = []
    for part in rows.of_tokens(text_input(max_tokens=40), signature, asked):
        tensors = {tensor.name: tensor for tensor in part.inputs}
        ids = np.frombuffer(tensors["input_ids"].data, "<i8").reshape(tensors["input_ids"].shape)
        assert len(ids) == len(part.places) <= rows.MOST_ROWS
        assert len(ids) & (len(ids) - 1) == 0
        assert ids.size <= rows.MOST_TOKENS
        assert "token_type_ids" not in tensors
        if masked:
            mask = np.frombuffer(tensors["attention_mask"].data, "<i4").reshape(ids.shape)
            assert ids.shape[1] in (*rows.LENGTHS, 40)
            for place, row, kept in zip(part.places, ids, mask, strict=True):
                assert row[kept == 1].tolist() == asked[place]
                assert kept.tolist() == sorted(kept.tolist(), reverse=True)
        else:
            assert [row.tolist() for row in ids] == [asked[place] for place in part.places]
        sums = np.array([[sum(asked[place])] for place in part.places], "<f4")
        found.append((part, Tensor("y", "FP32", sums.shape, sums.tobytes())))
    joined = rows.joined(len(asked), found, np.dtype("<f4"))
    assert joined.reshape(-1).tolist() == [sum(row) for row in asked]


def test_functions_of_a_fixed_size_get_that_size() -> None:
    fixed = (TensorSpec("input_ids", "INT32", (1, 8)), TensorSpec("attention_mask", "INT64", (1, 8)))
    parts = list(rows.of_tokens(text_input(pad_id=9), Signature(fixed, ()), [[1, 2], [3]]))
    assert [part.places for part in parts] == [(0,), (1,)]
    assert np.frombuffer(parts[0].inputs[0].data, "<i4").tolist() == [1, 2, 9, 9, 9, 9, 9, 9]
    with pytest.raises(InvalidRequest, match="a text has 9 tokens, the function takes 8"):
        list(rows.of_tokens(text_input(), Signature(fixed, ()), [list(range(9))]))


def test_pictures_go_together_in_powers_of_two() -> None:
    spec = TensorSpec("x", "FP16", (-1, 3, 2, 2))
    pictures = [np.full((3, 2, 2), number, np.float32) for number in range(11)]
    parts = list(rows.of_pictures(ImageInput("x", 2, 2), Signature((spec,), ()), pictures))
    assert [part.places for part in parts] == [tuple(range(8)), (8, 9), (10,)]
    assert np.frombuffer(parts[2].inputs[0].data, "<f2").tolist() == [10] * 12


def test_large_pictures_go_alone() -> None:
    spec = TensorSpec("x", "FP32", (-1, 3, 1024, 1024))
    large = [np.zeros((3, 1024, 1024), np.float32)] * 2
    parts = list(rows.of_pictures(ImageInput("x", 1024, 1024), Signature((spec,), ()), large))
    assert [part.places for part in parts] == [(0,), (1,)]


def test_answers_without_rows_are_refused() -> None:
    part = rows.Part((0, 1), ())
    with pytest.raises(InvalidRequest, match=r"output 'y' has the shape \[1, 1\], no row for every input"):
        rows.joined(2, [(part, Tensor("y", "FP32", (1, 1), bytes(4)))], np.dtype("<f4"))


# ------------------------------------------------------------------ answers


def test_labels_come_with_their_scores_the_likeliest_first() -> None:
    task = Task("classification", "logits", labels=("cat", "dog"))
    best = ranked(task, np.array([[0.0, 1.0, 0.5]], np.float32), 2)
    assert best.labels == [["dog", "2"]]
    np.testing.assert_allclose(best.scores, [[0.5064804, 0.3071959]], rtol=1e-6)
    sure = Task("classification", "logits", scoring="sigmoid")
    np.testing.assert_allclose(ranked(sure, np.array([[-1000.0, 0.0]], np.float32), 9).scores, [[0.5, 0]])
    plain = Task("classification", "logits", scoring="none")
    assert ranked(plain, np.array([[3.0, 3.0, 7.0]], np.float32), 9).labels == [["2", "0", "1"]]


def test_embeddings_are_shortened_only_where_the_model_is_made_for_it() -> None:
    vectors = np.array([[3.0, 4.0, 12.0]], np.float32)
    any_length = Task("embedding", "embedding", dimensions=())
    np.testing.assert_allclose(shortened(any_length, vectors, 2), [[0.6, 0.8]], rtol=1e-6)
    assert shortened(any_length, vectors, None) is vectors
    for task, complaint in (
        (Task("embedding", "embedding"), "dimensions is 2, the model's embeddings have 3 and are not made to be cut"),
        (Task("embedding", "embedding", dimensions=(1, 3)), "dimensions is 2, the model's embeddings can have 1, 3"),
    ):
        with pytest.raises(InvalidRequest, match=complaint):
            shortened(task, vectors, 2)
    with pytest.raises(InvalidRequest, match="can have 1 to 3"):
        shortened(any_length, vectors, 4)
