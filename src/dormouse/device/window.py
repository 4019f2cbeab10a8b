"""A peer's pool as a GPU sees it: every chunk of it mapped once, in order, in one range of addresses.

Nothing is imported on the swap path: the peer's byte ``n`` lies at ``address + n`` for as long as the window is open.
Mappings keep the memory alive, also when the process that made it has died; what it then holds is nobody's.
"""

import os
from collections.abc import Iterable
from contextlib import ExitStack

from dormouse.core.types import Bytes
from dormouse.device.driver import Driver

OPENED_PARTS = 32
"""So many are opened by one call: the copy lane, which has loads to map meanwhile, waits for one call at most."""


class PeerWindow:
    """Open when made; needs a current context, here and in ``close``. Raises DeviceError and leaves nothing mapped."""

    def __init__(self, driver: Driver, device: int, part_bytes: Bytes, parts: int, descriptors: Iterable[int]) -> None:
        self._driver = driver
        self.size_bytes = part_bytes * parts
        self._placed_bytes: Bytes = 0
        with ExitStack() as undo:
            self.address = driver.reserve_addresses(self.size_bytes)
            undo.callback(driver.free_addresses, self.address, self.size_bytes)
            undo.callback(self._withdraw)
            opened = 0
            for fd in descriptors:
                self._place(fd, part_bytes)
                if self._placed_bytes - opened >= OPENED_PARTS * part_bytes or self._placed_bytes == self.size_bytes:
                    driver.allow_access(device, self.address + opened, self._placed_bytes - opened)
                    opened = self._placed_bytes
            undo.pop_all()

    def close(self) -> None:
        with ExitStack() as steps:
            steps.callback(self._driver.free_addresses, self.address, self.size_bytes)
            steps.callback(self._withdraw)

    def _place(self, fd: int, part_bytes: Bytes) -> None:
        try:
            memory = self._driver.import_memory(fd)
        finally:
            os.close(fd)
        with ExitStack() as after:
            after.callback(self._driver.release_memory, memory)  # the mapping has a reference of its own
            self._driver.map(self.address + self._placed_bytes, part_bytes, memory)
            self._placed_bytes += part_bytes

    def _withdraw(self) -> None:
        if self._placed_bytes:
            self._driver.unmap(self.address, self._placed_bytes)
            self._placed_bytes = 0
