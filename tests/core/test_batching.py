"""Requests of one function that run together: who, how long they wait for each other, and how they end."""

import pytest

from dormouse.core.batching import shared
from dormouse.core.messages import (
    ChunkProduced,
    Command,
    CommandRefused,
    Execute,
    ExecutionFailed,
    ExecutionFinished,
    ExecutorLost,
    LoadFinished,
    Refuse,
    Reply,
    RequestCancelled,
    SetTimer,
    TimerFired,
)
from dormouse.core.state import Request
from dormouse.core.types import Batch, FunctionId, Limits, Reason, RequestId
from tests.core.bench import GPU, MS, Bench, every, only

F = FunctionId("f/1")


class Story:
    """A function that is resident and runs request 1; what is asked now waits."""

    def __init__(self, rows: int = 8, wait_ms: int = 0) -> None:
        self.bench = Bench()
        self.bench.join()
        self.bench.park("f/1", limits=Limits(timeout_ns=1000 * MS), batch=Batch(rows, wait_ms * MS))
        self.ask(1)
        (load,) = [c for c in self.pending if not isinstance(c, Execute)]
        self.bench.send(LoadFinished(GPU, load.command, F, 1))

    @property
    def pending(self) -> list[Execute]:
        return list(self.bench.state.executors[GPU].pending.values())  # type: ignore[arg-type]

    @property
    def running(self) -> Execute:
        run = self.bench.state.executors[GPU].executing
        assert run is not None
        return run

    def ask(self, rows: int, alike: str = "x", **more: float) -> list[Command]:
        return self.bench.ask("f/1", rows=rows, alike=alike, **more)  # type: ignore[arg-type]

    def end(self, device_ns: int = 1) -> list[Command]:
        run = self.running
        return self.bench.send(ExecutionFinished(GPU, run.command, run.request, device_ns, run.others))

    def fail(self, reason: Reason = Reason.INVALID_INPUT) -> list[Command]:
        run = self.running
        return self.bench.send(ExecutionFailed(GPU, run.command, run.request, reason, "it was bad", run.others))

    def alone(self) -> list[RequestId]:
        """The requests that run, one by one, each to its end."""
        ran = []
        while (run := self.bench.state.executors[GPU].executing) is not None:
            assert (run.others, run.padded_rows) == ((), 0)
            ran.append(run.request)
            self.end()
        return ran


@pytest.fixture
def story() -> Story:
    return Story()


def test_what_has_queued_up_runs_as_one_and_every_request_is_answered(story: Story) -> None:
    for rows in (2, 1, 3):
        story.ask(rows)
    run = only(story.end(), Execute)
    assert (run.request, run.requests, run.padded_rows) == (2, (2, 3, 4), 8)
    assert [reply.request for reply in every(story.end(), Reply)] == [2, 3, 4]
    assert story.bench.state.requests == {}


def test_no_more_rows_run_together_than_the_function_allows(story: Story) -> None:
    for rows in (4, 3, 3, 1, 1):
        story.ask(rows)
    assert only(story.end(), Execute).requests == (2, 3, 5), "one that does not fit is passed over"
    assert only(story.end(), Execute).requests == (4, 6), "and heads the next"


def test_one_that_is_unlike_the_others_is_passed_over_once(story: Story) -> None:
    for alike in ("x", "y", "x", "", "y"):
        story.ask(1, alike)
    assert only(story.end(), Execute).requests == (2, 4)
    assert only(story.end(), Execute).requests == (3, 6)
    run = only(story.end(), Execute)
    assert (run.requests, run.padded_rows) == ((5,), 0)


@pytest.mark.parametrize(("rows", "padded"), [(1, 0), (2, 0), (3, 4), (5, 8), (6, 8), (7, 0)])
def test_a_single_request_is_filled_up_to_a_power_of_two_unless_it_is_over_the_limit(rows: int, padded: int) -> None:
    story = Story(rows=6)
    story.ask(rows)
    assert only(story.end(), Execute).padded_rows == padded


def test_without_batches_requests_run_one_by_one() -> None:
    story = Story(rows=1)
    for _ in range(2):
        story.ask(1)
    assert only(story.end(), Execute).requests == (2,)
    assert story.alone() == [2, 3]


