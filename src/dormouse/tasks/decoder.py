"""A process that decodes pictures for a server: theirs are the files of strangers, and it may be ended at any time.

    python -m dormouse.tasks.decoder DESCRIPTOR MEMORY_BYTES

One question a line of its standard input, one answer a line of its output. Files come, and pixels go, at the beginning
of the memory behind the descriptor. It ends when its input does, and is ended by the kernel in the middle of a picture
that takes more processor time than its question allows.
"""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from dormouse.core.types import Bytes, Ns
from dormouse.errors import InvalidRequest
from dormouse.tasks.carriers import file_in
from dormouse.tasks.description import ImageInput
from dormouse.tasks.images import TOO_MUCH_MEMORY, Pixels, TooHeavy, pixels_of

NICENESS = 5
"""Requests go first where processors are scarce."""
OVER_TIME = signal.SIGPROF
"""What ends a process whose picture takes too long."""


class Decode(msgspec.Struct, frozen=True, tag=True):
    """What does the picture in the memory look like to this model? ``light``: unless it takes a while."""

    image: ImageInput
    file_bytes: Bytes
    most_pixels: int
    cpu_ns: Ns
    light: bool


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """The pixels are in the memory."""

    cpu_ns: Ns


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The picture's fault."""

    message: str


class Heavy(msgspec.Struct, frozen=True, tag=True):
    """It takes a while, says its head."""

    cpu_ns: Ns


Answer = Decoded | Refused | Heavy

encode = msgspec.json.encode
decode_question = msgspec.json.Decoder(Decode).decode
decode_answer: Callable[[bytes], Answer] = msgspec.json.Decoder(Answer).decode


def answered(question: Decode, memory: int) -> Answer:
    """Do what is asked, within its time."""
    began_ns = time.process_time_ns()
    signal.setitimer(signal.ITIMER_PROF, question.cpu_ns / 1e9)
    try:
        file = os.pread(memory, question.file_bytes, 0)
        _write(memory, pixels_of(question.image, file_in(memoryview(file)), question.most_pixels, light=question.light))
    except TooHeavy:
        return Heavy(time.process_time_ns() - began_ns)
    except InvalidRequest as fault:
        return Refused(fault.message)
    except MemoryError:
        return Refused(TOO_MUCH_MEMORY)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return Decoded(time.process_time_ns() - began_ns)


def _write(memory: int, pixels: Pixels) -> None:
    view, at = pixels.data.cast("B"), 0
    while at < len(view):
        at += os.pwrite(memory, view[at:], at)


def answers(memory: int, questions: Iterable[bytes]) -> Iterator[bytes]:
    """One for each."""
    for question in questions:
        yield encode(answered(decode_question(question), memory)) + b"\n"


def main() -> None:
    """Until standard input ends."""
    os.nice(NICENESS)
    signal.signal(OVER_TIME, signal.SIG_DFL)
    memory, most_bytes = (int(each) for each in sys.argv[1:3])
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        for answer in answers(memory, sys.stdin.buffer):
            sys.stdout.buffer.write(answer)
            sys.stdout.buffer.flush()
    except BrokenPipeError:  # nobody is there any more to be told
        sys.stdout = None


if __name__ == "__main__":
    main()
