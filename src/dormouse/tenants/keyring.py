"""All keys that a server knows, wherever they come from: the state directory, a file of tenants, the environment.

Keys of the state directory may come and go at any time: its file's time is looked at whenever a key is. The keys of
one digest's beginning are found in a table, and then compared as a whole in constant time; how long the table takes
depends on a digest, of which nobody learns a key.
"""

import hmac
import logging
from collections.abc import Mapping

from dormouse.errors import ConfigurationFault
from dormouse.tenants.callers import Caller
from dormouse.tenants.keyfile import KeyFile
from dormouse.tenants.keys import LONGEST_KEY, SHORTEST_KEY, digest_of, parse_digest

ADMIN_KEY_VARIABLE = "DORMOUSE_ADMIN_KEY"

_LOG = logging.getLogger("dormouse.tenants")
_BEGINNING = 8


def admin_key_of(environment: Mapping[str, str]) -> dict[bytes, Caller]:
    """The admin key that the environment gives, by its digest. Raises ConfigurationFault for one that is too short."""
    key = environment.get(ADMIN_KEY_VARIABLE, "")
    if not key:
        return {}
    if not SHORTEST_KEY <= len(key) <= LONGEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigurationFault(
            f"{ADMIN_KEY_VARIABLE} cannot be used; expected {SHORTEST_KEY} to {LONGEST_KEY} random characters, "
            "as `dormouse keys make` prints them"
        )
    return {digest_of(key.encode()): Caller("", admin=True)}


class Keyring:
    """``fixed``: callers by the digests of keys that do not change. Raises ConfigurationFault if a key file is none."""

    def __init__(self, fixed: Mapping[bytes, Caller], file: KeyFile) -> None:
        self._fixed = fixed
        self._file = file
        self._stamp = file.stamp()
        self._known = self._read()

    def find(self, key: bytes) -> Caller | None:
        """Whose key that is."""
        self._refresh()
        digest = digest_of(key)
        found = self._known.get(digest[:_BEGINNING])
        return found[1] if found is not None and hmac.compare_digest(found[0], digest) else None

    def is_empty(self) -> bool:
        return not self._known

    def has_admin(self) -> bool:
        return any(caller.admin for _, caller in self._known.values())

    def _refresh(self) -> None:
        """A file that has become unreadable revokes nothing and lets in nobody new."""
        try:
            stamp = self._file.stamp()
            if stamp != self._stamp:
                self._stamp = stamp
                self._known = self._read()
        except ConfigurationFault as fault:
            _LOG.error("keys stay as they were: %s", fault.message)

    def _read(self) -> dict[bytes, tuple[bytes, Caller]]:
        known = {digest[:_BEGINNING]: (digest, caller) for digest, caller in self._fixed.items()}
        for record in self._file.records():
            digest = parse_digest(record.digest)
            assert digest is not None, "the file's reader has looked"
            known[digest[:_BEGINNING]] = (digest, record.caller)
        return known
