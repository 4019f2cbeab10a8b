"""What the server says of itself on standard error: a line for each thing, for people or for machines.

A record may carry fields beside its text; as text they are written ``key=value``, as JSON they are keys. Knows nothing
of requests.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import TextIO

OURS = "dormouse"
"""The logger above all of ours. Libraries' are heard from warnings on."""
_FIELDS = "dormouse_fields"
MOST_LINES = 20
"""Of a kind that others can cause, in a second."""
SECOND_NS = 1_000_000_000


def begin(form: str, level: str, stream: TextIO | None = None) -> None:
    """Write from now on, as ``text`` or ``json``, ours from ``level`` on."""
    handler = _StandardError() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(OURS).setLevel(level.upper())


def tell(logger: logging.Logger, level: int, text: str, **fields: object) -> None:
    """One line with fields. None of them may hold a key, nor what somebody has sent in a body."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", text, extra={_FIELDS: fields})


def fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """What it carries beside its text."""
    found: Mapping[str, object] = getattr(record, _FIELDS, {})
    return found


class Pace:
    """So many a second, and how many more there would have been."""

    def __init__(self, most: int = MOST_LINES) -> None:
        self.unsaid = 0
        self._most = most
        self._second = -1
        self._said = 0

    def allows(self, now_ns: int) -> bool:
        """Whether one more may be said, at a time of some clock in nanoseconds."""
        if now_ns // SECOND_NS != self._second:
            self._second, self._said = now_ns // SECOND_NS, 0
        if self._said >= self._most:
            self.unsaid += 1
            return False
        self._said += 1
        return True

    def said(self) -> int:
        """How many were not; from now on that is known."""
        unsaid, self.unsaid = self.unsaid, 0
        return unsaid


class _StandardError(logging.StreamHandler[TextIO]):
    """Whatever that is at the moment: whoever runs a command within a process puts another there for a while."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = " ".join(f"{name}={_plain(value)}" for name, value in fields_of(record).items())
        line = f"{record.levelname} {record.name}: {_one_line(record.getMessage())}"
        line = f"{line} {told}" if told else line
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _plain(value: object) -> str:
    """As it is, or quoted where it would not be one word."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and text and not set(text) & set(' "=') else json.dumps(text)


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")
