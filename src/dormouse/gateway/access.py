"""Who asks over HTTP: the key is found in the head, before any body is read, and each caller gets routes of its own.

Handlers are made for a Submit, and each caller's Submit is the node as that caller sees it; so no handler knows that
there are others.
"""

from collections.abc import Callable, Mapping

from starlette.types import Scope

from dormouse.gateway.answers import Handler
from dormouse.submit import Submit
from dormouse.tenants.callers import Caller
from dormouse.tenants.gate import KEY_HEADERS
from dormouse.tenants.seen import Seen

Table = Mapping[str, Mapping[str, Handler]]
"""Handlers by path and method."""

OPEN_PATHS = frozenset(("/v2/health/live", "/v2/health/ready", "/openapi.json"))
"""Those that need no key and count against no limit: what load balancers ask, and what is no secret."""

_WANTED = {name.encode(): name for name in KEY_HEADERS}


class Views:
    """The routes of each caller, made when it first comes; there are no more of them than tenants, twice."""

    def __init__(self, submit: Submit, made: Callable[[Submit], Table]) -> None:
        self._submit = submit
        self._made = made
        self._tables: dict[Caller, Table] = {}

    def of(self, caller: Caller) -> Table:
        table = self._tables.get(caller)
        if table is None:
            table = self._tables[caller] = self._made(Seen(self._submit, caller))
        return table


def key_headers(scope: Scope) -> dict[str, str]:
    """The headers in which there may be a key; of several, the first."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name in _WANTED:
            found.setdefault(_WANTED[name], value.decode("latin-1"))
    return found
