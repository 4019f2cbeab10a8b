"""One load, as those see it who wait for it: built, group by group, complete, or failed.

Announced by the copy lane's thread, waited for by the compute lane's. Knows fences, but no memory and no module.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dormouse.device.base import Fence
from dormouse.errors import DeviceError, Unavailable

_NONE = sys.maxsize


class ImageNotArrived(Unavailable):
    """The image that an execution needs is not there and will not come."""


class Arrival:
    """Made when a load is asked for; every execution that may use it holds on to it."""

    def __init__(self, source: str = "") -> None:
        self.source = source
        """The address of the peer that it comes from; none for host memory."""
        self.complete = False
        """Every group is in place; nobody needs to wait any more."""
        self.waited = -1
        """The last group that the compute stream has waited for. Kept by who runs."""
        self._fences: list[Fence] = []
        self._awaited = _NONE
        """The first group that somebody waits to see announced; nobody else is woken for a group."""
        self._whole = False
        self._begun = False
        self._failure: str | None = None
        self._changed = threading.Condition()

    @property
    def announced(self) -> int:
        """Groups whose copies are queued."""
        return len(self._fences)

    def begin(self) -> None:
        """The module is built and guarded: it may run, and wait for its groups. Once is enough, more do no harm."""
        with self._changed:
            self._begun = True
            self._changed.notify_all()

    def announce(self, fence: Fence, groups: int = 1) -> None:
        """The copies of the next groups are queued; ``fence`` stands behind them. Raises ImageNotArrived if it has
        been failed meanwhile."""
        self._check()
        with self._changed:
            self._fences += [fence] * groups
            if len(self._fences) > self._awaited:
                self._awaited = _NONE
                self._changed.notify_all()

    def close(self) -> None:
        """Every group is announced."""
        with self._changed:
            self._whole = True
            self._changed.notify_all()

    def fail(self, message: str) -> None:
        """Nothing more will arrive: whoever waits gets ImageNotArrived. What is complete stays so."""
        with self._changed:
            if not self.complete:
                self._failure = message
            self._changed.notify_all()

    def wait_begun(self) -> None:
        """Block until the module may run. Raises ImageNotArrived."""
        with self._changed:
            self._changed.wait_for(lambda: self._begun or self._failure is not None)
        self._check()

    def wait_whole(self) -> None:
        """Block until every group is announced, though not yet arrived. Raises ImageNotArrived."""
        if not self._whole:
            with self._changed:
                self._changed.wait_for(lambda: self._whole or self._failure is not None)
        self._check()

    def wait(self, group: int, stream: int) -> None:
        """Make ``stream`` (or this thread, where there are no streams) wait for a group. Raises ImageNotArrived."""
        if group >= len(self._fences):
            with self._changed:
                self._changed.wait_for(lambda: self._is_announced(group))
        self._check()
        with _told():
            self._fences[group].wait(stream)

    def confirm(self, group: int) -> None:
        """Block until a group, and so all before it, is in place. Raises ImageNotArrived if a copy has failed."""
        with _told():
            self._fences[group].synchronize()
        self._check()

    def reach(self, group: int) -> None:
        """Block until an announced group, and so all before it, is in place. Raises DeviceError if a copy failed."""
        self._fences[group].synchronize()

    def settle(self) -> None:
        """Block until every copy so far has ended, and mark the load complete. Raises DeviceError if one failed, and
        ImageNotArrived if the load was failed meanwhile."""
        self._fences[-1].synchronize()
        with self._changed:
            self._check()
            self.complete = True

    def _is_announced(self, group: int) -> bool:
        if group < len(self._fences) or self._failure is not None:
            return True
        self._awaited = min(self._awaited, group)
        return False

    def _check(self) -> None:
        if self._failure is not None:
            raise ImageNotArrived(self._failure)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except DeviceError as fault:
        raise ImageNotArrived(f"the image could not be copied in: {fault.message}") from None
