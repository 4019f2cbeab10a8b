"""The executor's process: ``python -m dormouse.executor.process <socket>``. Opens one device and obeys.

This file starts and ends the process and hands messages on; what is done about them is the desk's business.
"""

import ctypes
import mmap
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

from dormouse import wire
from dormouse.core.messages import Cancel, Evict, Forget
from dormouse.core.types import ExecutorId
from dormouse.device.base import Device
from dormouse.device.cpu import CAPACITY_BYTES, CpuDevice
from dormouse.device.cpu import CHUNK_BYTES as CPU_CHUNK_BYTES
from dormouse.device.vmm import CHUNK_BYTES as CUDA_CHUNK_BYTES
from dormouse.device.vmm import VmmDevice
from dormouse.errors import DeviceError, DormouseError
from dormouse.executor.compute import Compute, CpuCompute, CudaCompute
from dormouse.executor.desk import Desk, Terms
from dormouse.executor.peers import Peers
from dormouse.executor.replies import Replies
from dormouse.model.loaded import one_line
from dormouse.slab import Slab

UNUSABLE = 3
"""Exit status when the device cannot be had."""

Send: TypeAlias = Callable[[wire.FromExecutor], None]

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 64 * 1024
_keep: list[mmap.mmap] = []
_SWITCH_S = 0.0005
"""How long one lane may hold the interpreter while the other waits for it; Python's 5 ms is a whole swap."""


def main() -> None:
    _die_with_parent()
    sys.setswitchinterval(_SWITCH_S)
    connection = socket.socket(fileno=int(sys.argv[1]))
    first = wire.receive(connection)
    start = None if first is None else wire.decode_to_executor(first)
    assert isinstance(start, wire.StartExecutor), "the first message must be StartExecutor"
    sending = threading.Lock()

    def send(message: wire.FromExecutor) -> None:
        data = wire.frame(message)
        with sending:
            connection.sendall(data)

    try:
        device, compute, description = opened(start)
        desk = _desk(start, device, compute, send)
        peers = Peers(device, send, desk.on_copy_lane) if start.peers else None
    except (DormouseError, OSError, RuntimeError, ImportError, MemoryError) as fault:
        message = fault.message if isinstance(fault, DormouseError) else one_line(fault)
        send(wire.ExecutorUnusable(f"{start.device}: {message}"))
        sys.exit(UNUSABLE)
    address = peers.address if peers else ""
    send(wire.ExecutorReady(device.id, device.capacity_bytes, device.chunk_bytes, os.getpid(), description, address))
    obey(connection, desk, peers)


def opened(start: wire.StartExecutor) -> tuple[Device, Compute, str]:
    """The device, torch on it, and both in words. Raises DeviceError."""
    kind, _, index = start.device.partition(":")
    if kind == "cpu":
        cpu = CpuDevice(
            start.device_bytes or CAPACITY_BYTES,
            start.chunk_bytes or CPU_CHUNK_BYTES,
            index=int(index or 0),
            link_bytes_per_s=start.link_bytes_per_s,
            faults=start.faults,
        )
        return (
            cpu,
            CpuCompute(start.threads),
            f"{platform.processor() or platform.machine()}, torch {torch.__version__}",
        )
    if kind != "cuda":
        raise DeviceError("open device", "UNKNOWN_KIND", f"{start.device}; known are cpu and cuda:N")
    if not torch.cuda.is_available():
        raise DeviceError("open device", "NO_CUDA", f"torch {torch.__version__} sees no NVIDIA GPU")
    # Torch first: its context is part of what is used when the pool takes its share of what is free.
    compute = CudaCompute(int(index or 0), graphs=start.graphs == "auto")
    gpu = VmmDevice(
        int(index or 0),
        start.device_bytes,
        start.chunk_bytes or CUDA_CHUNK_BYTES,
        maps_ahead=start.maps_ahead,
        faults=start.faults,
    )
    return gpu, compute, f"{gpu.description}, torch {torch.__version__}"


def obey(connection: socket.socket, desk: Desk, peers: Peers | None) -> None:
    """Hand every message to the desk, until the control side asks to end or is gone."""
    unread = bytearray()
    while data := connection.recv(_READ_BYTES):
        unread += data
        for body in wire.whole_frames(unread):
            message = wire.decode_to_executor(body)
            if isinstance(message, wire.Shutdown):
                desk.finish()
                return
            if isinstance(message, wire.Introduce | wire.PeerLost):
                _make_known(message, desk, peers)
            else:
                _hand_over(message, desk)
    os._exit(0)  # nobody is left who could want anything; lanes may be in the middle of work


def _make_known(message: wire.Introduce | wire.PeerLost, desk: Desk, peers: Peers | None) -> None:
    assert peers is not None, "an executor that is alone was told of another"
    if isinstance(message, wire.Introduce):
        peers.introduce(message)
    else:
        desk.peer_lost(message.address)
        peers.lost(message.address)


def _hand_over(message: wire.ToExecutor, desk: Desk) -> None:
    match message:
        case wire.LoadImage():
            desk.load(message)
        case wire.ExecuteRequest():
            desk.execute(message)
        case Evict():
            desk.evict(message)
        case Cancel():
            desk.cancel(message)
        case Forget():
            desk.forget(message)
        case wire.ArenaGrown():
            desk.grown(message.offset, message.size_bytes)
        case wire.ReplyRead():
            desk.read(message.offsets)
        case _:
            raise AssertionError(f"unexpected message: {message}")


def _desk(
    start: wire.StartExecutor, device: Device, compute: Compute, send: Callable[[wire.FromExecutor], None]
) -> Desk:
    terms = Terms(
        host_address=_mapped(start.arena_fd, start.arena_bytes),
        group_bytes=start.group_bytes,
        allow_code=tuple(Path(directory) for directory in start.allow_code),
        poison=start.poison,
        peers=start.peers,
    )
    requests = Slab.attach(start.request_slab_fd, start.request_slab_bytes)
    replies = Replies(Slab.attach(start.reply_slab_fd, start.reply_slab_bytes, owner=True))
    return Desk(
        ExecutorId(start.executor),
        device=device,
        compute=compute,
        requests=requests,
        replies=replies,
        terms=terms,
        send=send,
    )


def _mapped(fd: int, size_bytes: int) -> int:
    """The address of the arena, mapped for as long as the process lives."""
    memory = mmap.mmap(fd, size_bytes)
    _keep.append(memory)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _die_with_parent() -> None:
    """The kernel ends this process when the one that started it ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
