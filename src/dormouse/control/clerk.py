"""The server's end of the process that works on the ledger's SQLite (``billing/clerk``): starts it when something is to
be done, starts it again if it has died, and ends it."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path

from dormouse.billing.bills import Bill
from dormouse.billing.clerk import BillSince, Done, TakeIn, decode_answer, encode
from dormouse.core.types import Bytes, Ns
from dormouse.errors import StateNotKept

LONGEST_ANSWER_BYTES: Bytes = 256 * 1024 * 1024
END_S = 5.0
"""What it is doing may take so long; nothing is lost if it must be killed."""


class Clerk:
    """Of one server; asked one thing at a time."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    async def take_in(self) -> None:
        """All entries there are. Raises StateNotKept, OSError; then they stay where they are."""
        await self._ask(TakeIn())

    async def bill_since(self, since_ns: Ns) -> Bill:
        """By function, up to the moment before which nothing is missing. Raises StateNotKept, OSError."""
        bill = (await self._ask(BillSince(since_ns))).bill
        assert bill is not None, "that was the question"
        return bill

    async def _ask(self, question: TakeIn | BillSince) -> Done:
        async with self._turn:
            line = await self._line_for(encode(question) + b"\n")
        answer = decode_answer(line)
        if isinstance(answer, Done):
            return answer
        raise StateNotKept(answer.message)

    async def _line_for(self, question: bytes) -> bytes:
        process = await self._running()
        assert process.stdin is not None and process.stdout is not None, "made with pipes"
        line = b""
        try:
            process.stdin.write(question)
            with suppress(ConnectionError):
                await process.stdin.drain()
                line = await process.stdout.readline()
        finally:  # an answer that nobody has waited for would be taken for the next one's
            if not line.endswith(b"\n"):
                await self._end(process, at_once=True)
        if not line:
            raise StateNotKept("the process that writes the ledger's SQLite has ended; it is started again")
        return line

    async def _running(self) -> Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dormouse.billing.clerk",
                str(self._state_dir.absolute()),
                stdin=PIPE,
                stdout=PIPE,
                limit=LONGEST_ANSWER_BYTES,
                start_new_session=True,  # what interrupts the server is not meant for it
            )
        return self._process

    async def close(self) -> None:
        """Let it finish what it is doing, and go."""
        if self._process is not None:
            await self._end(self._process)

    async def _end(self, process: Process, *, at_once: bool = False) -> None:
        self._process = None
        assert process.stdin is not None, "made with pipes"
        if at_once:
            with suppress(ProcessLookupError):
                process.kill()
        process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
