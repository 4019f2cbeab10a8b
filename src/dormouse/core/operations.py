"""What happens to a function: deployed, loaded, unloaded, removed; and its image on its way between disk and DRAM.

A function that leaves first serves what is queued, then gives back device memory, then host memory; only then is
the operation acknowledged, so what was answered has happened.
"""

from dormouse.core.admission import Refusal, larger_than_host, refuse_function, refuse_unload
from dormouse.core.messages import (
    DeleteImage,
    Forget,
    FunctionDeployed,
    ImageRead,
    ImageReadFailed,
    LoadRequested,
    RemovalRequested,
    UnloadRequested,
)
from dormouse.core.state import Function, ImageChange, ImageState, ResidencyState, Service, ServiceChange, new_function
from dormouse.core.turn import Turn
from dormouse.core.types import FunctionId, OperationId, Pin, Reason


def deployed(turn: Turn, event: FunctionDeployed) -> None:
    state = turn.state
    function = new_function(event.spec, state.settings)
    refusal = refuse_function(state, function, restored=event.restored)
    if refusal is not None:
        turn.acknowledge([event.operation], refusal.reason, refusal.message)
        return
    state.functions[function.id] = function
    function.number, state.deployed = state.deployed, state.deployed + 1
    if function.spec.pin is not Pin.NONE:
        state.pinned_host_bytes += function.host_bytes
    if not event.available:
        function.service = Service.UNAVAILABLE
    elif event.restored:
        function.service = Service.READY
    fits_now = function.host_bytes <= state.host_free_bytes - state.parking_bytes
    if function.service is Service.ADMITTING or (event.restored and event.available and fits_now):
        turn.park(function)
        function.arrivals.append(event.operation)
    else:
        turn.acknowledge([event.operation])
    turn.settle(function)


def load_requested(turn: Turn, event: LoadRequested) -> None:
    function = _known(turn, event.operation, event.function)
    if function is None:
        return
    if function.leaves:
        message = f"'{function.id}' is {function.service}; load it again when that has ended"
        turn.acknowledge([event.operation], Reason.NOT_READY, message)
        return
    refusal = larger_than_host(turn.state, function) if function.image is ImageState.DISK else None
    if refusal is not None:
        turn.acknowledge([event.operation], refusal.reason, refusal.message)
        return
    function.unplaceable = False
    if function.service is Service.UNAVAILABLE:
        function.change_service(ServiceChange.LOAD)
    if function.image is ImageState.HOST:
        turn.acknowledge([event.operation])
        turn.settle(function)  # a pin that had been given up is tried again
        return
    function.arrivals.append(event.operation)
    if function.image is ImageState.DISK:
        turn.park(function)
    turn.settle(function)


def unload_requested(turn: Turn, event: UnloadRequested) -> None:
    function = _known(turn, event.operation, event.function)
    if function is None:
        return
    if function.service is Service.UNAVAILABLE:
        turn.acknowledge([event.operation])
    elif function.service is Service.REMOVING:
        function.departures.append(event.operation)
    elif (refusal := refuse_unload(turn.state, function)) is not None:
        turn.acknowledge([event.operation], refusal.reason, refusal.message)
    elif not _is_being_admitted(turn, event.operation, function):
        _leave(turn, function, ServiceChange.UNLOAD, event.operation)


def removal_requested(turn: Turn, event: RemovalRequested) -> None:
    function = _known(turn, event.operation, event.function)
    if function is not None and not _is_being_admitted(turn, event.operation, function):
        _leave(turn, function, ServiceChange.REMOVE, event.operation)


def _known(turn: Turn, operation: OperationId, name: FunctionId) -> Function | None:
    function = turn.state.functions.get(name)
    if function is None:
        turn.acknowledge([operation], Reason.UNKNOWN_FUNCTION, f"unknown function '{name}'")
    return function


def _is_being_admitted(turn: Turn, operation: OperationId, function: Function) -> bool:
    """A deploy is answered before anything else may be asked of the function."""
    if function.service is not Service.ADMITTING:
        return False
    turn.acknowledge([operation], Reason.NOT_READY, f"'{function.id}' is being admitted; ask again when it is ready")
    return True


def _leave(turn: Turn, function: Function, change: ServiceChange, operation: OperationId) -> None:
    function.change_service(change)
    function.departures.append(operation)
    turn.state.leaving[function.id] = None
    turn.unpark(function)
    if function.image is ImageState.DISK:
        _give_up_arrivals(turn, function)
    turn.settle(function)


def _give_up_arrivals(turn: Turn, function: Function) -> None:
    message = f"'{function.id}' is {function.service} before it was loaded"
    turn.acknowledge(function.arrivals, Reason.NOT_READY, message)


def depart(turn: Turn) -> None:
    """Take every leaving function one step further, if nothing holds it."""
    for name in tuple(turn.state.leaving):
        _depart(turn, turn.state.functions[name])


def _depart(turn: Turn, function: Function) -> None:
    if function.queue:
        return
    evict_everywhere(turn, function)
    if function.residencies or function.image is ImageState.READING:
        return
    if function.image is ImageState.HOST:
        turn.drop_image(function)
    del turn.state.leaving[function.id]
    if function.service is Service.UNLOADING:
        function.change_service(ServiceChange.LEAVE)
    else:
        _delete(turn, function)
    turn.acknowledge(function.departures)


def evict_everywhere(turn: Turn, function: Function) -> None:
    """Take a function off every device where it is idle and nobody copies it."""
    for name, residency in tuple(function.residencies.items()):
        if residency.state is ResidencyState.RESIDENT and not residency.feeds:
            turn.evict(function, turn.state.executors[name])


def _delete(turn: Turn, function: Function) -> None:
    for executor in turn.state.executors.values():
        if function.id in executor.known:
            executor.known.discard(function.id)
            executor.built.discard(function.id)
            executor.unbatched.pop(function.id, None)
            turn.commands.append(Forget(executor.id, turn.number(), function.id))
    for queue in function.waits_in:
        queue.discard(function.id)
    del turn.state.functions[function.id]
    if function.spec.pin is not Pin.NONE:
        turn.state.pinned_host_bytes -= function.host_bytes
    turn.commands.append(DeleteImage(function.id))


def image_read(turn: Turn, event: ImageRead) -> None:
    function = turn.state.functions[event.function]
    turn.end_read(function, ImageChange.ARRIVED)
    function.change_service(ServiceChange.ADMIT)
    turn.acknowledge(function.arrivals)
    turn.settle(function)


def image_read_failed(turn: Turn, event: ImageReadFailed) -> None:
    function = turn.state.functions[event.function]
    turn.end_read(function, ImageChange.READ_FAILED)
    give_up(turn, function, Refusal(Reason.IMAGE_UNREADABLE, event.message))


def give_up(turn: Turn, function: Function, refusal: Refusal) -> None:
    """End what waits for a function that cannot be had; a first admission leaves nothing behind."""
    turn.acknowledge(function.arrivals, refusal.reason, refusal.message)
    turn.refuse_queue(function, refusal.reason, refusal.message)
    turn.unpark(function)
    if function.service is Service.ADMITTING:
        _delete(turn, function)
        return
    if function.service is Service.LOADING:
        function.change_service(ServiceChange.FAIL)
    function.unplaceable = True
    turn.settle(function)
