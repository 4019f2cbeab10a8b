"""Hands an answer out only after its entry has been written, and keeps the ledger's time.

What nobody waits for is written with the next entry, or a second later. Entries go on to SQLite in a process of their
own (``clerk``).
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from dormouse.billing.bills import Bill
from dormouse.billing.database import Database
from dormouse.billing.records import Record, RequestEnded, RequestVoided, request_name
from dormouse.billing.segments import Sync
from dormouse.billing.tariffs import Written, ensure_default, read_tariff, set_tariff, time_text
from dormouse.billing.writer import LedgerWriter
from dormouse.control.bookkeeping import Bookkeeper
from dormouse.control.clerk import END_S, Clerk
from dormouse.control.costs import Costs
from dormouse.control.payloads import Answer, Outputs, Payloads
from dormouse.core.messages import Command, Event
from dormouse.core.state import State
from dormouse.core.types import Bytes, FunctionId, Ns, Reason, RequestId
from dormouse.errors import ConfigurationFault, DormouseError, StateNotKept

_LOG = logging.getLogger("dormouse.control")
BEAT_S = 5.0
"""A crash loses at most so much of what memory costs, in the customer's favour."""
TAKE_IN_S = 2.0
"""So long after an entry SQLite has it."""

CLOCKS_DIFFER_NS: Ns = 60_000_000_000
"""From here on somebody should hear of it."""

Answers = asyncio.Queue[Answer | DormouseError]


