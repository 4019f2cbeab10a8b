"""The server's end of the processes that decode pictures (``decoder``): a few, started when they are needed.

A process works on one picture at a time. Who does not wait for its end, ends it: the process is killed, and another
one is started for the next picture. What takes a while never has all of them, so that what does not finds one.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from dormouse.core.types import Bytes, Ns
from dormouse.errors import DormouseError, InvalidRequest, Unavailable
from dormouse.tasks.decoder import OVER_TIME, Answer, Decode, Decoded, Refused, decode_answer, encode
from dormouse.tasks.description import ImageInput
from dormouse.tasks.images import Pixels
from dormouse.tasks.turns import Turns

PROCESSES = 2
CPU_NS: Ns = 10_000_000_000
"""Of all pictures of one request together."""
LIGHT_CPU_NS: Ns = 1_000_000_000
"""What has taken longer without an end is begun again among those that take a while."""
LEAST_CPU_NS: Ns = 1_000_000
BYTES_A_PIXEL = 16
"""As it is decoded, turned and put into three colours; with what a progressive JPEG keeps."""
BESIDE_PIXELS_BYTES: Bytes = 384 * 1024 * 1024
"""The process itself, the picture's file, the tensor."""
PIECE_BYTES: Bytes = 1024 * 1024
"""So much is copied without a look at other requests."""
KEPT_BYTES: Bytes = 4 * 1024 * 1024
"""So much shared memory stays with an idle process."""
RETRY_AFTER_S = 1.0

File = bytes | memoryview


class OverTime(Exception):
    """The kernel has ended a process whose picture took longer than its question allowed."""


@dataclass
class Allowance:
    """The processor time that the pictures of one request may yet take."""

    cpu_ns: Ns = CPU_NS


