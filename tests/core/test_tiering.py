"""The host tier by intervals: who leaves host memory, who comes back before it is asked, and how that is counted."""

import pytest

from dormouse.core.disk import ASSUMED_BYTES_PER_S, KEPT_BYTES, OVERHEAD_NS, Disk
from dormouse.core.intervals import MOST, Intervals
from dormouse.core.messages import (
    DropImage,
    Execute,
    ExecutionFinished,
    ExecutorLost,
    ImageRead,
    ImageReadFailed,
    Load,
    LoadFinished,
    LoadRequested,
    ReadImage,
    RemovalRequested,
    SetTimer,
    TimerFired,
    UnloadRequested,
)
from dormouse.core.state import ImageState
from dormouse.core.tiering import CONSIDERED
from dormouse.core.types import FunctionId, Ns, Pin, Settings
from tests.core.bench import GPU, MIB, MS, Bench, every, only

SECOND = 1000 * MS
A, B, C, D = (FunctionId(f"{letter}/1") for letter in "abcd")


def node(host_mib: int = 20, **changes: object) -> Bench:
    """Host memory for so much; a device for all of it."""
    bench = Bench(Settings(host_mib * MIB, host_tier="interval", ahead_ns=0, **changes))  # type: ignore[arg-type]
    bench.join()
    return bench


def ask(bench: Bench, name: str, at_ns: Ns) -> None:
    """One request at a point in time, with all that it takes, each step a millisecond."""
    fire(bench, at_ns)
    bench.ask(name, after_ms=(at_ns - bench.now) / MS)
    if bench.state.functions[FunctionId(name)].image is ImageState.READING:
        bench.send(ImageRead(FunctionId(name)))
    for kind in (Load, Execute):
        for command in tuple(bench.state.executors[GPU].pending.values()):
            if isinstance(command, Load) and kind is Load:
                bench.send(LoadFinished(GPU, command.command, command.function, 1))
            elif isinstance(command, Execute) and kind is Execute:
                bench.send(ExecutionFinished(GPU, command.command, command.request, 1))


def fire(bench: Bench, until_ns: Ns) -> list[ReadImage]:
    """Let timers fire; the reads that they bring forth, none of which ends."""
    found = []
    while (timer_ns := bench.state.timer_ns) is not None and timer_ns <= until_ns:
        commands = bench.send(TimerFired(), after_ms=max(0, timer_ns - bench.now) / MS)
        found += every(commands, ReadImage)
    return found


def every_ten_seconds(bench: Bench, name: str, times: int = 8, begin_ns: Ns = 10 * SECOND) -> Ns:
    """When the last one was."""
    for number in range(times):
        ask(bench, name, begin_ns + number * 10 * SECOND)
    return begin_ns + (times - 1) * 10 * SECOND


# ------------------------------------------------------------------ what is known


def test_pauses_are_counted_and_those_that_are_over_left_out() -> None:
    intervals = Intervals()
    for pause_ms in (10, 10, 10, 1000):
        intervals.add(pause_ms * MS)
    everything, rest = intervals.longer_than(0), intervals.longer_than(100 * MS)
    assert (everything.count, rest.count, intervals.longer_than(5 * SECOND).count) == (4, 1, 0)
    assert everything.no_shorter_than(500_000) == pytest.approx(10 * MS, rel=0.07)
    assert rest.no_longer_than(50_000) == pytest.approx(1000 * MS, rel=0.07)
    assert rest.mean_ns() == pytest.approx(1000 * MS, rel=0.07)


def test_pauses_of_long_ago_are_forgotten_and_there_are_never_too_many() -> None:
    intervals = Intervals()
    for number in range(5 * MOST):
        intervals.add((1 + number) * MS)
    assert intervals.count < MOST
    for _ in range(3 * MOST):
        intervals.add(7 * MS)
    assert intervals.longer_than(8 * MS).count == 0


