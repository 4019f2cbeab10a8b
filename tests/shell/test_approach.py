"""When an image has nearly arrived: copies at a steady pace, on a clock that only they move."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dormouse.core.types import FOREVER_NS
from dormouse.errors import DeviceError
from dormouse.executor.approach import Approach, Link
from dormouse.executor.arrival import Arrival

GROUP = 100
GROUPS = 20


@dataclass
class Copies:
    """Groups of 100 bytes that arrive one after the other; whoever waits for one finds the clock there."""

    ns_per_group: int = 1000
    delay_ns: int = 0
    now_ns: int = 0
    waits: list[int] = field(default_factory=list)
    said_at_ns: list[int] = field(default_factory=list)

    @property
    def end_ns(self) -> int:
        return self.delay_ns + GROUPS * self.ns_per_group

    def approach(self, lead_ns: int, link: Link) -> Approach:
        approach = Approach(lead_ns, link, lambda: self.said_at_ns.append(self.now_ns), lambda: self.now_ns)
        approach.begin([GROUP * (group + 1) for group in range(GROUPS)])
        return approach

    def arrival(self, fails_at: int = GROUPS) -> Arrival:
        arrival = Arrival()
        for group in range(GROUPS):
            arrival.announce(_Copied(self, group, fails_at))
        return arrival


@dataclass
class _Copied:
    copies: Copies
    group: int
    fails_at: int

    def wait(self, stream: int) -> None:
        raise AssertionError(f"stream {stream} waits; here only threads do")

    def synchronize(self) -> None:
        if self.group >= self.fails_at:
            raise DeviceError("the copy failed", "injected")
        self.copies.waits.append(self.group)
        arrived_ns = self.copies.delay_ns + (self.group + 1) * self.copies.ns_per_group
        self.copies.now_ns = max(self.copies.now_ns, arrived_ns)


def a_link(copies: Copies) -> Link:
    """One over which such an image has come."""
    link = Link()
    approach = copies.approach(FOREVER_NS, link)
    copies.arrival().settle()
    approach.end()
    copies.now_ns, copies.waits = 0, []
    return link


Known = Callable[[Copies], Link]


@pytest.mark.parametrize("known", [a_link, lambda _: Link()], ids=["a second image", "the first image"])
@pytest.mark.parametrize("lead_ns", [500, 1000, 2500, 7900, 15_000])
def test_it_is_said_a_group_early_at_most_and_never_late(lead_ns: int, known: Known) -> None:
    copies = Copies()
    link = known(copies)
    copies.approach(lead_ns, link).follow(copies.arrival())
    (said_ns,) = copies.said_at_ns
    assert lead_ns <= copies.end_ns - said_ns <= lead_ns + copies.ns_per_group
    assert len(copies.waits) <= 6, "it woke for a few of the groups only"


def test_a_copy_that_starts_slowly_is_not_taken_for_a_slow_one() -> None:
    copies = Copies(delay_ns=5000)
    copies.approach(2500, Link()).follow(copies.arrival())
    (said_ns,) = copies.said_at_ns
    assert 2500 <= copies.end_ns - said_ns <= 2500 + 2 * copies.ns_per_group


def test_an_image_that_is_quicker_than_the_last_is_caught_up_with() -> None:
    slow, copies = Copies(ns_per_group=3000), Copies()
    copies.approach(2500, a_link(slow)).follow(copies.arrival())
    (said_ns,) = copies.said_at_ns
    assert 2500 <= copies.end_ns - said_ns <= 2500 + 2 * copies.ns_per_group


def test_a_lead_longer_than_the_copy_is_over_at_once() -> None:
    copies = Copies()
    approach = copies.approach(30_000, a_link(copies))
    approach.hurry()
    approach.follow(copies.arrival())
    assert (copies.said_at_ns, copies.waits) == ([0], [])


def test_before_other_work_it_is_said_if_it_will_be_due_by_its_end() -> None:
    copies = Copies()
    approach = copies.approach(5000, a_link(copies))
    copies.now_ns = 10_000
    approach.hurry()
    approach.hurry(busy_ns=4000)
    assert copies.said_at_ns == []
    approach.hurry(busy_ns=5000)
    assert copies.said_at_ns == [10_000]


def test_nothing_is_said_where_nobody_waits_for_it() -> None:
    copies = Copies()
    approach = copies.approach(FOREVER_NS, a_link(copies))
    approach.hurry(busy_ns=50_000)
    approach.follow(copies.arrival())
    assert (copies.said_at_ns, copies.waits) == ([], [])


def test_a_copy_that_fails_is_told_of() -> None:
    copies = Copies()
    with pytest.raises(DeviceError, match="the copy failed"):
        copies.approach(500, Link()).follow(copies.arrival(fails_at=3))
    assert copies.said_at_ns == []
