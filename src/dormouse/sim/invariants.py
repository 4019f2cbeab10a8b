"""What must hold after every event (design, section 9), recomputed from the records alone."""

from dormouse.core.binding import is_idle
from dormouse.core.placement import Standing, standing
from dormouse.core.state import Executor, ImageState, Request, RequestState, ResidencyState, State
from dormouse.core.types import Pin

HOLDS_CHUNKS = {
    ResidencyState.LOADING,
    ResidencyState.ARRIVING,
    ResidencyState.STREAMING,
    ResidencyState.RESIDENT,
    ResidencyState.RUNNING,
    ResidencyState.BROKEN,
}
IN_USE = (ResidencyState.RUNNING, ResidencyState.STREAMING, ResidencyState.FAILING)
COPIES = {ResidencyState.LOADING, ResidencyState.ARRIVING, ResidencyState.STREAMING, ResidencyState.BROKEN}


def check(state: State) -> None:
    check_host(state)
    check_requests(state)
    check_loans(state)
    check_waiting(state)
    assert not state.stirred
    assert set(state.leaving) == {f.id for f in state.functions.values() if f.leaves}
    for executor in state.executors.values():
        check_executor(state, executor)
    for function in state.functions.values():
        for name, residency in function.residencies.items():
            assert residency.state is not ResidencyState.ABSENT
            assert state.executors[name].recency[function.id] is residency
        if function.is_source_of_a_copy:
            assert function.image is ImageState.HOST, f"{function.id} left host memory while it was copied"


def check_loans(state: State) -> None:
    """What loads hold of others: the copy they read, and the links they were lent."""
    lent: dict[str, str] = {}
    fed: dict[tuple[str, str], set[str]] = {}
    for executor in state.executors.values():
        for name, residency in executor.recency.items():
            assert residency.state in COPIES or (residency.source, residency.helpers) == (None, ())
            lent |= dict.fromkeys(residency.helpers, executor.id)
            if residency.source is not None:
                assert residency.by_peer
                fed.setdefault((residency.source, name), set()).add(executor.id)
    for executor in state.executors.values():
        assert set(executor.routes) <= set(state.executors) - {executor.id}
        assert executor.copying is None or executor.lent_to is None
        # A helper that was lost and is back is lent no more, though the load it helped is still under way.
        assert executor.lent_to is None or executor.lent_to == lent[executor.id]
        for name, residency in executor.recency.items():
            assert residency.feeds == fed.pop((executor.id, name), set())
            if residency.feeds:
                assert residency.state in (ResidencyState.RESIDENT, ResidencyState.RUNNING)
    assert not fed, "a load reads what is not there"


def check_host(state: State) -> None:
    functions = state.functions.values()
    held = [f for f in functions if f.image is not ImageState.DISK]
    assert state.host_used_bytes == sum(f.host_bytes for f in held) <= state.settings.host_capacity_bytes
    assert set(state.host_recency) == {f.id for f in functions if f.image is ImageState.HOST}
    assert not state.far.keys or set(state.far.keys) == set(state.host_recency)
    due = set(state.promotions)
    assert all(f.promote_at_ns is None or (f.promote_at_ns, f.id) in due for f in functions)
    assert not any(f.promoted and f.image is ImageState.DISK for f in functions)
    assert state.reading == sum(f.image is ImageState.READING for f in functions)
    assert state.pinned_host_bytes == sum(f.host_bytes for f in functions if f.spec.pin is not Pin.NONE)
    assert state.parking_bytes == sum(f.host_bytes for f in functions if f.parking)


def check_requests(state: State) -> None:
    queued = {request.id for f in state.functions.values() for request in f.queue.values()}
    assert state.queued == len(queued)
    for request in state.requests.values():
        assert (request.state is RequestState.QUEUED) == (request.id in queued)
        if request.state is not RequestState.QUEUED:
            assert request.executor is not None
            executor = state.executors[request.executor]
            given = [command for command in (executor.executing, executor.ahead) if command is not None]
            assert sum(request.id in command.requests for command in given) == 1
    assert queued <= set(state.requests)