def test_a_window_closes_when_the_last_of_them_times_out(story: Story) -> None:
    story.ask(1, timeout_ms=50)
    story.ask(1, timeout_ms=70)
    run = only(story.end(), Execute)
    assert run.latest_ns == max(story.bench.state.requests[r].timeout_ns for r in run.requests)
    commands = story.bench.send(CommandRefused(GPU, run.command, Reason.TOO_LATE), after_ms=70)
    assert {refusal.request: refusal.reason for refusal in every(commands, Refuse)} == {
        2: Reason.TIMEOUT,
        3: Reason.TIMEOUT,
    }
    assert story.bench.state.requests == {}


# ------------------------------------------------------------------ waiting for company


def test_the_oldest_waits_for_company_and_not_longer_than_it_may() -> None:
    story = Story(wait_ms=5)
    story.end()
    commands = story.ask(1, after_ms=10)
    assert every(commands, Execute) == []
    assert only(commands, SetTimer).at_ns == story.bench.now + 5 * MS
    assert every(story.ask(1, after_ms=2), Execute) == []
    assert only(story.bench.send(TimerFired(), after_ms=3), Execute).requests == (2, 3)


def test_a_full_batch_waits_no_longer() -> None:
    story = Story(rows=3, wait_ms=5)
    story.end()
    story.ask(2)
    assert only(story.ask(1), Execute).requests == (2, 3)


def test_who_is_alike_to_nobody_waits_for_nobody() -> None:
    story = Story(wait_ms=5)
    story.end()
    assert only(story.ask(1, alike=""), Execute).requests == (2,)


def test_who_has_waited_for_the_lane_goes_at_once() -> None:
    story = Story(wait_ms=5)
    story.ask(1)
    story.bench.send(TimerFired(), after_ms=6)
    assert only(story.end(), Execute).requests == (2,)


def test_a_cancelled_request_is_waited_for_by_no_timer() -> None:
    story = Story(wait_ms=5)
    story.end()
    story.ask(1)
    story.bench.send(RequestCancelled(RequestId(2)))
    story.bench.send(TimerFired(), after_ms=6)
    assert story.bench.state.gatherings == []
    story.ask(1)
    assert only(story.bench.send(TimerFired(), after_ms=5), Execute).requests == (3,)


def test_a_wait_ends_with_its_executor() -> None:
    story = Story(wait_ms=5)
    story.end()
    story.ask(1)
    story.bench.send(ExecutorLost(GPU, "killed"))
    assert story.bench.state.functions[F].gathers_until_ns is None
    assert only(story.bench.join(), Execute).requests == (2,)


def test_two_waits_that_end_together_fill_two_lanes_at_once() -> None:
    bench = Bench()
    for executor in ("cuda:0", "cuda:1"):
        bench.join(executor, capacity_mib=10)
    for name in ("a/1", "b/1"):
        bench.park(name, batch=Batch(4, 5 * MS))
        run = only(bench.ask(name), Execute)
        load = next(c for c in bench.state.executors[run.executor].pending.values() if c is not run)
        bench.send(LoadFinished(run.executor, load.command, run.function, 1))
        bench.send(ExecutionFinished(run.executor, run.command, run.request, 1))
    bench.ask("a/1", alike="x")
    bench.ask("b/1", alike="x", after_ms=0)
    runs = every(bench.send(TimerFired(), after_ms=5), Execute)
    assert [(run.executor, run.function) for run in runs] == [("cuda:0", "a/1"), ("cuda:1", "b/1")]


# ------------------------------------------------------------------ one among others


def test_one_that_is_cancelled_leaves_the_others_alone(story: Story) -> None:
    for _ in range(3):
        story.ask(1)
    story.end()
    story.bench.send(RequestCancelled(RequestId(3)))
    assert [reply.request for reply in every(story.end(), Reply)] == [2, 4]
    assert story.bench.state.functions[F].ledger.cancelled == 1


def test_one_that_times_out_leaves_the_others_alone(story: Story) -> None:
    story.ask(1, timeout_ms=5)
    story.ask(1)
    story.end()
    refusal = only(story.bench.send(TimerFired(), after_ms=5), Refuse)
    assert (refusal.request, refusal.reason) == (2, Reason.TIMEOUT)
    assert [reply.request for reply in every(story.end(), Reply)] == [3]


