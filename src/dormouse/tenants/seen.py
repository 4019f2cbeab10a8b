"""A node as one caller sees it: everything that is not theirs is not there. Decides nothing but that.

What is not for the caller is refused in the words in which an unknown name is, before anything else is looked at, so
that neither status nor text tells the two apart.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from dormouse.errors import unknown_function
from dormouse.functions import Manifest
from dormouse.metrics.books import Books
from dormouse.submit import Chunk, Description, IndexEntry, Inference, Owner, Statistics, Submit
from dormouse.tenants.callers import Caller
from dormouse.watch.picture import Picture, totals_of


class Seen:
    """Implements ``submit.Submit`` over another one."""

    def __init__(self, submit: Submit, caller: Caller) -> None:
        self._submit = submit
        self._caller = caller

    def live(self) -> bool:
        return self._submit.live()

    def ready(self) -> bool:
        return self._submit.ready()

    # ------------------------------------------------------------------ what there is

    def owner(self, name: str) -> Owner:
        owner = self._submit.owner(name)
        if not self._caller.may_see(owner):
            raise unknown_function(name)
        return owner

    def describe(self, name: str, version: str | None = None) -> Description:
        self.owner(name)
        return self._submit.describe(name, version)

    def function_ready(self, name: str, version: str | None = None) -> bool:
        self.owner(name)
        return self._submit.function_ready(name, version)

    def index(self) -> Sequence[IndexEntry]:
        return [entry for entry in self._submit.index() if self._sees(entry.name)]

    def statistics(self, name: str | None = None, version: str | None = None) -> Sequence[Statistics]:
        if name is not None:
            self.owner(name)
        return [each for each in self._submit.statistics(name, version) if self._sees(each.name)]

    def functions(self) -> list[dict[str, Any]]:
        """Only the caller's own: a row tells where a source lies, and who else has been served how."""
        return [row for row in self._submit.functions() if self._owns(row["name"])]

    def function(self, name: str) -> dict[str, Any]:
        if not self._owns(name):
            raise unknown_function(name)
        return self._submit.function(name)

    def picture(self) -> Picture:
        """A tenant's is of its own functions: what else lies on a device, and where, is not its business."""
        picture = self._submit.picture()
        if self._caller.admin:
            return picture
        functions = {name: row for name, row in picture.functions.items() if row.tenant == self._caller.tenant}
        functions = functions if self._caller.tenant else {}
        return msgspec.structs.replace(
            picture,
            functions=functions,
            histories={name: points for name, points in picture.histories.items() if name in functions},
            totals=totals_of(functions),
            queue=tuple(waiting for waiting in picture.queue if waiting.function in functions),
            node=False,
            devices=(),
            loads=(),
            host=None,
        )

    def _owns(self, name: str) -> bool:
        return self._caller.owns(self._submit.owner(name))

    def _sees(self, name: str) -> bool:
        return self._caller.admin or self._caller.may_see(self._submit.owner(name))

    # ------------------------------------------------------------------ requests

    def infer(self, inference: Inference) -> AsyncGenerator[Chunk, None]:
        self.owner(inference.name)
        if inference.tenant != self._caller.tenant:
            inference = msgspec.structs.replace(inference, tenant=self._caller.tenant)
        return self._submit.infer(inference)

    # ------------------------------------------------------------------ operations

    async def load(self, name: str) -> None:
        self._check_operates(name, "loading a function")
        await self._submit.load(name)

    async def unload(self, name: str) -> None:
        self._check_operates(name, "unloading a function")
        await self._submit.unload(name)

    async def remove(self, name: str) -> None:
        self._check_operates(name, "removing a function")
        await self._submit.remove(name)

    async def deploy(self, manifest: Manifest) -> str:
        self._caller.check_admin("deploying a function")
        return await self._submit.deploy(self._signed(manifest))

    async def check(self, manifest: Manifest) -> dict[str, Any]:
        self._caller.check_admin("checking a function")
        return await self._submit.check(self._signed(manifest))

    def node(self) -> dict[str, Any]:
        self._caller.check_admin("looking at the node")
        return self._submit.node()

    def books(self) -> Books:
        self._caller.check_admin("reading metrics")
        return self._submit.books()

    def _check_operates(self, name: str, what: str) -> None:
        """Unknown comes first: who may not see a function is not told that it could be operated."""
        self.owner(name)
        self._caller.check_admin(what)

    def _signed(self, manifest: Manifest) -> Manifest:
        """A function is whose the manifest says, else the one's who deploys it."""
        return manifest if manifest.tenant else msgspec.structs.replace(manifest, tenant=self._caller.tenant)
