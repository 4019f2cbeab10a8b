"""One more execution is queued behind a short one, and nothing else changes."""

import pytest

from dormouse.core.messages import (
    Command,
    Evict,
    Execute,
    ExecutionFailed,
    ExecutionFinished,
    ExecutorLost,
    Load,
    LoadFinished,
    Refuse,
    Reply,
    RequestCancelled,
)
from dormouse.core.types import FunctionId, Path, Reason, RequestId, Settings
from tests.core.bench import GPU, MIB, MS, Bench, every, only

SHORT_NS, LONG_NS = MS // 5, 20 * MS


def resident(bench: Bench, name: str, device_ns: int = SHORT_NS) -> None:
    """Loaded, run twice: what a run takes is known."""
    bench.park(name)
    load = only(bench.ask(name), Load)
    bench.send(LoadFinished(GPU, load.command, FunctionId(name), 1))
    end(bench, device_ns)
    bench.ask(name)
    end(bench, device_ns)


def end(bench: Bench, device_ns: int = SHORT_NS) -> list[Command]:
    run = bench.state.executors[GPU].executing
    assert run is not None
    return bench.send(ExecutionFinished(GPU, run.command, run.request, device_ns, run.others))


@pytest.fixture
def bench() -> Bench:
    bench = Bench(Settings(host_capacity_bytes=100 * MIB))
    bench.join()
    resident(bench, "a/1")
    resident(bench, "b/1")
    return bench


def test_behind_a_short_run_one_more_is_queued_and_no_other(bench: Bench) -> None:
    assert only(bench.ask("a/1"), Execute).function == "a/1"
    assert only(bench.ask("b/1"), Execute).function == "b/1"
    assert every(bench.ask("a/1"), Execute) == []
    assert only(end(bench), Execute).function == "a/1"


def test_requests_of_the_function_that_runs_are_queued_behind_it_too(bench: Bench) -> None:
    runs = [only(bench.ask("a/1"), Execute) for _ in range(2)]
    assert [run.function for run in runs] == ["a/1", "a/1"]
    assert only(end(bench), Reply).request == runs[0].request
    assert only(end(bench), Reply).request == runs[1].request
    assert bench.state.executors[GPU].executing is None


def test_behind_a_long_run_nothing_is_queued() -> None:
    bench = Bench(Settings(host_capacity_bytes=100 * MIB))
    bench.join()
    resident(bench, "a/1", LONG_NS)
    resident(bench, "b/1")
    bench.ask("a/1")
    assert every(bench.ask("b/1"), Execute) == []


def test_nothing_is_queued_where_the_settings_say_so() -> None:
    bench = Bench(Settings(host_capacity_bytes=100 * MIB, ahead_ns=0))
    bench.join()
    resident(bench, "a/1")
    bench.ask("a/1")
    assert every(bench.ask("a/1"), Execute) == []


def test_behind_a_run_on_an_arriving_image_nothing_is_queued(bench: Bench) -> None:
    bench.park("c/1")
    assert only(bench.ask("c/1"), Execute).function == "c/1"
    assert every(bench.ask("a/1"), Execute) == []


def test_what_is_queued_counts_as_running_and_is_not_evicted(bench: Bench) -> None:
    bench.ask("a/1")
    bench.ask("b/1")
    bench.park("big/1", 60)
    assert every(bench.ask("big/1"), Evict) == []
    end(bench)
    assert {c.function for c in every(end(bench), Evict)} == {"a/1", "b/1"}


def test_time_in_the_queue_of_the_device_is_time_queued(bench: Bench) -> None:
    bench.ask("a/1")
    bench.ask("b/1")
    end(bench)
    reply = only(bench.send(_finished(bench), after_ms=5), Reply)
    assert reply.queued_ns == 1 * MS, "from its arrival until the run before it had ended"
    assert reply.path is Path.RESIDENT


def _finished(bench: Bench) -> ExecutionFinished:
    run = bench.state.executors[GPU].executing
    assert run is not None
    return ExecutionFinished(GPU, run.command, run.request, SHORT_NS)


def test_a_lost_executor_gives_both_back_in_order(bench: Bench) -> None:
    runs = [only(bench.ask("a/1"), Execute) for _ in range(2)]
    bench.send(ExecutorLost(GPU, "killed"))
    assert list(bench.state.functions[FunctionId("a/1")].queue) == [run.request for run in runs]
    assert all(request.attempts == 1 for request in bench.state.requests.values())


def test_one_that_fails_does_not_stop_the_one_behind(bench: Bench) -> None:
    bench.ask("a/1")
    bench.ask("b/1")
    run = bench.state.executors[GPU].executing
    assert run is not None
    refusal = only(bench.send(ExecutionFailed(GPU, run.command, run.request, Reason.EXECUTION_FAILED, "x")), Refuse)
    assert refusal.request == run.request
    assert only(end(bench), Reply)


def test_one_whose_client_goes_while_it_is_queued_there_ends_without_an_answer(bench: Bench) -> None:
    bench.ask("a/1")
    run = only(bench.ask("b/1"), Execute)
    bench.send(RequestCancelled(RequestId(run.request)))
    end(bench)
    assert every(end(bench), Reply) == []
    assert not bench.state.requests
