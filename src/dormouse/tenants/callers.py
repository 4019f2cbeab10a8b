"""A caller: on whose account somebody asks, and whether they may operate the server. Pure."""

from msgspec import Struct

from dormouse.errors import Forbidden
from dormouse.submit import Owner


class Caller(Struct, frozen=True):
    """Whoever has shown a key. ``tenant`` empty: the server's own."""

    tenant: str
    admin: bool = False

    def may_see(self, owner: Owner) -> bool:
        """See, and call: there is nothing that a tenant may see and not call."""
        return self.admin or owner.public or self.owns(owner)

    def owns(self, owner: Owner) -> bool:
        """The server's own functions are nobody's but the operator's."""
        return self.admin or (owner.tenant == self.tenant and self.tenant != "")

    def check_admin(self, what: str) -> None:
        """Raises Forbidden: what only the operator may do."""
        if not self.admin:
            raise Forbidden(f"{what} needs an admin key; the key given is one of tenant {self.tenant!r}")


STRANGER = Caller("")
"""Who has shown no key: sees what is public, where it is let in at all."""
OPERATOR = Caller("", admin=True)
"""Anybody, where nobody has to say who they are."""
