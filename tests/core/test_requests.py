"""A request's life: admitted or refused, queued, run, answered, cancelled, timed out."""

import pytest

from dormouse.core.messages import (
    Cancel,
    ChunkProduced,
    Execute,
    ExecutionFailed,
    ExecutionFinished,
    ExecutorLost,
    LoadFinished,
    Refuse,
    Reply,
    RequestArrived,
    RequestCancelled,
    SetTimer,
    TimerFired,
    UnloadRequested,
)
from dormouse.core.scheduler import Scheduler
from dormouse.core.types import CommandId, ExecutorId, FunctionId, Limits, Path, Reason, RequestId, Settings
from tests.core.bench import GPU, MIB, MS, Bench, every, only


def resident(bench: Bench, name: str = "a/1") -> None:
    """Bring a function onto the device with one request, and end it."""
    commands = bench.ask(name)
    load = next(iter(bench.state.executors[GPU].pending.values()))
    run = only(commands, Execute)
    bench.send(LoadFinished(GPU, load.command, FunctionId(name), 1))
    bench.send(ExecutionFinished(GPU, run.command, run.request, MS))


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.join()
    bench.park("a/1")
    return bench


def test_a_request_for_an_unknown_function_is_refused(bench: Bench) -> None:
    refusal = only(bench.ask("nobody/1"), Refuse)
    assert (refusal.reason, "nobody/1" in refusal.message) == (Reason.UNKNOWN_FUNCTION, True)


def test_a_function_that_is_still_being_admitted_is_not_ready_and_says_when_to_come_back(bench: Bench) -> None:
    bench.deploy("b/1")
    refusal = only(bench.ask("b/1"), Refuse)
    assert refusal.reason is Reason.NOT_READY
    assert refusal.retry_after_ns > 0


def test_an_unloaded_function_is_not_ready(bench: Bench) -> None:
    bench.send(UnloadRequested(bench.operation(), FunctionId("a/1")))
    assert only(bench.ask("a/1"), Refuse).reason is Reason.NOT_READY


def test_a_full_queue_refuses_with_the_numbers_and_a_time_to_retry() -> None:
    bench = Bench()
    bench.park("a/1", limits=Limits(queue_length=2))
    bench.ask("a/1")
    bench.ask("a/1")
    refusal = only(bench.ask("a/1"), Refuse)
    assert refusal.reason is Reason.QUEUE_FULL
    assert "2 of 2" in refusal.message
    assert refusal.retry_after_ns >= 1_000_000_000
    assert bench.state.functions[FunctionId("a/1")].ledger.missed == 1


def test_all_queues_together_have_a_limit_too() -> None:
    bench = Bench(Settings(host_capacity_bytes=100 * MIB, queue_length=2))
    bench.park("a/1")
    bench.park("b/1")
    bench.ask("a/1")
    bench.ask("b/1")
    assert only(bench.ask("b/1"), Refuse).reason is Reason.QUEUE_FULL


def test_the_answer_tells_path_and_times(bench: Bench) -> None:
    commands = bench.ask("a/1")
    run = only(commands, Execute)
    reply = only(bench.send(ExecutionFinished(GPU, run.command, run.request, 7 * MS), after_ms=9), Reply)
    assert (reply.final, reply.path, reply.queued_ns, reply.device_ns) == (True, Path.BUILD, 0, 7 * MS)


def test_a_request_that_finds_its_function_on_the_device_took_the_resident_path(bench: Bench) -> None:
    resident(bench)
    run = only(bench.ask("a/1"), Execute)
    assert only(bench.send(ExecutionFinished(GPU, run.command, run.request, 1)), Reply).path is Path.RESIDENT


def test_a_request_that_waited_for_another_ones_load_did_not_find_it_resident(bench: Bench) -> None:
    first = only(bench.ask("a/1"), Execute)
    bench.ask("a/1")
    bench.send(LoadFinished(GPU, CommandId(1), FunctionId("a/1"), 1))
    second = only(bench.send(ExecutionFinished(GPU, first.command, first.request, 1)), Execute)
    assert only(bench.send(ExecutionFinished(GPU, second.command, second.request, 1)), Reply).path is Path.BUILD


def test_requests_of_one_function_are_served_in_order_of_arrival(bench: Bench) -> None:
    resident(bench)
    run = only(bench.ask("a/1"), Execute)
    bench.ask("a/1", deadline_ms=500)
    bench.ask("a/1", deadline_ms=5)
    following = only(bench.send(ExecutionFinished(GPU, run.command, run.request, 1)), Execute)
    assert following.request == bench.requests - 1


