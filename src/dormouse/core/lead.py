"""How long before the end of its copy a function's first run should begin.

A run that begins on the layers that have come so far holds the compute lane while it waits for the others; a resident
function that is asked meanwhile waits with it. One that begins when the rest of the copy takes as long as its own
computing holds the lane no longer than a resident run would, and still ends as the last layer comes.
"""

from dataclasses import dataclass

from dormouse.core.types import FOREVER_NS, Ns

MARGIN_NS: Ns = 500_000
"""For messages to and fro, and for what a copy's speed is mistaken by, which the share below covers when it is long."""
MARGIN_PERCENT = 15


@dataclass(slots=True)
class Lead:
    """What is known of one function's computing time."""

    computing_ns: Ns = 0
    known: bool = False
    """Measured; else a guess, or 0: nothing has run yet."""

    @property
    def lead_ns(self) -> Ns:
        """FOREVER_NS: begin at once."""
        if not self.computing_ns:
            return FOREVER_NS
        return self.computing_ns * (100 + MARGIN_PERCENT) // 100 + MARGIN_NS

    def computed(self, device_ns: Ns) -> None:
        """A run that did not have to wait for a copy. Rises at once and falls slowly: a lead too short costs the
        request that is loaded for, one too long only whoever else might come."""
        fallen = self.computing_ns - (self.computing_ns - device_ns) // 8
        self.computing_ns = max(device_ns, fallen) if self.known else device_ns
        self.known = True

    def waited(self, device_ns: Ns) -> None:
        """A run that ended as the copy did: computing takes less than this, nobody knows how much."""
        if not self.known:
            shortest = min(self.computing_ns, device_ns) if self.computing_ns else device_ns
            self.computing_ns = shortest // 2
        elif device_ns < self.computing_ns:
            self.computed(device_ns)
