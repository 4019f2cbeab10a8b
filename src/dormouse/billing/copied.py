"""A ledger that cannot be written, for a bill all the same: its SQLite copied into memory, and what segments have taken
in there. Nothing on the disk is changed, made or removed.
"""

import sqlite3
from pathlib import Path

from dormouse.billing.database import BUSY_S, Database
from dormouse.errors import ConfigurationFault


class CopiedLedger(Database):
    """As it was when it was made."""

    def __init__(self, state_dir: Path) -> None:
        """Raises ConfigurationFault."""
        self.state_dir = state_dir
        self.file = state_dir / "ledger.sqlite"
        self.directory = state_dir / "ledger"
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        try:
            self._copy()
            self._create()
        except sqlite3.Error as fault:
            self.connection.close()
            raise ConfigurationFault(f"{self.file} cannot be read: {fault}") from None

    def _copy(self) -> None:
        try:
            self._copy_from("mode=ro")
        except sqlite3.Error:
            # Beside a log of writes SQLite needs a file that it may not make here; without one it needs none.
            log = self.file.with_name(f"{self.file.name}-wal")
            if log.exists() and log.stat().st_size:
                raise
            self._copy_from("immutable=1")

    def _copy_from(self, how: str) -> None:
        source = sqlite3.connect(f"{self.file.absolute().as_uri()}?{how}", uri=True, timeout=BUSY_S)
        try:
            source.backup(self.connection)
        finally:
            source.close()

    def _delete_before(self, segment: int) -> None:
        """They are somebody else's still."""
