"""What one executor has moved, lost and told of, as messages to it and from it go by: counts, for whoever watches."""

from collections import Counter
from dataclasses import dataclass, field

from dormouse.core.messages import CommandRefused, EvictionFinished, Load, LoadFailed, LoadFinished
from dormouse.core.state import State
from dormouse.core.types import Bytes, CommandId

HOST, PEER, DETOUR = "host", "peer", "detour"


@dataclass(slots=True)
class Traffic:
    """Counts live on when its process does not."""

    restarts: int = 0
    """How often its process was lost; each time it is started again."""
    unaccounted_bytes: Bytes = 0
    """By its last report: what the driver has mapped less what the pool believes."""
    link_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Of images that have come in: by way, and from which device, or ``host``."""
    _loads: dict[CommandId, tuple[str, str]] = field(default_factory=dict)

    def begun(self, command: Load) -> None:
        """A load has been asked for."""
        if command.source is not None:
            way = (PEER, str(command.source))
        else:
            way = (DETOUR if command.helpers else HOST, "host")
        self._loads[command.command] = way

    def reported(self, message: object, state: State) -> None:
        """Something has ended; ``state`` does not know it yet."""
        if isinstance(message, LoadFinished):
            self.link_bytes[self._loads.pop(message.command)] += state.functions[message.function].spec.image_bytes
        elif isinstance(message, LoadFailed | CommandRefused):
            self._loads.pop(message.command, None)
        elif isinstance(message, EvictionFinished):
            self.unaccounted_bytes = message.unaccounted_bytes

    def lost(self) -> None:
        """Its process has ended, and what it was doing with it."""
        self.restarts += 1
        self.unaccounted_bytes = 0
        self._loads.clear()
