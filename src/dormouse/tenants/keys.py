"""API keys: how one is made, and what is kept of it.

Only a SHA-256 of a key is kept. A slow hash, as passwords need, would gain nothing: those make guessing dear because
people choose what can be guessed, whereas a key has 256 random bits, beyond all guessing at any speed. It would cost
every request milliseconds.
"""

import hashlib
import re
import secrets

PREFIX = "dm_"
"""So that scanners for secrets, and people, know one when they see it."""
SECRET_BYTES = 32
SHORTEST_KEY = 32
"""In characters, of keys that are not made here; a weaker one could be guessed."""
LONGEST_KEY = 512

_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


def new_key() -> str:
    """A fresh key; nobody can have it twice."""
    return PREFIX + secrets.token_hex(SECRET_BYTES)


def digest_of(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()


def shown(digest: bytes) -> str:
    """A digest as files say it."""
    return f"sha256:{digest.hex()}"


def parse_digest(text: str) -> bytes | None:
    """The digest that a text says, with ``sha256:`` or without."""
    match = _DIGEST.fullmatch(text.strip().lower())
    return None if match is None else bytes.fromhex(match[1])