def test_the_speed_of_the_disk_is_assumed_and_then_measured() -> None:
    disk = Disk()
    assert disk.read_ns(ASSUMED_BYTES_PER_S) == OVERHEAD_NS + SECOND
    for _ in range(20):
        disk.measured(KEPT_BYTES // 4, 4 * SECOND)
    assert disk.read_ns(KEPT_BYTES // 4) == pytest.approx(OVERHEAD_NS + 4 * SECOND, rel=0.001)
    assert disk.read_bytes <= KEPT_BYTES


# ------------------------------------------------------------------ who leaves


def test_a_function_that_will_not_be_asked_for_long_leaves_before_one_used_less_lately() -> None:
    bench = node()
    for name in ("a/1", "b/1"):
        bench.park(name)
    for second in range(10):
        ask(bench, "b/1", second * SECOND + 10 * SECOND)
    for number in range(6):
        ask(bench, "a/1", (20 + 60 * number) * SECOND)
        for second in range(1, 60, 2):
            ask(bench, "b/1", (20 + 60 * number + second) * SECOND)
    ask(bench, "a/1", 380 * SECOND)
    assert only(bench.deploy("c/1"), DropImage).function == A, "b was asked longer ago, but will be asked sooner"


def test_lru_looks_at_use_alone() -> None:
    bench = Bench(Settings(20 * MIB, ahead_ns=0))
    bench.join()
    for name in ("a/1", "b/1"):
        bench.park(name)
    every_ten_seconds(bench, "a/1")
    assert only(bench.deploy("c/1"), DropImage).function == B
    assert bench.state.far.first() is None
    assert not bench.state.promotions


def test_what_is_pinned_or_wanted_never_leaves() -> None:
    bench = node()
    bench.park("a/1", pin=Pin.HOST)
    bench.park("b/1")
    bench.ask("b/1")
    assert not every(bench.deploy("c/1"), DropImage)


def test_more_images_than_are_weighed_can_leave() -> None:
    bench = node(3 * CONSIDERED)
    for number in range(3 * CONSIDERED // 2):
        bench.park(f"small{number}/1", 2)
    dropped = every(bench.deploy("large/1", 60), DropImage)
    assert len(dropped) == 30
    dropped = every(bench.send(ImageRead(FunctionId("large/1"))), DropImage)
    dropped = every(bench.deploy("larger/1", 64), DropImage)
    assert FunctionId("large/1") in {command.function for command in dropped}


# ------------------------------------------------------------------ who comes back


def empty_the_device(bench: Bench) -> None:
    bench.send(ExecutorLost(GPU, "killed"))
    bench.join()


def away(bench: Bench) -> Ns:
    """a, asked every ten seconds, has left for c, which is asked no more, and the device; when a was asked last."""
    bench.park("a/1")
    last_ns = every_ten_seconds(bench, "a/1")
    bench.park("b/1", pin=Pin.HOST)
    bench.park("c/1")
    empty_the_device(bench)
    assert bench.state.functions[A].image is ImageState.DISK
    return last_ns


def test_an_image_is_read_just_before_it_is_due() -> None:
    bench = node()
    last_ns = away(bench)
    assert [read.function for read in fire(bench, last_ns + 10 * SECOND)] == [A]
    assert last_ns + 8 * SECOND < bench.now < last_ns + 10 * SECOND
    bench.send(ImageRead(A))
    ask(bench, "a/1", last_ns + 10 * SECOND)
    ledger = bench.state.functions[A].ledger
    assert (ledger.promotions_used, ledger.promotions_unused) == (1, 0)
    assert (ledger.reads, ledger.read_bytes) == (2, 20 * MIB)


def test_what_is_on_a_device_is_not_read_ahead_unless_it_leaves_there() -> None:
    bench = node()
    bench.park("a/1")
    last_ns = every_ten_seconds(bench, "a/1")
    bench.park("b/1", pin=Pin.HOST)
    bench.park("c/1")
    assert fire(bench, last_ns + 9_500 * MS) == []
    empty_the_device(bench)
    assert [read.function for read in fire(bench, last_ns + 9_900 * MS)] == [A]


def test_one_that_nobody_asks_for_after_all_leaves_and_is_counted() -> None:
    bench = node()
    last_ns = away(bench)
    fire(bench, last_ns + 10 * SECOND)
    bench.send(ImageRead(A))
    bench.send(TimerFired(), after_ms=120_000)
    bench.park("d/1")
    ledger = bench.state.functions[A].ledger
    assert (ledger.promotions_used, ledger.promotions_unused) == (0, 1)
    assert fire(bench, bench.now + 3600 * SECOND) == [], "nothing is known of such a long pause"


def test_a_read_ahead_that_fails_is_in_vain_and_refuses_nobody() -> None:
    bench = node()
    last_ns = away(bench)
    fire(bench, last_ns + 10 * SECOND)
    bench.send(ImageReadFailed(A, "damaged"))
    ledger = bench.state.functions[A].ledger
    assert (ledger.promotions_unused, sum(ledger.refusals.values())) == (1, 0)


def test_nothing_that_will_be_asked_sooner_makes_room() -> None:
    bench = node(12)
    bench.park("a/1")
    last_ns = every_ten_seconds(bench, "a/1")
    bench.park("b/1")
    empty_the_device(bench)
    for tenth in range(1, 99):
        ask(bench, "b/1", last_ns + tenth * SECOND // 10)
    assert bench.state.functions[A].image is ImageState.DISK
    assert bench.state.functions[B].image is ImageState.HOST
    assert bench.state.functions[A].ledger.reads == 1


def test_reads_that_are_asked_for_go_first_and_one_lane_stays_free_for_them() -> None:
    bench = node()
    last_ns = away(bench)
    bench.send(TimerFired(), after_ms=(last_ns + 8 * SECOND - bench.now) / MS)
    bench.deploy("d/1", 9)
    assert bench.state.reading == 1
    assert fire(bench, last_ns + 9_900 * MS) == []
    assert bench.state.functions[A].promote_at_ns is not None, "looked at again"
    bench.send(ImageRead(D))


def test_one_that_is_asked_or_leaves_before_it_is_due_is_not_promoted() -> None:
    for event in (UnloadRequested, RemovalRequested):
        bench = node()
        last_ns = away(bench)
        bench.send(event(bench.operation(), A))
        assert fire(bench, last_ns + 10 * SECOND) == []
    bench = node()
    last_ns = away(bench)
    bench.ask("a/1", timeout_ms=60_000)
    bench.send(ImageRead(A))
    assert fire(bench, last_ns + 9_900 * MS) == [], "it has been read already"


def test_pauses_that_are_not_alike_promise_nothing() -> None:
    bench = node()
    bench.park("a/1")
    at_ns = 10 * SECOND
    for pause in (1, 40, 3, 100, 9, 22, 60, 2):
        at_ns += pause * SECOND
        ask(bench, "a/1", at_ns)
    bench.park("b/1", pin=Pin.HOST)
    bench.park("c/1")
    assert bench.state.functions[A].image is ImageState.DISK
    assert not bench.state.promotions


def test_many_that_are_due_at_once_take_several_turns() -> None:
    bench = node(24, concurrent_reads=1)
    names = [f"f{number}/1" for number in range(12)]
    for name in names:
        bench.park(name, 1)
    for number in range(8):
        for name in names:
            ask(bench, name, (10 + 10 * number) * SECOND)
    bench.park("b/1", 24)
    empty_the_device(bench)
    assert len(bench.state.promotions) == 12
    timer = bench.state.timer_ns
    commands = bench.send(TimerFired(), after_ms=(max(due for due, _ in bench.state.promotions) - bench.now) / MS)
    assert timer is not None
    assert len(every(commands, ReadImage)) <= 1
    assert only(commands, SetTimer).at_ns <= bench.now, "the others come at once"
    fire(bench, bench.now + 10 * SECOND)


def test_promises_that_were_overtaken_are_swept_and_skipped() -> None:
    bench = node(12)
    for name in ("a/1", "b/1"):
        bench.park(name)
        for hour in range(8):
            ask(bench, name, bench.now + 3600 * SECOND + hour)
    empty_the_device(bench)
    most = 0
    for number in range(200):
        for name in (A, B):  # who drop each other, and nobody asks; reads take longer and longer
            bench.send(LoadRequested(bench.operation(), name))
            bench.send(ImageRead(name), after_ms=1 + number / 10)
            most = max(most, len(bench.state.promotions))
    assert 60 < most <= 2 * 2 + 64
    bench.send(TimerFired(), after_ms=4000 * 1000)
    bench.send(TimerFired())
    assert len(bench.state.promotions) < 60
