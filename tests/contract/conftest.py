"""The devices that the contract is asked of, and a stand-in for the CUDA driver for machines without a GPU.

The stand-in takes the place of the module ``cuda.bindings.driver``. It keeps to what the driver documents, and is
strict: every misuse that the driver may or does answer with an error is answered with one. Copies happen at once.
"""

import ctypes
import enum
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dormouse.device.base import Device
from dormouse.device.cpu import CpuDevice
from dormouse.device.driver import Driver, device_count
from dormouse.device.simulated import SimulatedDevice, VirtualClock
from dormouse.device.vmm import VmmDevice

CHUNKS = 8
MIB = 1024 * 1024
GRANULE = 2 * MIB
TOTAL_BYTES = 64 * MIB


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712


OK, INVALID = (Status.CUDA_SUCCESS,), (Status.CUDA_ERROR_INVALID_VALUE,)
Answer = tuple[Any, ...]


class StandInCuda:
    """Two devices of ``TOTAL_BYTES`` each, which reach each other's memory."""

    CUresult = Status
    CUdevice = CUcontext = CUstream = CUevent = CUdeviceptr = CUmemGenericAllocationHandle = int
    CUmemAllocationProp = CUmemLocation = CUmemAccessDesc = SimpleNamespace
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CU_MEMHOSTREGISTER_PORTABLE = 1

    def __init__(self) -> None:
        self.devices = 2
        self.contexts = 0
        self.memory: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.references: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        """Handle by address; every mapping is as long as its memory."""
        self.home: dict[int, int] = {}
        """By handle: the device that has the memory."""
        self.open: set[int] = set()
        self.reach: dict[int, set[int]] = {}
        """By address of an open mapping: the devices that may touch it."""
        self.apart = False
        """Whether the devices cannot reach each other's memory."""
        self.registered: dict[int, int] = {}
        self.streams: set[int] = set()
        self.device_of: dict[int, int] = {}
        """By stream or event."""
        self.events: dict[int, bool] = {}
        self.good_calls: dict[str, int] = {}
        """How many calls of a name still succeed; the next one fails, once."""
        self.exported: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._names = iter(range(1, 1 << 30))
        self._next_address = 1 << 44
        self._thread = threading.local()

    def is_empty(self) -> bool:
        kept = (self.contexts, self.memory, self.reserved, self.mapped, self.registered, self.streams, self.events)
        return not any(kept)

    def cuInit(self, flags: int) -> Answer:  # noqa: N802 - the driver's names, here and below
        return OK if flags == 0 else INVALID

    def cuGetErrorString(self, status: Status) -> Answer:  # noqa: N802
        return Status.CUDA_SUCCESS, f"stand-in says {status.value}".encode()

    def __getattr__(self, name: str) -> Any:
        """``cuMemMap`` is ``_mem_map``, which may be called with a current context only."""
        if not name.startswith("cu"):
            raise AttributeError(name)
        call = getattr(self, "".join(f"_{c.lower()}" if c.isupper() else c for c in name[2:]))

        def checked(*arguments: Any) -> Answer:
            if name in self.good_calls:
                self.good_calls[name] -= 1
                if self.good_calls[name] < 0:
                    del self.good_calls[name]
                    return Status.CUDA_ERROR_OUT_OF_MEMORY, None
            free_of_context = name.startswith(("cuDevice", "cuCtx"))
            current = getattr(self._thread, "context", 0)
            return call(*arguments) if free_of_context or current else (Status.CUDA_ERROR_INVALID_CONTEXT, None)

        return checked

    def _device_get(self, ordinal: int) -> Answer:
        return (Status.CUDA_SUCCESS, ordinal) if ordinal in (0, 1) else (Status.CUDA_ERROR_INVALID_VALUE, None)

    def _device_get_count(self) -> Answer:
        return Status.CUDA_SUCCESS, self.devices

    def _device_get_p_c_i_bus_id(self, length: int, device: int) -> Answer:
        return Status.CUDA_SUCCESS, f"0000:0{device}:00.0".encode().ljust(length, b"\0")

    def _device_can_access_peer(self, device: int, other: int) -> Answer:
        return Status.CUDA_SUCCESS, int(device != other and not self.apart)

    def _device_get_name(self, length: int, device: int) -> Answer:
        return Status.CUDA_SUCCESS, f"stand-in {device}".encode().ljust(length, b"\0")

    def _driver_get_version(self) -> Answer:
        return Status.CUDA_SUCCESS, 13020

    def _device_primary_ctx_retain(self, device: int) -> Answer:
        self.contexts += 1
        return Status.CUDA_SUCCESS, 77 + device

    def _device_primary_ctx_release(self, device: int) -> Answer:
        assert device in (0, 1)
        self.contexts -= 1
        return OK

    def _ctx_set_current(self, context: int) -> Answer:
        self._thread.context = context
        return OK if context in (77, 78) and self.contexts else (Status.CUDA_ERROR_INVALID_CONTEXT,)

    @property
    def _current(self) -> int:
        return int(self._thread.context) - 77

    def _taken(self, device: int) -> int:
        """Bytes of a device; memory that was imported is counted where it was made."""
        return sum(len(self.memory[handle]) for handle, home in self.home.items() if home == device)

    def _mem_get_info(self) -> Answer:
        return Status.CUDA_SUCCESS, TOTAL_BYTES - self._taken(self._current), TOTAL_BYTES

    def _mem_get_allocation_granularity(self, properties: Any, option: int) -> Answer:
        return (Status.CUDA_SUCCESS, GRANULE) if properties.type == 1 and option == 0 else (INVALID[0], None)

    def _mem_create(self, size: int, properties: Any, flags: int) -> Answer:
        if size % GRANULE or flags or properties.location.type != 1:
            return Status.CUDA_ERROR_INVALID_VALUE, None
        if self._taken(properties.location.id) + size > TOTAL_BYTES:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        handle = next(self._names)
        self.memory[handle] = ctypes.create_string_buffer(size)
        self.references[handle] = 1
        self.home[handle] = properties.location.id
        return Status.CUDA_SUCCESS, handle

    def _mem_export_to_shareable_handle(self, handle: int, kind: int, flags: int) -> Answer:
        if handle not in self.memory or kind != 1 or flags:
            return Status.CUDA_ERROR_INVALID_VALUE, None
        fd = os.memfd_create("exported")
        os.write(fd, str(handle).encode())
        self.exported[handle] = self.memory[handle]
        return Status.CUDA_SUCCESS, fd

    def _mem_import_from_shareable_handle(self, fd: int, kind: int) -> Answer:
        exported = int(os.pread(fd, 32, 0))
        if exported not in self.exported or kind != 1:
            return Status.CUDA_ERROR_INVALID_VALUE, None
        handle = next(self._names)
        self.memory[handle] = self.exported[exported]
        self.references[handle] = 1
        return Status.CUDA_SUCCESS, handle

    def _mem_release(self, handle: int) -> Answer:
        if self.references.get(handle, 0) == 0:
            return INVALID
        self.references[handle] -= 1
        self._forget_unused(handle)
        return OK

    def _mem_retain_allocation_handle(self, address: int) -> Answer:
        for start, handle in self.mapped.items():
            if start <= address < start + len(self.memory[handle]):
                self.references[handle] += 1
                return Status.CUDA_SUCCESS, handle
        return Status.CUDA_ERROR_INVALID_VALUE, None

    def _mem_address_reserve(self, size: int, alignment: int, address: int, flags: int) -> Answer:
        assert (alignment, address, flags) == (0, 0, 0)
        if size % GRANULE or size == 0:
            return Status.CUDA_ERROR_INVALID_VALUE, None
        start = self._next_address
        self._next_address += size + GRANULE
        self.reserved[start] = size
        return Status.CUDA_SUCCESS, start

    def _mem_address_free(self, address: int, size: int) -> Answer:
        if self.reserved.get(address) != size or self._within(address, size):
            return INVALID
        del self.reserved[address]
        return OK

    def _mem_map(self, address: int, size: int, offset: int, handle: int, flags: int) -> Answer:
        inside = any(start <= address and address + size <= start + length for start, length in self.reserved.items())
        whole = handle in self.memory and len(self.memory[handle]) == size
        if not inside or not whole or offset or flags or address % GRANULE or self._within(address, size):
            return INVALID
        self.mapped[address] = handle
        return OK

    def _mem_set_access(self, address: int, size: int, accesses: list[Any], count: int) -> Answer:
        if count != len(accesses) or not self._covered(address, size) or accesses[0].flags != 3:
            return INVALID
        for start in self._within(address, size):
            self.open.add(start)
            self.reach.setdefault(start, set()).add(accesses[0].location.id)
        return OK

    def _mem_unmap(self, address: int, size: int) -> Answer:
        if not self._covered(address, size):
            return INVALID
        for start in self._within(address, size):
            handle = self.mapped.pop(start)
            self.open.discard(start)
            self.reach.pop(start, None)
            self._forget_unused(handle)
        return OK

    def _mem_host_register(self, address: int, size: int, flags: int) -> Answer:
        assert flags == 1
        if any(start < address + size and address < start + length for start, length in self.registered.items()):
            return (Status.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        self.registered[address] = size
        return OK

    def _mem_host_unregister(self, address: int) -> Answer:
        return OK if self.registered.pop(address, 0) else INVALID

    def _stream_create(self, flags: int) -> Answer:
        self.streams.add(name := next(self._names))
        self.device_of[name] = self._current
        return (Status.CUDA_SUCCESS, name) if flags == 1 else (Status.CUDA_ERROR_INVALID_VALUE, None)

    def _stream_synchronize(self, stream: int) -> Answer:
        return OK if stream in self.streams else INVALID

    def _stream_destroy(self, stream: int) -> Answer:
        self.streams.remove(stream)
        return OK

    def _stream_wait_event(self, stream: int, event: int, flags: int) -> Answer:
        known = (stream in self.streams or stream == 0) and event in self.events
        return OK if known and flags == 0 else INVALID

    def _event_create(self, flags: int) -> Answer:
        self.events[name := next(self._names)] = False
        self.device_of[name] = self._current
        return (Status.CUDA_SUCCESS, name) if flags == 2 else (Status.CUDA_ERROR_INVALID_VALUE, None)

    def _event_record(self, event: int, stream: int) -> Answer:
        known = event in self.events and stream in self.streams
        if not known or self.device_of[event] != self.device_of[stream]:
            return INVALID
        self.events[event] = True
        return OK

    def _event_synchronize(self, event: int) -> Answer:
        return OK if self.events.get(event) else INVALID

    def _event_destroy(self, event: int) -> Answer:
        del self.events[event]
        return OK

    def _memcpy_hto_d_async(self, to: int, source: int, size: int, stream: int) -> Answer:
        pieces = self._pieces(to, size, stream)
        for place, done, length in pieces or ():
            ctypes.memmove(place, source + done, length)
        return self._copied(pieces, stream)

    def _memcpy_dto_d_async(self, to: int, source: int, size: int, stream: int) -> Answer:
        taken, given = self._pieces(to, size, stream), self._pieces(source, size, stream)
        if taken is None or given is None:
            return self._copied(None, stream)
        content = b"".join(ctypes.string_at(place, length) for place, _, length in given)
        for place, done, length in taken:
            ctypes.memmove(place, content[done : done + length], length)
        return self._copied(taken, stream)

    def _memcpy_dto_h_async(self, to: int, source: int, size: int, stream: int) -> Answer:
        pieces = self._pieces(source, size, stream)
        for place, done, length in pieces or ():
            ctypes.memmove(to + done, place, length)
        return self._copied(pieces, stream)

    def _memset_d8_async(self, address: int, value: int, size: int, stream: int) -> Answer:
        pieces = self._pieces(address, size, stream) if size else None
        for place, _, length in pieces or ():
            ctypes.memset(place, value, length)
        return self._copied(pieces, stream)

    def _copied(self, pieces: object, stream: int) -> Answer:
        if stream not in self.streams or self.device_of[stream] != self._current:
            return INVALID
        return (Status.CUDA_ERROR_ILLEGAL_ADDRESS,) if pieces is None else OK

    def _pieces(self, address: int, size: int, stream: int) -> list[tuple[int, int, int]] | None:
        """``(host address, bytes before, bytes)`` of a range that the stream's device may touch; None if it may not
        touch all of it."""
        pieces, done = [], 0
        device = self.device_of.get(stream)
        mine = [start for start in self.open if device in self.reach[start]]
        while done < size:
            at = address + done
            start = next((s for s in mine if s <= at < s + len(self.memory[self.mapped[s]])), None)
            if start is None:
                return None
            memory = self.memory[self.mapped[start]]
            length = min(size - done, start + len(memory) - at)
            pieces.append((ctypes.addressof(memory) + at - start, done, length))
            done += length
        return pieces

    def _within(self, address: int, size: int) -> list[int]:
        """Mappings that touch a range."""
        ends = {start: start + len(self.memory[handle]) for start, handle in self.mapped.items()}
        return [start for start, end in ends.items() if start < address + size and address < end]

    def _covered(self, address: int, size: int) -> bool:
        """Whether a range is made of whole mappings."""
        parts = {start: len(self.memory[self.mapped[start]]) for start in self._within(address, size)}
        return size > 0 and sum(parts.values()) == size and min(parts) == address

    def _forget_unused(self, handle: int) -> None:
        if self.references[handle] == 0 and handle not in self.mapped.values():
            del self.memory[handle]
            del self.references[handle]
            self.home.pop(handle, None)


class Maker:
    """Makes devices of one kind, of ``CHUNKS`` chunks, and closes them after the test."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.stand_in = StandInCuda()
        self.made: list[Device] = []

    def __call__(self, *faults: str, link_bytes_per_s: int | None = None, index: int = 0) -> Device:
        self.made.append(self._make(faults, link_bytes_per_s, index))
        return self.made[-1]

    def _make(self, faults: tuple[str, ...], link_bytes_per_s: int | None, index: int) -> Device:
        size, chunk = CHUNKS * GRANULE, GRANULE
        match self.kind:
            case "cpu":
                return CpuDevice(size, chunk, index=index, link_bytes_per_s=link_bytes_per_s, faults=faults)
            case "simulated":
                return SimulatedDevice(VirtualClock(), size, chunk, link_bytes_per_s=10**9, index=index, faults=faults)
            case "stand-in":
                return VmmDevice(index, size, chunk, faults=faults, driver=Driver(self.stand_in))
            case "cuda":
                return VmmDevice(min(index, device_count() - 1), size, chunk, faults=faults)
        raise AssertionError(self.kind)


@pytest.fixture
def make(kind: str) -> Iterator[Maker]:
    if kind == "cuda" and device_count() == 0:
        pytest.skip("this machine has no NVIDIA GPU")
    maker = Maker(kind)
    yield maker
    for device in maker.made:
        device.close()
    assert maker.stand_in.is_empty(), vars(maker.stand_in)