def check_waiting(state: State) -> None:
    """Every function is in the queues where its next step is decided, and in no other."""
    homeless, cold = set(), set()
    one_queue = state.settings.one_queue
    for function in state.functions.values():
        stands = Standing.NOTHING if function.residencies else standing(function)
        if function.parking and function.image is ImageState.DISK:
            stands = Standing.READ
        may_run = one_queue and function.residencies and function.queue and not function.is_engaged
        homeless |= {function.id} if stands is Standing.LOAD or may_run else set()
        cold |= {function.id} if stands is Standing.READ else set()
    assert homeless == set(state.homeless.keys)
    assert cold == set(state.cold.keys)
    due = set(state.gatherings)
    for function in state.functions.values():
        until_ns = function.gathers_until_ns
        assert until_ns is None or (function.queue and (until_ns, function.id) in due)
    if one_queue:
        check_one_queue(state)
        return
    for executor in state.executors.values():
        asked = {n: r.state for n, r in executor.recency.items() if state.functions[n].queue}
        resident = {n for n, s in asked.items() if s in (ResidencyState.RESIDENT, ResidencyState.RUNNING)}
        gathering = {n for n in resident if state.functions[n].gathers_until_ns is not None}
        assert resident - gathering == set(executor.ready.keys)
        assert {n for n, s in asked.items() if s is ResidencyState.ARRIVING} == set(executor.arriving.keys)


def check_one_queue(state: State) -> None:
    """No lane has a queue of its own, and no device is idle beside work for what it holds."""
    for executor in state.executors.values():
        assert not executor.ready.keys and not executor.arriving.keys and executor.ahead is None
        if is_idle(executor):
            resident = {n for n, r in executor.recency.items() if r.state is ResidencyState.RESIDENT}
            assert not resident & set(state.homeless.keys), "an idle device beside work that could run"
    for function in state.functions.values():
        runs = [r for r in function.residencies.values() if r.state in IN_USE]
        assert len(runs) <= 1, f"{function.id} runs twice at a time"


def check_executor(state: State, executor: Executor) -> None:
    used = sum(r.size_bytes for r in executor.recency.values() if r.state in HOLDS_CHUNKS)
    assert executor.free_bytes == executor.capacity_bytes - used >= 0
    copying = {n for n, r in executor.recency.items() if r.state in COPIES}
    assert copying == ({executor.copying} - {None})
    running = {n for n, r in executor.recency.items() if r.state in IN_USE}
    given = [command for command in (executor.executing, executor.ahead) if command is not None]
    assert executor.ahead is None or executor.executing is not None
    assert running == {command.function for command in given}
    for run in given:
        requests = [state.requests[name] for name in run.requests]
        assert len(set(run.requests)) == len(requests)
        check_batch(requests, state.functions[run.function].spec.batch.rows, run.padded_rows)
    if executor.executing is None:
        assert not executor.ready.keys, "an idle lane beside work that could run"
        assert not executor.arriving.keys, "an idle lane beside work that could begin"
    pinned = [r.size_bytes for n, r in executor.recency.items() if state.functions[n].spec.pin is Pin.DEVICE]
    assert executor.pinned_bytes == sum(pinned)
    for name in executor.recency:
        assert state.functions[name].residencies[executor.id] is executor.recency[name]


def check_batch(requests: list[Request], most: int, padded_rows: int) -> None:
    """What runs together is alike and not too much."""
    if len(requests) > 1:
        assert len({request.alike for request in requests}) == 1
        assert all(request.alike and not request.alone for request in requests)
        assert sum(request.rows for request in requests) <= min(most, padded_rows)
    assert padded_rows & (padded_rows - 1) == 0
    assert padded_rows < 2 * most


def check_victims(state: State, victims: set[str]) -> None:
    """Nothing pinned is among what was just evicted, unless it was leaving."""
    for name in victims:
        function = state.functions.get(name)  # type: ignore[call-overload]
        assert function is None or function.leaves or function.spec.pin is not Pin.DEVICE
