"""How many scans a JPEG has, by its markers alone: each goes over all of the picture, however few bytes it has."""

import re

MOST_SCANS = 100
"""Progressive files in use have about ten."""
USUAL_SCANS = 16

_MARKER = re.compile(rb"\xff+([\x01-\xcf\xd8-\xfe])", re.DOTALL)
"""Neither a byte of the scan's data that is escaped, nor a restart of it."""
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_WITHOUT_LENGTH = frozenset((0x01, 0xD8))


def scans_in(file: bytes | memoryview) -> int:
    """At most one more than MOST_SCANS."""
    at = scans = 0
    while scans <= MOST_SCANS and (marker := _MARKER.search(file, at)) is not None:
        kind, at = marker[1][0], marker.end()
        if kind == _END_OF_IMAGE:
            break
        scans += kind == _START_OF_SCAN
        if kind not in _WITHOUT_LENGTH:
            at += int.from_bytes(file[at : at + 2])
    return scans
