"""Links share fairly: what a copy takes follows from who else copies when."""

import pytest

from dormouse.sim.network import Link, Network

GIGA = 1_000_000_000


def drain(network: Network) -> list[tuple[int, int]]:
    """Ends in order, as ``(time, bytes left)``."""
    ends = []
    while (copy := network.next()) is not None:
        network.end(copy.ends_ns, copy)
        ends.append((copy.ends_ns, round(copy.remaining_bytes)))
    return ends


def test_a_copy_alone_takes_its_bytes_over_the_slowest_link() -> None:
    network = Network()
    network.start(0, 2 * GIGA, [[Link("own", 4 * GIGA), Link("shared", 2 * GIGA)]])
    assert drain(network) == [(GIGA, 0)]


def test_two_neighbours_share_what_they_share_and_only_while_both_copy() -> None:
    network, shared = Network(), Link("switch", 2 * GIGA)
    network.start(0, 1 * GIGA, [[Link("a", 2 * GIGA), shared]])
    network.start(0, 2 * GIGA, [[Link("b", 2 * GIGA), shared]])
    # One gigabyte each at one a second; then the other's second gigabyte at two a second.
    assert drain(network) == [(GIGA, 0), (GIGA * 3 // 2, 0)]


def test_what_is_not_shared_does_not_slow() -> None:
    network = Network()
    network.start(0, GIGA, [[Link("a", GIGA)]])
    network.start(0, GIGA, [[Link("b", GIGA)]])
    assert drain(network) == [(GIGA, 0), (GIGA, 0)]


def test_two_routes_are_as_fast_as_both_together() -> None:
    network = Network()
    network.start(0, 2 * GIGA, [[Link("direct", GIGA)], [Link("neighbour", GIGA)]])
    assert drain(network) == [(GIGA, 0)]


def test_a_link_that_slows_in_the_middle_delays_the_rest() -> None:
    network, link = Network(), Link("a", 2 * GIGA)
    copy = network.start(0, 2 * GIGA, [[link]])
    network.change(GIGA // 2, link, GIGA / 2)
    assert copy.ends_ns == GIGA // 2 + 2 * GIGA


def test_time_does_not_go_back() -> None:
    network = Network()
    network.start(10, GIGA, [[Link("a", GIGA)]])
    with pytest.raises(AssertionError):
        network.start(9, GIGA, [[Link("a", GIGA)]])
