"""Tenants as a TOML file declares them: their keys' digests and their limits. Complaints name file and line.

[default]                      # for every tenant, where it does not say otherwise
rate = 10

[tenants.acme]
rate = 50
burst = 100
concurrency = 8
keys = ["sha256:..."]
admin_keys = ["sha256:..."]

[server]                       # admin keys of nobody in particular
admin_keys = ["sha256:..."]
"""

import bisect
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import Struct

from dormouse.errors import ConfigurationFault
from dormouse.functions import NAME
from dormouse.tenants.callers import Caller
from dormouse.tenants.keys import parse_digest
from dormouse.tenants.limits import NO_LIMITS, Limits, complaint

Table = TypeVar("Table", bound=Struct)

_WHERE = re.compile(r"(?P<what>.*?)(?: - at `\$\.(?P<key>\w+)(?:\[.*)?`)?")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")


class _Server(Struct, frozen=True, forbid_unknown_fields=True):
    admin_keys: tuple[str, ...] = ()


class _Tenant(Limits, frozen=True, forbid_unknown_fields=True):
    keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()


class Declared(Struct, frozen=True):
    """What a file says."""

    callers: Mapping[bytes, Caller] = {}
    """By the digests of their keys."""
    limits: Mapping[str, Limits] = {}
    default: Limits = NO_LIMITS

    def limits_of(self, tenant: str) -> Limits:
        """The server's own requests have none."""
        return self.limits.get(tenant, self.default) if tenant else NO_LIMITS


def read(file: Path) -> Declared:
    """Raises ConfigurationFault naming file and line."""
    try:
        text = file.read_text()
    except OSError as fault:
        raise ConfigurationFault(f"{file} cannot be read: {fault.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationFault(f"{file} is no text") from None
    return _Reader(text, str(file)).declared()


class _Reader:
    """One file. Everything in it has a path, a key for each table and the last for the value."""

    def __init__(self, text: str, origin: str) -> None:
        self._text = text
        self._origin = origin

    def declared(self) -> Declared:
        try:
            values = tomllib.loads(self._text)
        except (tomllib.TOMLDecodeError, RecursionError) as fault:
            raise ConfigurationFault(f"{self._origin}{_located(str(fault))}") from None
        for key in values:
            if key not in ("default", "tenants", "server"):
                self._refuse((key,), "there is no such table; expected [default], [tenants.NAME] or [server]")
        default = self._limits(("default",), self._table(("default",), values.get("default", {}), Limits))
        server = self._table(("server",), values.get("server", {}), _Server)
        tenants = self._tenants(values.get("tenants", {}))
        callers: dict[bytes, Caller] = {}
        for path, digests, caller in _key_lists(server, tenants):
            for digest in self._digests(path, digests):
                if callers.setdefault(digest, caller) != caller:
                    self._refuse(path, "one of these keys is somebody else's, too")
        return Declared(callers, {name: _over(default, each) for name, each in tenants.items()}, default)

    def _tenants(self, given: object) -> dict[str, _Tenant]:
        if not isinstance(given, dict):
            self._refuse(("tenants",), "expected tables, one [tenants.NAME] for each")
        for name in given:
            if NAME.fullmatch(name) is None:
                self._refuse(
                    ("tenants", name), f"tenant {name!r}: a name has letters, digits, '.', '_' and '-', at most 128"
                )
        tables = {name: self._table(("tenants", name), each, _Tenant) for name, each in given.items()}
        return {name: self._limits(("tenants", name), table) for name, table in tables.items()}

    def _table(self, path: tuple[str, ...], given: object, kind: type[Table]) -> Table:
        try:
            return msgspec.convert(given, kind)
        except msgspec.ValidationError as fault:
            found = _WHERE.fullmatch(str(fault))
            assert found is not None, "a pattern that matches everything"
            unknown = _UNKNOWN.fullmatch(found["what"])
            key = found["key"] if unknown is None else unknown[1]
            what = found["what"] if unknown is None else f"there is no such setting: {key}"
            self._refuse(path if key is None else (*path, key), what if unknown or key is None else f"{key}: {what}")

    def _limits(self, path: tuple[str, ...], limits: Table) -> Table:
        assert isinstance(limits, Limits)
        found = complaint(limits)
        if found is not None:
            key, expected = found
            self._refuse((*path, key), f"{key} = {getattr(limits, key)} cannot be used; expected {expected}")
        return limits

    def _digests(self, path: tuple[str, ...], texts: tuple[str, ...]) -> Iterator[bytes]:
        for text in texts:
            digest = parse_digest(text)
            if digest is None:
                # Not repeated: it may be a key.
                self._refuse(path, f"{path[-1]}: expected sha256:... of keys, as `dormouse keys make` prints them")
            yield digest

    def _refuse(self, path: tuple[str, ...], what: str) -> NoReturn:
        raise ConfigurationFault(f"{self._origin}:{line_of(self._text, path)}: {what}")


def _key_lists(
    server: _Server, tenants: Mapping[str, _Tenant]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Caller]]:
    yield ("server", "admin_keys"), server.admin_keys, Caller("", admin=True)
    for name, tenant in tenants.items():
        yield ("tenants", name, "keys"), tenant.keys, Caller(name)
        yield ("tenants", name, "admin_keys"), tenant.admin_keys, Caller(name, admin=True)


def _over(default: Limits, own: Limits) -> Limits:
    """A rate of one's own has a burst of its own."""
    rate, burst = (default.rate, default.burst) if own.rate is None else (own.rate, own.burst)
    return Limits(rate, burst, default.concurrency if own.concurrency is None else own.concurrency)


def _located(fault: str) -> str:
    """A complaint of the TOML reader with its line in front, as everybody else says it."""
    found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", fault)
    return f": {fault}" if found is None else f":{found[2]}:{found[3]}: {found[1]}"


def line_of(text: str, path: tuple[str, ...]) -> int:
    """The line on which a value of a TOML text begins, counted from 1.

    TOML's reader does not say. But the text up to that line, and to the end of the value, is the shortest beginning
    that has the value: it is found by bisection.
    """
    lines = text.split("\n")

    def has(count: int) -> bool:
        return _contains(_beginning(lines, count), path)

    return bisect.bisect_left(range(len(lines)), x=True, lo=1, key=has)


def _beginning(lines: list[str], count: int) -> dict[str, Any]:
    """So many lines, or a few more until they are TOML."""
    for end in range(count, len(lines)):
        try:
            return tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:  # in the middle of a value
            continue
    return tomllib.loads("\n".join(lines))


def _contains(values: object, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True
