"""The live executors: one supervised process a device. Turns wire messages into core events, tensors copied out."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dormouse import wire
from dormouse.config import Config
from dormouse.control.batching import parted
from dormouse.control.introductions import Introductions
from dormouse.control.inventory import waste_bytes
from dormouse.control.payloads import Outputs
from dormouse.control.topology import Links
from dormouse.control.traffic import Traffic
from dormouse.core.messages import ChunkProduced, Event, ExecutorJoined, ExecutorLost, Forget
from dormouse.core.state import State
from dormouse.core.types import DeviceId, ExecutorId, FunctionId
from dormouse.executor.supervisor import Supervisor
from dormouse.metrics.books import DeviceBook
from dormouse.slab import Slab
from dormouse.store.arena import Arena
from dormouse.tensors import Tensor

_LOG = logging.getLogger("dormouse.control")

Post = Callable[[Event, Outputs], None]


@dataclass
class _Process:
    """One executor's process and its reply slab; the listener of its supervisor."""

    id: ExecutorId
    replies: Slab
    post: Post
    state: State
    introductions: Introductions | None
    """None: it is alone."""
    settled: "asyncio.Future[str]"
    """Resolves to "" when it has joined, or to why it cannot be had."""
    supervisor: Supervisor = field(init=False)
    segments: list[wire.ArenaGrown] = field(default_factory=list)
    ready: wire.ExecutorReady | None = None
    graphs: dict[str, wire.GraphsHeld] = field(default_factory=dict)
    """By function: what the executor has said last."""
    traffic: Traffic = field(default_factory=Traffic)

    def joined(self, ready: wire.ExecutorReady) -> None:
        self.ready = ready
        for segment in self.segments:
            self.supervisor.send(segment)
        joined = ExecutorJoined(self.id, DeviceId(ready.device), ready.capacity_bytes, ready.chunk_bytes)
        self.post(joined, {})
        if self.introductions is not None:
            self.introductions.joined(self.id, ready)
        self._settle("")

    def received(self, message: wire.FromExecutor) -> None:
        if isinstance(message, wire.ChunkReady):
            outputs = self._copied_out(message)
            self.post(message.event, outputs)  # what runs next is more urgent than memory that is free again
            self.supervisor.send(wire.ReplyRead(tuple(ref.offset for ref in message.outputs)))
        elif isinstance(message, wire.GraphsHeld):
            self.graphs[message.function] = message
        elif isinstance(message, wire.ImageHeld | wire.PeerAdopted | wire.PeerNotAdopted):
            assert self.introductions is not None, "an executor that is alone speaks of others"
            self.introductions.received(self.id, message, self.post)
        else:
            assert not isinstance(message, wire.ExecutorReady | wire.ExecutorUnusable), message
            self.traffic.reported(message, self.state)
            self.post(message, {})

    def _copied_out(self, message: wire.ChunkReady) -> Outputs:
        event = message.event
        if not message.rows or isinstance(event, ChunkProduced):
            return {event.request: tuple(self._tensor(ref) for ref in message.outputs)}
        of_outputs = [self._parts(ref, message.rows) for ref in message.outputs]
        requests = (event.request, *event.others)
        return {request: tuple(parts[n] for parts in of_outputs) for n, request in enumerate(requests)}

    def _tensor(self, ref: wire.TensorRef) -> Tensor:
        with self.replies.view(ref.offset, ref.size_bytes) as memory:
            return Tensor(ref.name, ref.datatype, ref.shape, bytes(memory))

    def _parts(self, ref: wire.TensorRef, rows: tuple[int, ...]) -> list[Tensor]:
        with self.replies.view(ref.offset, ref.size_bytes) as memory:
            return parted(ref, memory, rows)

    def lost(self, message: str) -> None:
        _LOG.warning("%s", message)
        self.ready = None
        self.traffic.lost()
        self.graphs.clear()
        if self.introductions is not None:
            self.introductions.lost(self.id)
        self.post(ExecutorLost(self.id, message), {})

    def book(self) -> DeviceBook:
        book = DeviceBook(
            self.id,
            restarts=self.traffic.restarts,
            graphs=sum(held.shapes for held in self.graphs.values()),
            unaccounted_bytes=self.traffic.unaccounted_bytes,
            link_bytes=dict(self.traffic.link_bytes),
        )
        executor = self.state.executors.get(self.id)
        if executor is not None:
            book.up = True
            book.capacity_bytes = executor.capacity_bytes
            book.used_bytes = executor.capacity_bytes - executor.free_bytes
            book.waste_bytes = waste_bytes(executor, self.state)
            book.images = len(executor.recency)
        return book

    def unusable(self, message: str) -> None:
        _LOG.error("%s", message)
        self._settle(message)

    def _settle(self, message: str) -> None:
        if not self.settled.done():
            self.settled.set_result(message)


