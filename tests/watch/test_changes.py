"""Changes tell what differs, and nothing else; whoever applies them has the picture."""

from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dormouse.watch.changes import applied, between
from dormouse.watch.history import POINTS
from dormouse.watch.picture import Device, Host, Load, Picture, Place, Point, Totals, Waiting, Watched

ROW = Watched("f", "1", "", False, "READY", "host", "none", 10, 0, 100.0, 98.0)
NAMES = ("a", "b", "constructor", "ü")


def picture(**changes: object) -> Picture:
    return replace(Picture(0, 5000, 1, {"f": ROW}, {"f": (None,)}, Totals()), **changes)


def test_time_alone_is_no_change() -> None:
    assert between(picture(at_ms=1), picture(at_ms=2)) == {}


def test_a_function_is_told_by_the_fields_that_differ() -> None:
    after = picture(at_ms=5, functions={"f": replace(ROW, requests=3, on=("cpu:0",))})
    assert between(picture(), after) == {"functions": {"f": {"requests": 3, "on": ("cpu:0",)}}, "at_ms": 5}


def test_one_that_comes_is_told_whole_and_one_that_goes_by_its_name() -> None:
    new = replace(ROW, name="new")
    changes = between(picture(), picture(functions={"new": new}))
    assert changes["functions"] == {"new": new, "f": None}


def test_points_are_told_once_and_only_those_there_are() -> None:
    point = Point(5, 1, 1, 1)
    histories = {"f": (None, point), "idle": (None, None)}
    functions = {"f": ROW, "idle": replace(ROW, name="idle")}
    before = picture(functions=functions, histories={"f": (None,), "idle": (None,)})
    changes = between(before, replace(before, bucket=2, histories=histories))
    assert changes == {"bucket": 2, "points": {"f": (point,)}, "at_ms": 0}


rows = st.builds(
    lambda requests, on, paths: replace(ROW, requests=requests, on=on, paths=paths),
    st.integers(0, 3),
    st.sampled_from([(), ("cpu:0",), ("cpu:0", "cpu:1")]),
    st.dictionaries(st.sampled_from(["host", "resident"]), st.integers(0, 3)),
)
points = st.none() | st.builds(Point, st.just(1.5), st.integers(1, 2), st.just(2), st.just(1))
devices = st.lists(
    st.builds(
        lambda free, place: Device("d", "d", "", True, 10, 1, free, places=(Place("f", place, "resident"),)),
        st.integers(0, 2),
        st.integers(1, 2),
    ),
    max_size=1,
)


@st.composite
def histories_of_a_node(draw: st.DrawFn) -> list[Picture]:
    """Pictures one after the other: functions come and go, histories grow all at the same time."""
    taken: list[Picture] = []
    histories: dict[str, tuple[Point | None, ...]] = {}
    bucket = draw(st.integers(0, 70))
    for _ in range(draw(st.integers(2, 5))):
        functions = draw(st.dictionaries(st.sampled_from(NAMES), rows))
        come = draw(st.integers(0, 3)) if taken else 1
        bucket += come
        kept = {name: histories.get(name, ()) for name in functions}
        if come:
            fresh = {name: tuple(draw(points) for _ in range(come)) for name in functions}
            kept = {name: (*old, *fresh[name])[-POINTS:] for name, old in kept.items()}
        histories = kept
        told = Totals(functions=len(functions))
        host = Host(used_bytes=draw(st.integers(0, 1)))
        queue = (Waiting("a", 1, 2.5, "so"),) if draw(st.booleans()) else ()
        loads = (Load("a", "d", "host", 1, 2.5, 3.5, helpers=("e",)),) if draw(st.booleans()) else ()
        at_ms = float(len(taken))
        seen = tuple(draw(devices))
        taken.append(Picture(at_ms, 5000, bucket, functions, histories, told, True, seen, loads, queue, host, "USD"))
    return taken


@given(histories_of_a_node())
def test_changes_make_of_one_picture_the_next(taken: list[Picture]) -> None:
    """As JSON says it, whatever happens in between."""
    known = msgspec.json.decode(msgspec.json.encode(taken[0]), type=Picture)
    for before, after in pairwise(taken):
        changes = msgspec.json.decode(msgspec.json.encode(between(before, after)))
        known = applied(known, changes)
        assert replace(known, at_ms=after.at_ms, histories={}) == replace(after, histories={})
        # Where points have not been told, there may be more leading Nones than there are in the picture.
        assert known.histories.keys() >= {name for name, each in after.histories.items() if any(each)}
        for name, each in after.histories.items():
            assert drop(known.histories.get(name, ())) == drop(each)


def drop(points: tuple[Point | None, ...]) -> tuple[Point | None, ...]:
    """Without what says nothing at the beginning."""
    first = next((at for at, point in enumerate(points) if point is not None), len(points))
    return points[first:]
