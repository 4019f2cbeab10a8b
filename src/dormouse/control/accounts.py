"""The books of functions by name: what revisions that are no more had counted is kept, so that no count goes back.

A name keeps its counts when it is deployed anew. When it is removed, or becomes another tenant's, they go to a sum of
its owner's, so that the sum over all functions never falls and there are no more series than functions and tenants.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dormouse.control.catalog import Deployed
from dormouse.core.ledger import Ledger
from dormouse.core.state import Function, ImageState, State
from dormouse.core.types import FunctionId, Ns
from dormouse.functions import function_id, name_of
from dormouse.metrics.books import REMOVED, Books, DeviceBook, FunctionBook
from dormouse.store.host import HostStore


@dataclass(slots=True)
class _Past:
    """What revisions have counted that are no more, and those that are about to go."""

    ledger: Ledger = field(default_factory=Ledger)
    leaving: dict[FunctionId, Function] = field(default_factory=dict)

    def with_all(self, functions: Iterable[Function]) -> Ledger:
        """With those that are leaving, and others, each once."""
        everything = Ledger()
        everything.merge(self.ledger)
        for function in {**self.leaving, **{f.id: f for f in functions}}.values():
            everything.merge(function.ledger)
        return everything


class Accounts:
    """Of one node. ``leaving`` and then ``left`` for each revision that goes."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._past: dict[str, _Past] = {}
        self._gone: dict[str, _Past] = {}
        """By owner."""

    def leaving(self, name: str, function: FunctionId) -> None:
        """A revision goes; it still counts what it has queued."""
        known = self._state.functions.get(function)
        if known is not None:
            self._past.setdefault(name, _Past()).leaving[function] = known

    def left(self, function: FunctionId) -> None:
        """That revision is no more."""
        for past in (*self._gone.values(), *filter(None, [self._past.get(name_of(function))])):
            if (known := past.leaving.pop(function, None)) is not None:
                past.ledger.merge(known.ledger)

    def passed_on(self, name: str, owner: str) -> None:
        """The name is nobody's any more, or another's: what it has counted so far was its owner's."""
        past = self._past.pop(name, None)
        if past is not None:
            gone = self._gone.setdefault(owner, _Past())
            gone.ledger.merge(past.ledger)
            gone.leaving |= past.leaving

    # ------------------------------------------------------------------ books

    def books(self, deployed: Iterable[Deployed], devices: list[DeviceBook], store: HostStore, now: Ns) -> Books:
        """Everything there is to tell."""
        state = self._state
        functions = state.functions.values()
        in_host = [function for function in functions if function.image is ImageState.HOST]
        heads = [head.arrived_ns for function in functions if (head := function.head) is not None]
        return Books(
            functions=[self._book(each) for each in deployed],
            gone=list(self._books_gone()),
            devices=devices,
            host_capacity_bytes=state.settings.host_capacity_bytes,
            host_used_bytes=state.host_used_bytes,
            host_peak_bytes=store.arena.peak_bytes,
            host_waste_bytes=sum(function.host_bytes - function.spec.image_bytes for function in in_host),
            host_images=len(in_host),
            disk_images=sum(function.image is ImageState.DISK for function in functions),
            reading=state.reading,
            queued=state.queued,
            oldest_wait_ns=now - min(heads, default=now),
        )

    def _book(self, deployed: Deployed) -> FunctionBook:
        name = deployed.name
        function = self._state.functions.get(function_id(name, deployed.revision))
        past = self._past.get(name)
        if past is not None:
            ledger = past.with_all(() if function is None else (function,))
        else:
            ledger = Ledger() if function is None else function.ledger
        book = FunctionBook(name, deployed.manifest.tenant, ledger, image_bytes=deployed.image_bytes)
        if function is not None:
            book.queued = len(function.queue)
            book.compliant = function.ledger.compliant(function.spec.slo)
        return book

    def _books_gone(self) -> Iterator[FunctionBook]:
        """One for each tenant: what it owned, with its own requests to what others owned."""
        ledgers = {owner: past.with_all(()) for owner, past in self._gone.items()}
        for ledger in tuple(ledgers.values()):
            for guest, part in ledger.guests.items():
                ledgers.setdefault(guest, Ledger()).merge(part)
        for tenant, ledger in ledgers.items():
            yield FunctionBook(REMOVED, tenant, ledger)