class ExecutorProcesses:
    """Every executor of this node."""

    def __init__(self, config: Config, request_slab: Slab, links: Links) -> None:
        self._config = config
        self._request_slab = request_slab
        self._links = links
        self._introductions: Introductions | None = None
        self._processes: dict[ExecutorId, _Process] = {}

    async def start(self, devices: list[str], arena: Arena, post: Post, state: State) -> list[str]:
        """Start one process a device and wait until each has joined or cannot be had; answers why not, a line each."""
        if len(devices) > 1 and self._config.routes != "host":
            self._introductions = Introductions(self._links.topology, self.send, detours=self._config.routes == "auto")
        for device in devices:
            self._add(device, arena, post, state)
        for process in self._processes.values():
            process.supervisor.start()
        return [why for process in self._processes.values() if (why := await process.settled)]

    def _add(self, device: str, arena: Arena, post: Post, state: State) -> None:
        config = self._config
        name = ExecutorId(device if ":" in device else f"{device}:0")
        process = _Process(
            id=name,
            replies=Slab.create(config.reply_slab_bytes, owner=False),
            post=post,
            state=state,
            introductions=self._introductions,
            settled=asyncio.get_running_loop().create_future(),
        )
        start = wire.StartExecutor(
            executor=name,
            device=device,
            device_bytes=config.device_bytes,
            chunk_bytes=config.chunk_bytes,
            group_bytes=self._links.group_bytes,
            link_bytes_per_s=config.link_bytes_per_s,
            arena_fd=arena.fd,
            arena_bytes=arena.size_bytes,
            request_slab_fd=self._request_slab.fd,
            request_slab_bytes=self._request_slab.size_bytes,
            reply_slab_fd=process.replies.fd,
            reply_slab_bytes=process.replies.size_bytes,
            threads=config.threads,
            graphs=config.graphs,
            allow_code=tuple(str(directory) for directory in config.allow_code),
            poison=config.poison,
            faults=config.faults,
            maps_ahead=device in self._links.maps_ahead,
            peers=self._introductions is not None,
        )
        process.supervisor = Supervisor(start, process, self._log_file(name))
        self._processes[name] = process

    def _log_file(self, name: ExecutorId) -> Path:
        return self._config.state_dir / "logs" / f"{name.replace(':', '-')}.log"

    def send(self, executor: ExecutorId, message: wire.ToExecutor) -> None:
        process = self._processes[executor]
        if isinstance(message, Forget):
            process.graphs.pop(message.function, None)
            if self._introductions is not None:
                self._introductions.forget(message.function)
        elif isinstance(message, wire.LoadImage):
            process.traffic.begun(message.command)
            if self._introductions is not None:
                message = self._introductions.addressed(message)
        process.supervisor.send(message)

    def graphs_of(self, function: FunctionId) -> dict[str, wire.GraphsHeld]:
        """By executor, of those that have graphs at all: how they run the function."""
        return {
            name: process.graphs[function] for name, process in self._processes.items() if function in process.graphs
        }

    def arena_grown(self, offset: int, size_bytes: int) -> None:
        """Tell every executor, and those that start later, to register a new segment of host memory."""
        segment = wire.ArenaGrown(offset, size_bytes)
        for process in self._processes.values():
            process.segments.append(segment)
            process.supervisor.send(segment)

    def describe(self) -> list[dict[str, object]]:
        """One row an executor, for people."""
        return [
            {
                "executor": process.id,
                "device": process.ready.description,
                "pid": process.ready.pid,
                "capacity_bytes": process.ready.capacity_bytes,
                "chunk_bytes": process.ready.chunk_bytes,
                "restarts": process.traffic.restarts,
            }
            for process in self._processes.values()
            if process.ready is not None
        ]

    def present(self) -> list[tuple[ExecutorId, str, int]]:
        """Every executor that is here or expected back: its device in words, empty while it is gone, and restarts."""
        return [
            (process.id, "" if process.ready is None else process.ready.description, process.traffic.restarts)
            for process in self._processes.values()
            if process.ready is not None or process.traffic.restarts
        ]

    def books(self) -> list[DeviceBook]:
        """One for each executor, whether it is there or not."""
        return [process.book() for process in self._processes.values()]

    async def stop(self) -> None:
        await asyncio.gather(*(process.supervisor.stop() for process in self._processes.values()))
        for process in self._processes.values():
            process.replies.close()