@pytest.mark.parametrize("reason", [Reason.INVALID_INPUT, Reason.EXECUTION_FAILED, Reason.OUTPUT_TOO_LARGE])
def test_of_a_batch_that_fails_only_the_guilty_one_is_refused(story: Story, reason: Reason) -> None:
    for _ in range(3):
        story.ask(1)
    story.end()
    commands = story.fail(reason)
    assert every(commands, Refuse) == []
    assert only(commands, Execute).requests == (2,)
    story.end()
    assert story.running.requests == (3,)
    assert only(story.fail(reason), Refuse).request == 3
    assert story.alone() == [4]
    assert story.bench.state.requests == {}


def test_failing_among_others_is_no_attempt(story: Story) -> None:
    for _ in range(2):
        story.ask(1)
    story.end()
    story.fail()
    assert [story.bench.state.requests[RequestId(r)].attempts for r in (2, 3)] == [1, 0]


def test_one_that_was_cancelled_does_not_start_over(story: Story) -> None:
    for _ in range(2):
        story.ask(1)
    story.end()
    story.bench.send(RequestCancelled(RequestId(2)))
    assert only(story.fail(), Execute).requests == (3,)
    assert RequestId(2) not in story.bench.state.requests


def test_where_answers_cannot_be_told_apart_requests_are_never_together_again(story: Story) -> None:
    for _ in range(2):
        story.ask(1)
    story.end()
    story.fail(Reason.UNBATCHABLE)
    for _ in range(2):
        story.ask(3)
    assert story.alone() == [2, 3, 4, 5]
    assert story.bench.state.executors[GPU].unbatched == {F: "it was bad"}


def test_a_lost_executors_batch_starts_over_in_order(story: Story) -> None:
    for _ in range(3):
        story.ask(1)
    story.end()
    story.ask(1, alike="y")
    story.bench.send(ExecutorLost(GPU, "killed"))
    assert list(story.bench.state.functions[F].queue) == [2, 3, 4, 5]
    assert only(story.bench.join(), Execute).requests == (2, 3, 4)
    commands = story.bench.send(ExecutorLost(GPU, "killed again"))
    assert {refusal.request for refusal in every(commands, Refuse)} == {2, 3, 4}


def test_a_part_of_an_answer_is_its_requests(story: Story) -> None:
    run = story.running
    assert only(story.bench.send(ChunkProduced(GPU, run.command, run.request)), Reply).final is False


# ------------------------------------------------------------------ who pays


def test_the_devices_time_is_shared_by_rows_to_the_nanosecond() -> None:
    def request(rows: int) -> Request:
        return Request(RequestId(rows), F, 0, 0, 0, 0, 0, rows=rows)

    assert shared(100, [request(1), request(3)]) == [25, 75]
    parts = shared(1000, [request(rows) for rows in (1, 1, 1, 4)])
    assert sum(parts) == 1000
    assert max(parts[:3]) - min(parts[:3]) <= 1


def test_a_ledger_has_all_of_it_and_a_reply_how_long_it_took(story: Story) -> None:
    for rows in (1, 2, 4):
        story.ask(rows)
    story.end(device_ns=7)
    story.bench.send(RequestCancelled(RequestId(3)))
    assert [reply.device_ns for reply in every(story.end(device_ns=100), Reply)] == [100, 100]
    assert story.bench.state.functions[F].ledger.device_ns == 107


def test_a_ledger_counts_runs_apart_from_answers_and_what_they_waited(story: Story) -> None:
    story.ask(1)
    story.ask(2)
    story.ask(4)
    for _ in range(2):
        story.end(device_ns=7)
    ledger = story.bench.state.functions[F].ledger
    replies = sum(histogram.count for histogram in ledger.latency.values())
    assert (ledger.executions, replies) == (2, 4), "one by itself that ran already, and three together"
    assert ledger.last_answer_ns == story.bench.now
    assert 0 <= ledger.queued_ns <= sum(histogram.total_ns for histogram in ledger.latency.values())


def test_a_reply_says_its_own_part_of_the_device_s_time_and_whether_it_was_in_time() -> None:
    story = Story()
    story.ask(3)
    story.ask(1, deadline_ms=0)
    story.end()
    replies = every(story.end(device_ns=1001), Reply)
    assert [(reply.device_ns, reply.part_ns, reply.in_time) for reply in replies] == [
        (1001, 750, True),
        (1001, 251, False),
    ]
