"""A process that speaks an executor's frames and has no device; faults choose how it misbehaves.

Answers Cancel with CommandRefused and Evict with EvictionFinished, repeating their numbers.
"""

import os
import signal
import socket
import sys
import threading

from dormouse import wire
from dormouse.core.messages import Cancel, CommandRefused, Evict, EvictionFinished
from dormouse.core.types import Reason


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    start = next_message(connection)
    assert isinstance(start, wire.StartExecutor)
    misbehave(connection, start.faults)
    executor = start.executor
    connection.sendall(wire.frame(wire.ExecutorReady("cpu:0", 8, 2, os.getpid(), f"arena {arena(start)}")))
    if "deaf" in start.faults:
        threading.Event().wait()
    if "closes" in start.faults:
        connection.close()
        threading.Event().wait()
    while (message := next_message(connection)) is not None:
        if isinstance(message, Cancel):
            connection.sendall(wire.frame(CommandRefused(message.executor, message.command, Reason.TOO_LATE)))
        elif isinstance(message, Evict):
            connection.sendall(wire.frame(EvictionFinished(message.executor, message.command, message.function)))
        elif isinstance(message, wire.Shutdown) and "stubborn" not in start.faults:
            return
    assert executor


def next_message(connection: socket.socket) -> wire.ToExecutor | None:
    body = wire.receive(connection)
    return None if body is None else wire.decode_to_executor(body)


def arena(start: wire.StartExecutor) -> str:
    return os.pread(start.arena_fd, start.arena_bytes, 0).decode()


def misbehave(connection: socket.socket, faults: tuple[str, ...]) -> None:
    if "unusable" in faults:
        connection.sendall(wire.frame(wire.ExecutorUnusable("cpu:0 cannot be had: no such thing")))
        sys.exit(0)
    if "dies" in faults:
        sys.exit("ImportError: no module named nothing")
    if "hangs" in faults:
        signal.pause()
    if "babbles" in faults:
        connection.sendall(wire.LENGTH.pack(3) + b"\xc1\xc1\xc1")
        signal.pause()


main()
