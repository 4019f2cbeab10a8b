"""Keeps what watching a node takes between two pictures: points of histories, always; costs, while somebody looks."""

import asyncio
import logging
from collections.abc import Iterator, Mapping

from dormouse.control.catalog import Deployed
from dormouse.control.costs import Costs
from dormouse.control.portrait import Portrait
from dormouse.core.types import Ns
from dormouse.errors import DormouseError
from dormouse.watch.history import BUCKET_NS
from dormouse.watch.picture import Picture

WATCHED_NS: Ns = 3 * BUCKET_NS
"""So long after the last picture somebody is taken to look still."""
PAUSE_S = 0.02
"""Between parts of the points that are taken at the same time."""

_LOG = logging.getLogger("dormouse.control")


class Watching:
    """``deployed``: the node's own, which changes."""

    def __init__(self, portrait: Portrait, deployed: Mapping[str, Deployed], costs: Costs | None) -> None:
        self._portrait = portrait
        self._deployed = deployed
        self._costs = costs
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._asked_ns: Ns | None = None
        self._complained = False

    def start(self) -> None:
        """Take points from now on, and every few seconds."""
        self._go_on(self._portrait.taking_points(self._deployed))
        if self._asked_ns is not None and self._now() - self._asked_ns < WATCHED_NS:
            self._look_at_costs()
        self._next = self._loop.call_later(BUCKET_NS / 1e9, self.start)

    def _go_on(self, taking: Iterator[None]) -> None:
        """A little at a time: requests come in between."""
        for _ in taking:
            self._pause = self._loop.call_later(PAUSE_S, self._go_on, taking)
            return

    def picture(self, now: Ns) -> Picture:
        first, self._asked_ns = self._asked_ns is None, self._now()
        if first:
            self._look_at_costs()
        return self._portrait.picture(self._deployed, now, self._costs)

    def _now(self) -> Ns:
        return int(self._loop.time() * 1e9)

    def _look_at_costs(self) -> None:
        if self._costs is not None and (self._looking is None or self._looking.done()):
            self._looking = self._loop.create_task(self._look(self._costs))

    async def _look(self, costs: Costs) -> None:
        try:
            await costs.look()
            self._complained = False
        except (DormouseError, OSError) as fault:
            if not self._complained:
                _LOG.warning("costs are not shown for the time being: %s", fault)
            self._complained = True

    async def close(self) -> None:
        """To be called before the ledger is closed."""
        for timer in filter(None, (self._next, self._pause)):
            timer.cancel()
        self._costs = None
        if self._looking is not None:
            await self._looking
