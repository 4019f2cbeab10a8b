"""Who may enter: a request into a queue, a function into the node. Answers None, or why not, with the numbers."""

from dataclasses import dataclass

from dormouse.core.placement import could_ever_hold
from dormouse.core.state import Function, Service, State, device_pinned_bytes
from dormouse.core.types import Bytes, FunctionId, Ns, Reason

MIB: Bytes = 1024 * 1024
SECOND_NS: Ns = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: Reason
    message: str
    retry_after_ns: Ns = 0


def refuse_request(state: State, name: FunctionId, now: Ns) -> Refusal | None:
    """Why a request for this function may not be queued."""
    function = state.functions.get(name)
    if function is None:
        return Refusal(Reason.UNKNOWN_FUNCTION, f"unknown function '{name}'")
    if not function.accepts:
        return Refusal(Reason.NOT_READY, f"function '{name}' is {function.service}", _retry_after(function.service))
    length, limit = len(function.queue), function.spec.limits.queue_length
    if length >= limit:
        wait_ns = max(length * function.ledger.mean_device_ns(), SECOND_NS)
        return Refusal(Reason.QUEUE_FULL, f"the queue of '{name}' is full: {length} of {limit} requests wait", wait_ns)
    if state.queued >= state.settings.queue_length:
        limit = state.settings.queue_length
        return Refusal(Reason.QUEUE_FULL, f"all queues together are full: {limit} requests wait", SECOND_NS)
    if executors_are_gone(state, now):
        return Refusal(Reason.EXECUTOR_LOST, f"no executor is running to serve '{name}'", SECOND_NS)
    return None


def _retry_after(service: Service) -> Ns:
    return SECOND_NS if service in (Service.ADMITTING, Service.LOADING) else 10 * SECOND_NS


def executors_are_gone(state: State, now: Ns) -> bool:
    """No executor, and none has come back within the grace."""
    since = state.executorless_since_ns
    return since is not None and now - since >= state.settings.executor_grace_ns


def refuse_function(state: State, function: Function, *, restored: bool = False) -> Refusal | None:
    """Why a function may not be deployed: it could never run, or never be parked. One that is ``restored`` is known to
    its callers already, and is refused only what it can never have."""
    if function.id in state.functions:
        return Refusal(Reason.ALREADY_DEPLOYED, f"'{function.id}' is deployed already")
    never = larger_than_devices(state, function)
    return never if restored and state.settings.host_is_last else never or larger_than_host(state, function)


def larger_than_devices(state: State, function: Function) -> Refusal | None:
    """Whether no executor could ever hold it, with the most that one could."""
    if not state.executors or any(could_ever_hold(e, function) for e in state.executors.values()):
        return None
    best = max(state.executors.values(), key=lambda executor: executor.capacity_bytes)
    pinned = device_pinned_bytes(best, function)
    return Refusal(
        Reason.LARGER_THAN_DEVICE,
        f"'{function.id}' needs {_mib(best.region_bytes(function.spec))} of device memory; the largest device has "
        f"{_mib(best.capacity_bytes)} of which {_mib(pinned)} are pinned",
    )


def larger_than_host(state: State, function: Function) -> Refusal | None:
    """Whether it could never be parked beside what pins keep, or beside all that is there where nothing is dropped."""
    if state.settings.host_is_last:
        return _without_room(state, function)
    capacity, pinned = state.settings.host_capacity_bytes, state.host_pinned_bytes(function)
    if function.host_bytes <= capacity - pinned:
        return None
    return Refusal(
        Reason.HOST_MEMORY_FULL,
        f"'{function.id}' needs {_mib(function.host_bytes)} of host memory; the node has {_mib(capacity)} of which "
        f"{_mib(pinned)} are pinned and may not be dropped",
    )


def _without_room(state: State, function: Function) -> Refusal | None:
    promised = state.parking_bytes - (function.host_bytes if function.parking else 0)
    free = state.host_free_bytes - promised
    if function.host_bytes <= free:
        return None
    capacity = state.settings.host_capacity_bytes
    return Refusal(
        Reason.HOST_MEMORY_FULL,
        f"'{function.id}' needs {_mib(function.host_bytes)} of host memory; {_mib(free)} of {_mib(capacity)} are free, "
        "and images that live in memory only (images = dram) are not dropped; remove a function first",
    )


def refuse_unload(state: State, function: Function) -> Refusal | None:
    """Why a function may not leave memory and stay deployed."""
    if not state.settings.host_is_last:
        return None
    message = f"'{function.id}' lives in memory only (images = dram) and could not be loaded again; remove it instead"
    return Refusal(Reason.IN_MEMORY_ONLY, message)


def _mib(size_bytes: Bytes) -> str:
    return f"{size_bytes / MIB:.1f} MiB"
