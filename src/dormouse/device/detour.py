"""A second way from host memory to a GPU: over a neighbour's own link into staging memory there, then from GPU to GPU.

    host ── neighbour's link ──► slot ── GPU to GPU ──► region
            stream of the neighbour      stream of ours

Each slot is filled and emptied in turn; events in both directions keep the two streams off each other's bytes, so
that a slot is filled while the one before it is emptied. The host thread waits for neither.

A context on the neighbour comes with it, which takes some hundred megabytes there: it is made once and kept.
"""

from collections.abc import Callable
from contextlib import ExitStack

from dormouse.core.types import Bytes, round_up
from dormouse.device.driver import Driver

SLOTS = 4
SLOT_BYTES: Bytes = 8 * 1024 * 1024


class Detour:
    """Open when made. ``context`` is that of the device ``own``; it is current whenever a method returns."""

    def __init__(
        self,
        driver: Driver,
        own: int,
        context: int,
        neighbour: int,
        *,
        slot_bytes: Bytes = SLOT_BYTES,
        slots: int = SLOTS,
    ) -> None:
        self._driver = driver
        self._context = context
        self._neighbour = neighbour
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._next = 0
        self._used: set[int] = set()
        self._closing = ExitStack()
        with ExitStack() as undo:
            undo.callback(driver.set_context, context)
            self._there = driver.retain_primary_context(neighbour)
            undo.callback(driver.release_primary_context, neighbour)
            self._staging = self._create_staging(undo, own)
            driver.set_context(self._there)
            self._filling = driver.create_stream()
            undo.callback(self._on_neighbour, driver.destroy_stream, self._filling)
            self._filled = self._create_events(undo, there=True)
            driver.set_context(context)
            self.stream = driver.create_stream()
            """Of our device: what was copied in has arrived when this stream has come so far."""
            undo.callback(driver.destroy_stream, self.stream)
            self._emptied = self._create_events(undo, there=False)
            self._closing = undo.pop_all()

    def copy_in(self, address: int, host_address: int, size_bytes: Bytes) -> None:
        """Queue a copy; ``stream`` marks its end."""
        for done in range(0, size_bytes, self._slot_bytes):
            self._copy_slot(address + done, host_address + done, min(self._slot_bytes, size_bytes - done))

    def close(self) -> None:
        """Wait for what is queued, and give everything back."""
        with self._closing as steps:
            steps.callback(self._driver.synchronize_stream, self.stream)
            steps.callback(self._on_neighbour, self._driver.synchronize_stream, self._filling)

    def _copy_slot(self, address: int, host_address: int, size_bytes: Bytes) -> None:
        driver, slot = self._driver, self._next
        self._next = (slot + 1) % self._slots
        staged = self._staging + slot * self._slot_bytes
        driver.set_context(self._there)
        try:
            if slot in self._used:
                driver.wait_event(self._filling, self._emptied[slot])
            driver.copy_in(staged, host_address, size_bytes, self._filling)
            driver.record_events((self._filled[slot],), self._filling)
        finally:
            driver.set_context(self._context)
        driver.wait_event(self.stream, self._filled[slot])
        driver.copy_across(address, staged, size_bytes, self.stream)
        driver.record_events((self._emptied[slot],), self.stream)
        self._used.add(slot)

    def _create_staging(self, undo: ExitStack, own: int) -> int:
        """Memory of the neighbour that both devices may touch."""
        driver = self._driver
        size_bytes = round_up(self._slot_bytes * self._slots, driver.granularity(self._neighbour))
        memory = driver.create_memory(self._neighbour, size_bytes)
        undo.callback(driver.release_memory, memory)
        address = driver.reserve_addresses(size_bytes)
        undo.callback(driver.free_addresses, address, size_bytes)
        driver.map(address, size_bytes, memory)
        undo.callback(driver.unmap, address, size_bytes)
        for device in (self._neighbour, own):
            driver.allow_access(device, address, size_bytes)
        return address

    def _create_events(self, undo: ExitStack, *, there: bool) -> list[int]:
        events = []
        for _ in range(self._slots):
            events.append(self._driver.create_event())
            destroy = self._driver.destroy_event
            if there:
                undo.callback(self._on_neighbour, destroy, events[-1])
            else:
                undo.callback(destroy, events[-1])
        return events

    def _on_neighbour(self, call: Callable[[int], None], handle: int) -> None:
        self._driver.set_context(self._there)
        try:
            call(handle)
        finally:
            self._driver.set_context(self._context)