@pytest.mark.parametrize(("policy", "first"), [("edf", "b/1"), ("fifo", "a/1")])
def test_across_functions_the_policy_decides(policy: str, first: str) -> None:
    bench = Bench(Settings(host_capacity_bytes=100 * MIB, queueing=policy))
    bench.join()
    for name in ("a/1", "b/1", "c/1"):
        bench.park(name)
        resident(bench, name)
    run = only(bench.ask("c/1"), Execute)
    bench.ask("a/1", deadline_ms=900)
    bench.ask("b/1", deadline_ms=100)
    assert only(bench.send(ExecutionFinished(GPU, run.command, run.request, 1)), Execute).function == first


def test_priority_goes_before_deadline() -> None:
    bench = Bench()
    bench.join()
    for name in ("a/1", "b/1", "c/1"):
        bench.park(name)
        resident(bench, name)
    run = only(bench.ask("c/1"), Execute)
    bench.ask("a/1", deadline_ms=10)
    bench.ask("b/1", deadline_ms=900, priority=1)
    assert only(bench.send(ExecutionFinished(GPU, run.command, run.request, 1)), Execute).function == "b/1"


def test_a_request_that_waits_is_cancelled_without_a_trace(bench: Bench) -> None:
    bench.ask("a/1")
    bench.ask("a/1")
    assert bench.send(RequestCancelled(RequestId(2))) == []
    assert RequestId(2) not in bench.state.requests
    assert bench.state.functions[FunctionId("a/1")].ledger.cancelled == 1


def test_a_cancelled_execution_is_told_so_and_its_answer_goes_nowhere(bench: Bench) -> None:
    run = only(bench.ask("a/1"), Execute)
    assert only(bench.send(RequestCancelled(run.request)), Cancel).request == run.request
    assert bench.send(RequestCancelled(run.request)) == []
    assert bench.send(ChunkProduced(GPU, run.command, run.request)) == []
    assert every(bench.send(ExecutionFinished(GPU, run.command, run.request, 5)), Reply) == []
    assert bench.state.functions[FunctionId("a/1")].ledger.device_ns == 5


def test_cancelling_what_has_ended_is_nothing(bench: Bench) -> None:
    assert bench.send(RequestCancelled(RequestId(99))) == []


def test_a_request_that_waits_too_long_times_out_by_the_timer() -> None:
    bench = Bench()
    bench.park("a/1")
    timer = only(bench.ask("a/1", timeout_ms=20), SetTimer)
    assert timer.at_ns == bench.now + 20 * MS
    refusal = only(bench.send(TimerFired(), after_ms=20), Refuse)
    assert (refusal.reason, "queued" in refusal.message) == (Reason.TIMEOUT, True)


def test_an_execution_that_takes_too_long_is_refused_and_its_lane_stays_taken(bench: Bench) -> None:
    run = only(bench.ask("a/1", timeout_ms=20), Execute)
    commands = bench.send(TimerFired(), after_ms=20)
    assert only(commands, Refuse).reason is Reason.TIMEOUT
    assert only(commands, Cancel).request == run.request
    assert bench.state.executors[GPU].executing is run
    assert bench.send(ExecutionFinished(GPU, run.command, run.request, 1)) == []


def test_an_earlier_timeout_sets_the_timer_anew_and_a_later_one_does_not(bench: Bench) -> None:
    bench.ask("a/1", timeout_ms=500)
    assert only(bench.ask("a/1", timeout_ms=50), SetTimer).at_ns == bench.now + 50 * MS
    assert every(bench.ask("a/1", timeout_ms=900), SetTimer) == []


def test_a_timer_for_requests_that_have_ended_is_not_set_again(bench: Bench) -> None:
    run = only(bench.ask("a/1", timeout_ms=20), Execute)
    bench.send(ExecutionFinished(GPU, run.command, run.request, 1))
    assert bench.send(TimerFired(), after_ms=30) == []


def test_the_deadline_that_counts_is_the_requests_own(bench: Bench) -> None:
    run = only(bench.ask("a/1", deadline_ms=3), Execute)
    bench.send(ExecutionFinished(GPU, run.command, run.request, 1), after_ms=5)
    ledger = bench.state.functions[FunctionId("a/1")].ledger
    assert (ledger.in_time, ledger.missed) == (0, 1)


def test_what_a_request_takes_is_counted_from_when_it_came_to_the_server() -> None:
    bench = Bench()
    bench.join()
    bench.park("a/1", limits=Limits(timeout_ns=2000 * MS))
    resident(bench)
    bench.now += 5000 * MS
    run = only(bench.ask("a/1", waited_ms=999), Execute)
    reply = only(bench.send(ExecutionFinished(GPU, run.command, run.request, MS), after_ms=2), Reply)
    assert (reply.in_time, reply.queued_ns, reply.path) == (False, 999 * MS, Path.RESIDENT)
    ledger = bench.state.functions[FunctionId("a/1")].ledger
    assert ledger.latency[Path.RESIDENT].total_ns == 1001 * MS
    bench.ask("a/1", waited_ms=1990)
    refusal = only(bench.send(TimerFired(), after_ms=10), Refuse)
    assert (refusal.reason, "within 2000 ms" in refusal.message) == (Reason.TIMEOUT, True)
    assert ledger.refused_ns == 2000 * MS