class Cashier:
    """The ledger of one life of a server. In the event loop's thread; made by ``open``."""

    def __init__(
        self, database: Database, writer: LedgerWriter, bookkeeper: Bookkeeper, tariff: Written | None
    ) -> None:
        self._database = database
        self._writer = writer
        self._bookkeeper = bookkeeper
        self._tariff = tariff
        self._loop = asyncio.get_running_loop()
        self._disk = ThreadPoolExecutor(1, "ledger")
        self._clerk = Clerk(database.state_dir)
        self._held: list[tuple[RequestId, Answers, Answer]] = []
        self._syncing: asyncio.Task[None] | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._tending: asyncio.TimerHandle | None = None
        self._taking: asyncio.Task[None] | None = None
        self._complained = False

    @classmethod
    def open(cls, state_dir: Path, sync: Sync, tariff: Path | None, payloads: Payloads, now: Ns) -> "Cashier":
        """Begins a life; what the last one left is put in order first. Raises ConfigurationFault."""
        written = None if tariff is None else read_tariff(tariff)
        database = Database(state_dir)
        try:
            now_ns = time.time_ns()
            life, began_ns, segment = database.begin_life(now_ns)
            writer = LedgerWriter(database.directory, life, sync, after=segment)
        except (StateNotKept, OSError) as fault:
            database.close()
            why = fault.strerror if isinstance(fault, OSError) else fault.message
            message = f"the ledger in {state_dir} cannot be written ({why}); make room, or serve with --ledger off"
            raise ConfigurationFault(message) from None
        _warn_of_clock(state_dir, began_ns, now_ns)
        return cls(database, writer, Bookkeeper(payloads, began_ns - now), written)

    def begin(self, device_bytes: Bytes) -> None:
        """The devices are there. Raises what setting the tariff raises."""
        ensure_default(self._database, device_bytes)
        if self._tariff is not None:
            set_tariff(self._database, self._tariff)
        self._beat()

    def _beat(self) -> None:
        self._writer.beat(self._bookkeeper.wall(time.monotonic_ns()))
        self._tend_soon()
        self._beating = self._loop.call_later(BEAT_S, self._beat)

    # ------------------------------------------------------------------ entries

    def name_of(self, request: RequestId) -> str:
        """What its caller may call it, and its bill."""
        return request_name(self._writer.life, request)

    def belongs(self, function: FunctionId, owner: str) -> None:
        """Said before a function is deployed."""
        self._bookkeeper.owners[function] = owner

    def check(self) -> None:
        """Whether answers can be billed. Raises StateNotKept, at no cost to any device, until there is room again."""
        if self._writer.fault is not None and (fault := self._writer.flush()) is not None:
            raise fault

    def book(self, now: Ns, event: Event, commands: list[Command], outputs: Outputs, state: State) -> None:
        """Record one turn; before its commands are performed."""
        records = self._bookkeeper.records(now, event, commands, outputs, state)
        if records:
            self._write(records)

    def _write(self, records: list[Record]) -> None:
        if any(type(record) is RequestEnded and not record.reason for record in records):
            self._writer.enter(records)
        else:
            self._writer.note(records)
        self._tend_soon()

    def hand_out(self, request: RequestId, answers: Answers, answer: Answer) -> None:
        """Give its caller an answer whose turn has been booked; or, if that failed, say so."""
        if self._writer.fault is not None:
            answers.put_nowait(self._writer.fault)
        elif self._writer.survives == "process":
            answers.put_nowait(answer)
        else:
            self._held.append((request, answers, answer))
            if self._syncing is None:
                self._syncing = self._loop.create_task(self._sync_held())

    async def _sync_held(self) -> None:
        """All that came while the disk was busy goes with the next write to it."""
        while self._held:
            batch, self._held = self._held, []
            try:
                await self._loop.run_in_executor(self._disk, self._writer.sync)
            except OSError as fault:
                self._void(batch, fault)
            else:
                for _, answers, answer in batch:
                    answers.put_nowait(answer)
        self._syncing = None

    def _void(self, batch: Iterable[tuple[RequestId, Answers, Answer]], fault: OSError) -> None:
        """Nobody knows what of these has reached the disk; they are not handed out, so they are not billed."""
        error = StateNotKept(
            f"the ledger cannot be written ({fault.strerror}), and what cannot be billed is not answered"
        )
        at_ns = self._bookkeeper.wall(time.monotonic_ns())
        self._writer.note([RequestVoided(request, at_ns) for request, _, _ in batch])
        self._writer.flush()
        for _, answers, _ in batch:
            answers.put_nowait(error)

    # ------------------------------------------------------------------ SQLite

    def _tend_soon(self) -> None:
        if self._tending is None:
            self._tending = self._loop.call_later(TAKE_IN_S, self._tend)

    def _tend(self) -> None:
        self._tending = None
        self._writer.flush()
        if self._taking is None or self._taking.done():
            self._taking = self._loop.create_task(self._take_in())

    async def _take_in(self) -> None:
        try:
            await self._clerk.take_in()
            self._complained = False
        except (StateNotKept, OSError) as fault:
            self._complain(fault)

    def _complain(self, fault: Exception) -> None:
        if not self._complained:
            _LOG.error("entries stay in %s for the time being: %s", self._database.directory, fault)
        self._complained = True

    async def _take_in_at_last(self, until_s: float) -> None:
        """What is not in SQLite then, because somebody else holds it, the next life takes in, or a bill."""
        if self._taking is not None:
            await asyncio.wait([self._taking], timeout=until_s - self._loop.time())
            self._taking.cancel()  # which ends the clerk, if it is still waiting
            await asyncio.gather(self._taking, return_exceptions=True)
        await self._clerk.close()
        try:
            await asyncio.to_thread(self._database.take_in, max(0.0, until_s - self._loop.time()))
        except (StateNotKept, OSError) as fault:
            self._complain(fault)

    # ------------------------------------------------------------------ what it comes to

    def costs(self) -> Costs:
        """From now on."""
        return Costs(self._bill_since, self._bookkeeper.wall(time.monotonic_ns()))

    async def _bill_since(self, since_ns: Ns) -> Bill:
        self._writer.flush()
        return await self._clerk.bill_since(since_ns)

    # ------------------------------------------------------------------ the end

    async def close(self, now: Ns) -> None:
        """Record what is still open as refused, and that this life has ended."""
        for timer in filter(None, (self._beating, self._tending)):
            timer.cancel()
        if self._syncing is not None:
            await self._syncing
        self._writer.note(self._bookkeeper.shut_down(now, Reason.SHUTTING_DOWN))
        self._writer.beat(self._bookkeeper.wall(now), last=True)
        await self._take_in_at_last(self._loop.time() + END_S)
        self._disk.shutdown()
        self._writer.close()
        self._database.close()


def _warn_of_clock(state_dir: Path, began_ns: Ns, now_ns: Ns) -> None:
    """The ledger's time never runs back; where it is not this machine's, somebody should know before bills are made."""
    if began_ns - now_ns > CLOCKS_DIFFER_NS:
        _LOG.warning(
            "this machine's clock is %s behind the ledger in %s, which goes on from %s: until the clock is there, "
            "all that happens is dated ahead by that much. If it was an earlier start's clock that was wrong, begin a "
            "new ledger: stop the server, and move ledger.sqlite and ledger/ to where the bills up to now can be made",
            timedelta(seconds=(began_ns - now_ns) // 1_000_000_000),
            state_dir,
            time_text(began_ns),
        )
