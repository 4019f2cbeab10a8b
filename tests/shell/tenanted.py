"""A node of two tenants and a gate that knows them: acme, globex, and the operator. Time stands still in it."""

from dataclasses import dataclass, field
from pathlib import Path

from dormouse.functions import Manifest
from dormouse.tenants.callers import OPERATOR, Caller
from dormouse.tenants.gate import KeptGate
from dormouse.tenants.keyfile import KeyFile
from dormouse.tenants.keyring import Keyring
from dormouse.tenants.keys import digest_of
from dormouse.tenants.limits import NO_LIMITS, Limits
from tests.shell.in_memory import PROGRAMS, Deployed, InMemory

ACME, GLOBEX, ADMIN = "acme-key", "globex-key", "admin-key"
"""Keys."""
CALLERS = {ACME: Caller("acme"), GLOBEX: Caller("globex"), ADMIN: OPERATOR}

MINE, THEIRS, SHARED, INNER = "mine", "theirs", "shared", "inner"
"""Functions, as acme sees them: its own, globex's, globex's that is public, and the server's own."""
OWNERS = {MINE: ("acme", False), THEIRS: ("globex", False), SHARED: ("globex", True), INNER: ("", False)}
UNKNOWN = "nobody"
VISIBLE = {
    ACME: {MINE, SHARED},
    GLOBEX: {THEIRS, SHARED},
    ADMIN: {MINE, THEIRS, SHARED, INNER},
}


def tenanted(program: str = "running_total") -> InMemory:
    """A node of those functions, which all do the same."""
    node = InMemory()
    furnish(node, program)
    return node


def furnish(node: InMemory, program: str = "running_total") -> None:
    """Forget everything and deploy those functions."""
    vars(node).update(vars(InMemory()))
    for name, (tenant, public) in OWNERS.items():
        manifest = Manifest(name, f"arithmetic:{program}", tenant=tenant, public=public)
        node.deployed[name] = Deployed(manifest, 1, *PROGRAMS[program])


@dataclass
class Kept:
    """A gate, and what a test moves: the time, and what tenants may."""

    directory: Path
    now_ns: int = 0
    limits: dict[str, Limits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys = {digest_of(key.encode()): caller for key, caller in CALLERS.items()}
        ring = Keyring(keys, KeyFile(self.directory))
        self.gate = KeptGate(ring, lambda tenant: self.limits.get(tenant, NO_LIMITS), lambda: self.now_ns)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
