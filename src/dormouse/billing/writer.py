"""Entries on their way to a segment: what must be there before an answer goes out, and what may come with the next.

Knows no event loop. What could not be written is kept and tried again with whatever comes next, in the same order.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dormouse.billing.records import NOT_RECORDED, Beat, Record, RequestEnded, encoded
from dormouse.billing.segments import SegmentWriter, Sync
from dormouse.core.types import Bytes
from dormouse.errors import StateNotKept

_LOG = logging.getLogger("dormouse.billing")
MOST_WAITING = 4096
"""Records that nobody waits for are written when there are so many, if not before."""


class LedgerWriter:
    """The entries of one life of a server. One thread."""

    def __init__(self, directory: Path, life: int, sync: Sync, *, after: int = 0) -> None:
        """Raises OSError."""
        self._directory = directory
        self.life = life
        self.survives = sync
        self._segments = SegmentWriter(directory, sync, after=after)
        self._waiting: list[Record] = []
        self.written_bytes: Bytes = 0
        self.fault: StateNotKept | None = None
        """Why the last attempt to write has failed; None: it has not."""

    def note(self, records: Sequence[Record]) -> None:
        """To be written some time soon; lost in a crash until then."""
        self._waiting.extend(records)
        if len(self._waiting) >= MOST_WAITING and self.fault is None:
            self.flush()

    def enter(self, records: Sequence[Record]) -> StateNotKept | None:
        """Write these, and all that waits, now. If that fails none of their answers may go out: what is kept of them
        says so, and charges nothing."""
        noted = len(self._waiting)
        self._waiting.extend(records)
        fault = self.flush()
        if fault is not None:
            self._waiting[noted:] = [_uncharged(record) for record in records]
        return fault

    def flush(self) -> StateNotKept | None:
        """Write what waits."""
        if not self._waiting:
            return self.fault
        page = encoded(self.life, self._waiting)
        try:
            self._segments.append(page)
        except OSError as fault:
            if self.fault is None:
                _LOG.error("the ledger %s cannot be written: %s", self._directory, fault.strerror)
            self.fault = StateNotKept(
                f"the ledger cannot be written ({fault.strerror}), and what cannot be billed is not "
                "answered; requests are served again as soon as the disk has room",
                retry_after_s=5,
            )
        else:
            self._waiting.clear()
            self.written_bytes += len(page)
            self.fault = None
        return self.fault

    def beat(self, at_ns: int, *, last: bool = False) -> None:
        """Say that all is recorded up to now."""
        if self._waiting and isinstance(self._waiting[-1], Beat):
            self._waiting.pop()  # while the disk is full nothing needs to pile up
        self._waiting.append(Beat(at_ns, last))
        self.flush()

    def sync(self) -> None:
        """In any thread. Raises OSError."""
        self._segments.sync()

    def close(self) -> None:
        self._segments.close()


def _uncharged(record: Record) -> Record:
    if not isinstance(record, RequestEnded) or record.reason:
        return record
    return msgspec.structs.replace(record, reason=NOT_RECORDED, in_time=False, out_bytes=0)
