"""The gate of the gRPC door: who calls is known from a call's metadata, before its message has been read.

Each caller has calls of its own, for the node as that caller sees it; so no call knows that there are others.
"""

from typing import Any

import grpc

from dormouse.errors import DormouseError, Unauthenticated
from dormouse.gateway.grpc_calls import METHODS, OPEN_CALLS, Calls, Context, handlers, key_headers, note_of, refuse
from dormouse.gateway.grpc_messages import Method
from dormouse.gateway.grpc_waiting import Waiting
from dormouse.gateway.observing import Observer
from dormouse.submit import Submit
from dormouse.tenants.callers import STRANGER, Caller
from dormouse.tenants.gate import Gate
from dormouse.tenants.seen import Seen


class Services:
    """Every service of this server. grpc.aio asks it how to handle a call."""

    def __init__(self, submit: Submit, gate: Gate, observer: Observer) -> None:
        self._submit = submit
        self._gate = gate
        self._observer = observer
        self._waiting = Waiting()
        self._handlers: dict[Caller, dict[str, Any]] = {}

    def service(self, details: Any) -> Any:
        """The handler of a call of which only path and metadata are there yet; None: there is no such call."""
        method = METHODS.get(details.method)
        if method is None:
            return None
        try:
            caller = self._admitted(method, key_headers(details.invocation_metadata))
        except DormouseError as fault:
            return self._refusing(method, fault)
        return self._of(caller)[details.method]

    def _admitted(self, method: Method, headers: dict[str, str]) -> Caller:
        """Who calls. Raises what the gate raises."""
        try:
            caller = self._gate.caller_of(headers)
        except Unauthenticated:
            if method.name in OPEN_CALLS:
                return STRANGER
            raise
        if not method.streams and method.name not in OPEN_CALLS:  # the requests of a stream enter one by one
            self._gate.check(caller)
        return caller

    def _of(self, caller: Caller) -> dict[str, Any]:
        """The handlers of a caller, made when it first comes; there are no more of them than tenants, twice."""
        found = self._handlers.get(caller)
        if found is None:
            found = self._handlers[caller] = handlers(
                Calls(Seen(self._submit, caller), self._gate, caller, self._observer), self._waiting
            )
        return found

    def _refusing(self, method: Method, fault: DormouseError) -> Any:
        """What ends a call without reading its message: a stream is read by whoever handles it, if at all."""

        async def end(_: Any, context: Context) -> None:
            with self._observer.observed(note_of(method.name, context.invocation_metadata(), None)):
                await refuse(context, fault)

        return grpc.stream_stream_rpc_method_handler(end)