class Decoders:
    """Of one server. ``processes`` is at least two."""

    def __init__(self, most_pixels: int, processes: int = PROCESSES) -> None:
        self._most_pixels = most_pixels
        self._places = Turns(processes)
        self._heavy = Turns(processes - 1)
        self._idle: list[_Decoder] = []
        self._started: set[_Decoder] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Of the processes there are."""
        return [decoder.pid for decoder in self._started]

    async def pixels(self, image: ImageInput, file: File, allowance: Allowance, whose: str = "") -> Pixels:
        """A file, or a data URL, as the model sees it; the time that takes goes off the allowance. Raises
        InvalidRequest, Unavailable. Those who wait take turns by ``whose`` they are."""
        async with self._places.turn(whose):
            found = await self._decoded(image, file, allowance, light=True)
        if found is None:
            async with self._heavy.turn(whose), self._places.turn(whose):
                found = await self._decoded(image, file, allowance, light=False)
        if found is None:
            most = f"{CPU_NS / 1e9:g} s of processor time"
            raise InvalidRequest(f"decoding takes more than {most}; send smaller pictures, or fewer at once")
        return found

    async def _decoded(self, image: ImageInput, file: File, allowance: Allowance, *, light: bool) -> Pixels | None:
        """None: it takes a while, or more than is allowed."""
        cpu_ns = min(LIGHT_CPU_NS, allowance.cpu_ns) if light else allowance.cpu_ns
        question = Decode(image, len(file), self._most_pixels, max(LEAST_CPU_NS, cpu_ns), light)
        decoder = await self._free()
        try:
            answer = await decoder.ask(question, file)
            found = await decoder.pixels(image) if isinstance(answer, Decoded) else None
            decoder.is_idle()
        except OverTime:
            allowance.cpu_ns -= question.cpu_ns
            return None
        except DormouseError:
            self._check_open()
            raise
        finally:
            await self._put_back(decoder)
        if isinstance(answer, Refused):
            raise InvalidRequest(answer.message)
        allowance.cpu_ns -= answer.cpu_ns
        return found

    # ------------------------------------------------------------------ processes

    async def _free(self) -> "_Decoder":
        self._check_open()
        while self._idle:
            decoder = self._idle.pop()
            if decoder.alive:
                return decoder
            await self._end(decoder)
        try:
            decoder = await _Decoder.start(BYTES_A_PIXEL * self._most_pixels + BESIDE_PIXELS_BYTES)
        except OSError as fault:
            message = f"pictures cannot be decoded now: {fault.strerror}"
            raise Unavailable(message, retry_after_s=RETRY_AFTER_S) from None
        self._started.add(decoder)
        if self._closed:
            await self._end(decoder)
            self._check_open()
        return decoder

    async def _put_back(self, decoder: "_Decoder") -> None:
        if decoder.idle and not self._closed:
            self._idle.append(decoder)
        else:  # an answer that nobody has waited for would be taken for the next one's
            await self._end(decoder)

    async def _end(self, decoder: "_Decoder") -> None:
        if decoder in self._started:
            self._started.remove(decoder)
            await decoder.end()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the server is shutting down")

    async def close(self) -> None:
        """At once, whatever they are doing."""
        self._closed = True
        self._idle.clear()
        await asyncio.gather(*map(self._end, tuple(self._started)))


class _Decoder:
    """One process, and the memory that files and pixels are in."""

    def __init__(self, process: Process, memory: int) -> None:
        self._process = process
        self._memory = memory
        self.idle = False
        """It has nothing to do, and may be asked."""

    @classmethod
    async def start(cls, most_bytes: Bytes) -> "_Decoder":
        """``most_bytes``: of memory, beside what is shared. Raises OSError."""
        memory = os.memfd_create("dormouse-picture")
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dormouse.tasks.decoder",
                str(memory),
                str(most_bytes),
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=(memory,),
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # what interrupts the server is not meant for it
            )
        except BaseException:
            os.close(memory)
            raise
        return cls(process, memory)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, question: Decode, file: File) -> Answer:
        """About one picture. Raises OverTime; InvalidRequest if the process does not survive it; Unavailable if it has
        not even begun."""
        self.idle = False
        await self._put(memoryview(file))
        assert self._process.stdin is not None and self._process.stdout is not None, "made with pipes"
        line = b""
        with suppress(ConnectionError):
            self._process.stdin.write(encode(question) + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            await self._explain()
        return decode_answer(line)

    async def _put(self, file: memoryview) -> None:
        at = 0
        while at < len(file):
            at += os.pwrite(self._memory, file[at : at + PIECE_BYTES], at)
            if at < len(file):
                await asyncio.sleep(0)  # for others

    async def pixels(self, image: ImageInput) -> Pixels:
        """What an answer tells of."""
        found = np.empty((3, image.height, image.width), np.float32)
        view, at = found.data.cast("B"), 0
        while at < len(view):
            size = os.preadv(self._memory, [view[at : at + PIECE_BYTES]], at)
            assert size, "the memory has fewer pixels than the answer says"
            at += size
            if at < len(view):
                await asyncio.sleep(0)  # for others
        return found

    async def _explain(self) -> NoReturn:
        """Why it has ended."""
        status = await self._process.wait()
        if status == -OVER_TIME:
            raise OverTime
        if status < 0:
            name = signal.Signals(-status).name
            raise InvalidRequest(f"the picture cannot be read: its decoder was ended by {name}; send another file")
        message = f"pictures cannot be decoded now: the process for it ended with status {status}"
        raise Unavailable(message, retry_after_s=RETRY_AFTER_S)

    def is_idle(self) -> None:
        """Its answer has been taken."""
        if os.fstat(self._memory).st_size > KEPT_BYTES:
            os.ftruncate(self._memory, 0)
        self.idle = True

    async def end(self) -> None:
        """At once."""
        self.idle = False
        with suppress(ProcessLookupError):
            self._process.kill()
        assert self._process.stdin is not None, "made with pipes"
        self._process.stdin.close()
        os.close(self._memory)
        await asyncio.shield(asyncio.ensure_future(self._process.wait()))
