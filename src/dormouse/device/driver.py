"""The calls of the CUDA driver that the device needs, each with its status turned into a DeviceError.

Handles, addresses and streams are integers on this side. Knows no policy and keeps no state but the loaded library.
The package ``cuda.bindings`` is imported when the first Driver is made, so that a machine without a GPU needs none.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

from dormouse.core.types import Bytes
from dormouse.errors import DeviceError


def device_count() -> int:
    """How many GPUs the driver shows; 0 without a driver or the package."""
    try:
        return Driver().device_count()
    except DeviceError:
        return 0


def _bindings() -> Any:
    """The binding module: it is generated and has no types."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise DeviceError(
            "cuInit", "NO_BINDINGS", "the package cuda-bindings is missing; install dormouse-serve[gpu]"
        ) from (None)
    return driver


class Driver:
    """Loads the driver and initialises it. ``bindings`` stands in for ``cuda.bindings.driver`` in tests.

    Raises DeviceError, from here and from every call.
    """

    def __init__(self, bindings: Any = None) -> None:
        self._cuda = bindings or _bindings()
        self._success = self._cuda.CUresult.CUDA_SUCCESS
        try:
            self._call("cuInit", 0)
        except RuntimeError as fault:
            # The library is looked for at the first call, and its absence is no CUDA status.
            raise DeviceError("cuInit", "NO_DRIVER", str(fault).partition("\n")[0]) from None
        # Called for every group of an image: looked up once.
        self._copy_to_device = self._cuda.cuMemcpyHtoDAsync
        self._copy_across = self._cuda.cuMemcpyDtoDAsync
        self._record = self._cuda.cuEventRecord

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def description(self, device: int) -> str:
        """Name of the card and version of the CUDA driver, for people."""
        name = self._call("cuDeviceGetName", 128, self._cuda.CUdevice(device))
        version = int(self._call("cuDriverGetVersion"))
        return f"{name.split(bytes(1))[0].decode()}, CUDA driver {version // 1000}.{version % 1000 // 10}"

    def address_on_bus(self, device: int) -> str:
        """Where the card sits: ``0000:18:00.0``."""
        return str(self._call("cuDeviceGetPCIBusId", 13, self._cuda.CUdevice(device)).split(bytes(1))[0].decode())

    def can_access(self, device: int, other: int) -> bool:
        """Whether a device can read and write another's memory itself, over NVLink or the bus."""
        return bool(self._call("cuDeviceCanAccessPeer", self._cuda.CUdevice(device), self._cuda.CUdevice(other)))

    # -------------------------------------------------------------- contexts

    def retain_primary_context(self, device: int) -> int:
        """The context that the CUDA runtime, and so torch, uses on the device."""
        handle = self._call("cuDeviceGet", device)
        return int(self._call("cuDevicePrimaryCtxRetain", handle))

    def release_primary_context(self, device: int) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._call("cuDeviceGet", device))

    def set_context(self, context: int) -> None:
        """Make a context current on the calling thread."""
        self._call("cuCtxSetCurrent", self._cuda.CUcontext(context))

    # -------------------------------------------------------------- physical memory and addresses

    def free_memory(self) -> Bytes:
        """What the driver says is free on the current context's device."""
        return int(self._call("cuMemGetInfo")[0])

    def granularity(self, device: int) -> Bytes:
        flag = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties(device), flag))

    def create_memory(self, device: int, size_bytes: Bytes) -> int:
        """Physical memory, mapped nowhere; it can be exported as a file descriptor. Returns its handle."""
        return int(self._call("cuMemCreate", size_bytes, self._properties(device), 0))

    def release_memory(self, handle: int) -> None:
        self._call("cuMemRelease", self._cuda.CUmemGenericAllocationHandle(handle))

    def export_memory(self, handle: int) -> int:
        """A file descriptor by which another process can import physical memory; the caller closes it."""
        memory = self._cuda.CUmemGenericAllocationHandle(handle)
        return int(self._call("cuMemExportToShareableHandle", memory, self._shareable(), 0))

    def import_memory(self, fd: int) -> int:
        """The handle of memory that another process has exported, with a reference of our own."""
        return int(self._call("cuMemImportFromShareableHandle", fd, self._shareable()))

    def reserve_addresses(self, size_bytes: Bytes) -> int:
        return int(self._call("cuMemAddressReserve", size_bytes, 0, self._cuda.CUdeviceptr(0), 0))

    def free_addresses(self, address: int, size_bytes: Bytes) -> None:
        self._call("cuMemAddressFree", self._cuda.CUdeviceptr(address), size_bytes)

    def map(self, address: int, size_bytes: Bytes, handle: int) -> None:
        """Put physical memory at reserved addresses; untouchable until ``allow_access``."""
        memory = self._cuda.CUmemGenericAllocationHandle(handle)
        self._call("cuMemMap", self._cuda.CUdeviceptr(address), size_bytes, 0, memory, 0)

    def allow_access(self, device: int, address: int, size_bytes: Bytes) -> None:
        """Let the device read and write a range that is mapped throughout."""
        access = self._cuda.CUmemAccessDesc()
        access.location = self._location(device)
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", self._cuda.CUdeviceptr(address), size_bytes, [access], 1)

    def unmap(self, address: int, size_bytes: Bytes) -> None:
        """Take away everything that is mapped in a range; it must be mapped throughout, in whole mappings."""
        self._call("cuMemUnmap", self._cuda.CUdeviceptr(address), size_bytes)

    def mapped_handle(self, address: int) -> int | None:
        """The handle of the physical memory that is mapped at an address; None where there is none."""
        status, handle = self._cuda.cuMemRetainAllocationHandle(address)
        if status == self._cuda.CUresult.CUDA_ERROR_INVALID_VALUE:
            return None
        self._check("cuMemRetainAllocationHandle", status)
        self.release_memory(int(handle))  # the question has taken a reference
        return int(handle)

    def register_host(self, address: int, size_bytes: Bytes) -> None:
        """Pin host memory, for every context."""
        self._call("cuMemHostRegister", address, size_bytes, self._cuda.CU_MEMHOSTREGISTER_PORTABLE)

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    # -------------------------------------------------------------- streams and events

    def create_stream(self) -> int:
        """A stream that does not wait for the default one."""
        return int(self._call("cuStreamCreate", int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def synchronize_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", self._cuda.CUstream(stream))

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", self._cuda.CUstream(stream))

    def copy_in(self, address: int, host_address: int, size_bytes: Bytes, stream: int) -> None:
        (status,) = self._copy_to_device(address, host_address, size_bytes, stream)
        self._check("cuMemcpyHtoDAsync", status)

    def copy_across(self, address: int, source: int, size_bytes: Bytes, stream: int) -> None:
        """From device memory to device memory, also another device's."""
        (status,) = self._copy_across(address, source, size_bytes, stream)
        self._check("cuMemcpyDtoDAsync", status)

    def copy_out(self, host_address: int, address: int, size_bytes: Bytes, stream: int) -> None:
        source, lane = self._cuda.CUdeviceptr(address), self._cuda.CUstream(stream)
        self._call("cuMemcpyDtoHAsync", host_address, source, size_bytes, lane)

    def fill(self, address: int, value: int, size_bytes: Bytes, stream: int) -> None:
        self._call("cuMemsetD8Async", self._cuda.CUdeviceptr(address), value, size_bytes, self._cuda.CUstream(stream))

    def create_event(self) -> int:
        """An event without timing, which is the cheap kind."""
        return int(self._call("cuEventCreate", int(self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def record_events(self, events: Iterable[int], stream: int) -> None:
        record = self._record
        for event in events:
            (status,) = record(event, stream)
            self._check("cuEventRecord", status)

    def wait_event(self, stream: int, event: int) -> None:
        """Hold back later work of a stream; what the event marks now is what counts, however it is recorded later."""
        self._call("cuStreamWaitEvent", self._cuda.CUstream(stream), self._cuda.CUevent(event), 0)

    def synchronize_event(self, event: int) -> None:
        """Block the calling thread; the interpreter lock is released."""
        self._call("cuEventSynchronize", self._cuda.CUevent(event))

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", self._cuda.CUevent(event))

    # -------------------------------------------------------------- graphs

    def begin_capture(self, stream: int) -> None:
        """What the calling thread queues on the stream from now on is recorded, not done. Other threads are not
        concerned: they may map, copy and run meanwhile."""
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._cuda.CUstream(stream), mode)

    def end_capture(self, stream: int) -> int:
        """The recorded graph. Recording has ended also if this raises, as it does after something forbidden."""
        return int(self._call("cuStreamEndCapture", self._cuda.CUstream(stream)))

    def wait_event_in_capture(self, stream: int, event: int) -> None:
        """Record a wait for an event; at each launch it is for what was queued last when the graph was launched."""
        external = int(self._cuda.CUevent_wait_flags.CU_EVENT_WAIT_EXTERNAL)
        self._call("cuStreamWaitEvent", self._cuda.CUstream(stream), self._cuda.CUevent(event), external)

    def instantiate(self, graph: int) -> int:
        """An executable graph; the recorded one is not needed any more."""
        return int(self._call("cuGraphInstantiate", self._cuda.CUgraph(graph), 0))

    def launch(self, executable: int, stream: int) -> None:
        self._call("cuGraphLaunch", self._cuda.CUgraphExec(executable), self._cuda.CUstream(stream))

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphDestroy", self._cuda.CUgraph(graph))

    def destroy_executable(self, executable: int) -> None:
        self._call("cuGraphExecDestroy", self._cuda.CUgraphExec(executable))

    # -------------------------------------------------------------- how a call is made

    def _properties(self, device: int) -> Any:
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location(device)
        properties.requestedHandleTypes = self._shareable()
        return properties

    def _shareable(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _location(self, device: int) -> Any:
        location = self._cuda.CUmemLocation()
        location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
        return location

    def _call(self, name: str, *arguments: object) -> Any:
        """The call's result: nothing, one value, or several."""
        status, *results = getattr(self._cuda, name)(*arguments)
        self._check(name, status)
        return results[0] if len(results) == 1 else results

    def _check(self, name: str, status: Any) -> None:
        if status == self._success:
            return
        detail = ""
        with contextlib.suppress(Exception):  # the text is a courtesy; the code is what counts
            detail = self._cuda.cuGetErrorString(status)[1].decode()
        raise DeviceError(name, getattr(status, "name", str(status)), detail)
