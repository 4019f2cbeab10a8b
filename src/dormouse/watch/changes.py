"""What has changed from one picture to the next, as little as tells it. Pure.

A changed function is told by the fields that differ, a changed device, load or queue as a whole: there are few of
them. Histories are told by the points that have come.
"""

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from dormouse.watch.history import POINTS
from dormouse.watch.picture import Picture, Point, Watched

_WHOLE = ("devices", "loads", "queue", "host", "totals", "currency")
_FIELDS = Watched.__struct_fields__
_TYPES = get_type_hints(Picture)


def between(before: Picture, after: Picture) -> dict[str, Any]:
    """Empty if nothing has changed but the time. ``functions``: by name, the fields that differ, all of one that is
    new, None for one that has gone. ``points``: by name, those that have come since, as many as ``bucket`` has risen;
    who is not among them got none."""
    told: dict[str, Any] = {}
    for name in _WHOLE:
        value = getattr(after, name)
        if value != getattr(before, name):
            told[name] = value
    functions = _functions(before, after)
    if functions:
        told["functions"] = functions
    if after.bucket != before.bucket:
        told["bucket"] = after.bucket
        told["points"] = _points(before, after)
    if told:
        told["at_ms"] = after.at_ms
    return told


def _functions(before: Picture, after: Picture) -> dict[str, Any]:
    known = before.functions
    told: dict[str, Any] = {}
    for name, now in after.functions.items():
        then = known.get(name)
        if then is None:
            told[name] = now
        elif then is not now and then != now:
            told[name] = _fields(then, now)
    for name in known:
        if name not in after.functions:
            told[name] = None
    return told


def _fields(then: Watched, now: Watched) -> dict[str, Any]:
    return {field: value for field in _FIELDS if (value := getattr(now, field)) != getattr(then, field)}


def _points(before: Picture, after: Picture) -> dict[str, tuple[Point | None, ...]]:
    come = after.bucket - before.bucket
    fresh = {name: points[-come:] for name, points in after.histories.items()}
    return {name: points for name, points in fresh.items() if any(point is not None for point in points)}


def applied(before: Picture, told: Mapping[str, Any]) -> Picture:
    """The picture after changes, as they come out of JSON."""
    changed = {name: msgspec.convert(told[name], _TYPES[name]) for name in (*_WHOLE, "at_ms", "bucket") if name in told}
    functions, histories = dict(before.functions), dict(before.histories)
    for name, fields in told.get("functions", {}).items():
        if fields is None:
            del functions[name]
            histories.pop(name, None)
        else:
            known = msgspec.to_builtins(functions[name]) if name in functions else {}
            functions[name] = msgspec.convert({**known, **fields}, Watched)
    if "bucket" in told:
        come = min(told["bucket"] - before.bucket, POINTS)
        for name in functions:
            fresh = msgspec.convert(told["points"].get(name, [None] * come), tuple[Point | None, ...])
            histories[name] = (*histories.get(name, ()), *fresh)[-POINTS:]
    return msgspec.structs.replace(before, functions=functions, histories=histories, **changed)
