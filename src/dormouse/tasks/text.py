"""Texts to token ids, by the tokenizers library. Knows one tokenizer at a time, and no tensors."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from dormouse.errors import InvalidRequest
from dormouse.tasks.description import TextInput

MOST_TOKENIZERS = 64
"""Of those used last stay in memory, each some megabytes."""


MOST_CHARACTERS_A_TOKEN = 256
"""What is longer is not read to its end: nobody's text has so few tokens."""


class TooLong(InvalidRequest):
    """A text has more tokens than its model takes."""


def digest_of(definition: bytes) -> str:
    """What tells tokenizers apart."""
    return hashlib.sha256(definition).hexdigest()


def tokenizer_of(definition: bytes, text: TextInput | None = None) -> Tokenizer:
    """A tokenizer that does not pad, and cuts only what ``text`` says is cut. Raises ValueError."""
    try:
        tokenizer: Tokenizer = Tokenizer.from_buffer(definition)
    except Exception as fault:  # the library has no narrower one
        raise ValueError(str(fault)) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if text is not None and text.truncates:
        tokenizer.enable_truncation(text.max_tokens)
    return tokenizer


class Tokenizers:
    """The tokenizers in use, by what they are and not by whose."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], Tokenizer] = OrderedDict()

    def find(self, text: TextInput) -> Tokenizer | None:
        """One that is in memory."""
        found = self._known.get(_key(text))
        if found is not None:
            self._known.move_to_end(_key(text))
        return found

    def read(self, text: TextInput, file: Path) -> Tokenizer:
        """One that is not in memory yet. Raises OSError and ValueError. May run beside others."""
        tokenizer = tokenizer_of(file.read_bytes(), text)
        self._known[_key(text)] = tokenizer
        while len(self._known) > MOST_TOKENIZERS:
            self._known.popitem(last=False)
        return tokenizer


def _key(text: TextInput) -> tuple[str, int]:
    return text.digest, text.max_tokens if text.truncates else 0


def token_ids(text: TextInput, tokenizer: Tokenizer, texts: Sequence[str]) -> list[Sequence[int]]:
    """The ids of every text, with the model's special tokens. Raises TooLong."""
    most = MOST_CHARACTERS_A_TOKEN * text.max_tokens
    prepared = [_prepared(text, each, most) for each in texts]
    rows: list[Sequence[int]] = []
    for number, (each, encoding) in enumerate(zip(texts, tokenizer.encode_batch_fast(prepared), strict=True)):
        if len(each) > most and not text.truncates:
            raise TooLong(f"text {number} has {len(each)} characters; the model takes {text.max_tokens} tokens")
        rows.append(within(text, number, encoding.ids))
    return rows


def _prepared(text: TextInput, given: str, most: int) -> str:
    given = given[:most]
    return text.prompt + (given.lower() if text.lowers else given)


def within(text: TextInput, number: int, ids: Sequence[int]) -> Sequence[int]:
    """The ids, cut where the model's own configuration cuts. Raises TooLong, and InvalidRequest for what are none."""
    if not ids:
        raise InvalidRequest(f"text {number} has no tokens")
    if text.vocabulary and not 0 <= min(ids) <= max(ids) < text.vocabulary:
        raise InvalidRequest(f"text {number} has a token that is none of the model's {text.vocabulary}")
    if len(ids) > text.max_tokens and not text.truncates:
        raise TooLong(f"text {number} has {len(ids)} tokens; the model takes {text.max_tokens} at most")
    return ids[: text.max_tokens]