def test_a_request_whose_time_is_up_when_it_arrives_is_refused_and_not_run(bench: Bench) -> None:
    resident(bench)
    bench.now += 100 * MS
    commands = bench.ask("a/1", timeout_ms=-1, waited_ms=51)
    assert only(commands, Refuse).reason is Reason.TIMEOUT
    assert every(commands, Execute) == []


def test_a_request_from_the_future_is_a_bug(bench: Bench) -> None:
    with pytest.raises(AssertionError, match="future"):
        bench.ask("a/1", waited_ms=-1)


def test_chunks_are_handed_on_as_they_come(bench: Bench) -> None:
    run = only(bench.ask("a/1"), Execute)
    assert not only(bench.send(ChunkProduced(GPU, run.command, run.request)), Reply).final
    assert only(bench.send(ExecutionFinished(GPU, run.command, run.request, 1)), Reply).final


def test_what_a_model_raises_is_the_answer(bench: Bench) -> None:
    run = only(bench.ask("a/1"), Execute)
    failed = ExecutionFailed(GPU, run.command, run.request, Reason.EXECUTION_FAILED, "RuntimeError: no")
    refusal = only(bench.send(failed), Refuse)
    assert (refusal.reason, refusal.message) == (Reason.EXECUTION_FAILED, "RuntimeError: no")


def test_without_any_executor_requests_wait_for_the_grace_and_are_then_refused() -> None:
    bench = Bench(Settings(host_capacity_bytes=100 * MIB, executor_grace_ns=1000 * MS))
    bench.park("a/1")
    timer = only(bench.ask("a/1"), SetTimer)
    refusal = only(bench.send(TimerFired(), after_ms=(timer.at_ns - bench.now) / MS), Refuse)
    assert refusal.reason is Reason.EXECUTOR_LOST
    assert only(bench.ask("a/1"), Refuse).reason is Reason.EXECUTOR_LOST


def test_an_executor_that_comes_back_within_the_grace_serves_what_waited(bench: Bench) -> None:
    bench.send(ExecutorLost(GPU, "gone"))
    bench.ask("a/1")
    assert only(bench.join(), Execute).request == bench.requests


def test_a_request_may_not_arrive_twice(bench: Bench) -> None:
    bench.ask("a/1")
    with pytest.raises(AssertionError, match="has arrived already"):
        bench.core.handle(bench.now, RequestArrived(RequestId(1), FunctionId("a/1")))


def test_an_unknown_policy_is_an_error_at_the_start() -> None:
    with pytest.raises(KeyError):
        Scheduler(Settings(host_capacity_bytes=1, eviction="coin"))


def test_an_answer_to_a_command_that_was_never_given_is_a_bug(bench: Bench) -> None:
    with pytest.raises(AssertionError, match="not pending"):
        bench.core.handle(bench.now, LoadFinished(ExecutorId("cuda:0"), CommandId(77), FunctionId("a/1"), 1))


def test_timeouts_of_requests_that_have_ended_do_not_pile_up() -> None:
    bench = Bench()
    bench.park("f/1")
    bench.ask("f/1")
    for _ in range(500):
        bench.ask("f/1")
        bench.send(RequestCancelled(RequestId(bench.requests)))
    assert len(bench.state.timeouts) <= 2 * 2 + 65


def test_what_a_guest_asks_is_in_the_function_s_account_and_in_one_of_its_own(bench: Bench) -> None:
    resident(bench)
    run = only(bench.ask("a/1", guest="globex"), Execute)
    bench.send(ExecutionFinished(GPU, run.command, run.request, MS))
    bench.ask("a/1", guest="globex", timeout_ms=1)
    bench.send(TimerFired(), after_ms=5)
    function = bench.state.functions[FunctionId("a/1")]
    assert (function.ledger.in_time, function.ledger.missed) == (2, 1)
    guest = function.ledger.guests["globex"]
    assert (guest.in_time, guest.missed, guest.latency[Path.RESIDENT].count) == (1, 1, 1)
    assert guest.refusals == {Reason.TIMEOUT: 1}


def test_a_guest_that_waits_is_refused_on_its_own_account_and_so_is_one_that_comes_too_many() -> None:
    bench = Bench()
    bench.park("a/1", limits=Limits(queue_length=1))
    bench.ask("a/1", guest="globex", timeout_ms=2)
    bench.ask("a/1", guest="initech")
    bench.send(TimerFired(), after_ms=5)
    guests = bench.state.functions[FunctionId("a/1")].ledger.guests
    assert {name: dict(each.refusals) for name, each in guests.items()} == {
        "globex": {Reason.TIMEOUT: 1},
        "initech": {Reason.QUEUE_FULL: 1},
    }
