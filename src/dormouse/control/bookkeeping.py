"""What an event and the commands it brought forth mean for the ledger: entries of requests, and the inventory.

Reads the core's records and the open requests, changes neither, and writes nothing: what it answers is for the cashier.
"""

from collections.abc import Callable
from typing import Any

from dormouse.billing.records import (
    CANCELLED,
    DEPLOYED,
    DEVICE,
    HOST,
    AdmissionRefused,
    Began,
    Displaced,
    Ended,
    FunctionKnown,
    Loaded,
    Record,
    RequestEnded,
    Unbilled,
)
from dormouse.control.payloads import Outputs, Payload, Payloads
from dormouse.core.messages import (
    Acknowledge,
    Command,
    DeleteImage,
    DropImage,
    Event,
    Evict,
    ExecutionFinished,
    ExecutorLost,
    FunctionDeployed,
    ImageRead,
    Load,
    LoadFailed,
    LoadFinished,
    Refuse,
    Reply,
    RequestCancelled,
)
from dormouse.core.state import Service, State
from dormouse.core.types import Bytes, ExecutorId, FunctionId, FunctionSpec, Ns, OperationId, Path, Pin, RequestId


class Bookkeeper:
    """Of one life of a server. Times it is given are the core's; times it writes are those plus ``offset_ns``."""

    def __init__(self, payloads: Payloads, offset_ns: Ns) -> None:
        self.owners: dict[FunctionId, str] = {}
        """Whose functions are; told before they are deployed."""
        self._payloads = payloads
        self._offset_ns = offset_ns
        self._open: set[tuple[str, FunctionId, str]] = set()
        """Intervals: kind, function and place."""
        self._seen: set[FunctionId] = set()
        """Functions that have been in host memory."""
        self._loads: dict[tuple[ExecutorId, FunctionId], Path] = {}
        self._deploys: dict[OperationId, FunctionSpec] = {}
        self._now: Ns = 0
        self._state: State
        self._outputs: Outputs = {}
        self._records: list[Record] = []
        self._of_events: dict[type[Event], Callable[[Any], None]] = {
            RequestCancelled: self._cancelled,
            FunctionDeployed: self._deployed,
            ImageRead: self._image_read,
            LoadFinished: self._load_finished,
            LoadFailed: self._load_failed,
            ExecutorLost: self._executor_lost,
        }
        self._of_commands: dict[type[Command], Callable[[Any], None]] = {
            Reply: self._replied,
            Refuse: self._refused,
            Load: self._load,
            Evict: self._evicted,
            DropImage: self._dropped,
            DeleteImage: self._deleted,
            Acknowledge: self._acknowledged,
        }

    def records(self, now: Ns, event: Event, commands: list[Command], outputs: Outputs, state: State) -> list[Record]:
        """Everything worth recording of one turn, in order."""
        self._records = []
        self._now, self._outputs, self._state = now + self._offset_ns, outputs, state
        if (note := self._of_events.get(type(event))) is not None:
            note(event)
        for command in commands:
            if (note := self._of_commands.get(type(command))) is not None:
                note(command)
        if isinstance(event, ExecutionFinished):
            self._unbilled(event, commands)
        return self._records

    def wall(self, now: Ns) -> Ns:
        """A time of the core as the ledger writes it."""
        return now + self._offset_ns

    # ------------------------------------------------------------------ requests

    def _replied(self, reply: Reply) -> None:
        if not reply.final:
            return
        payload = self._payloads[reply.request]
        out_bytes = sum([len(tensor.data) for tensor in self._outputs.get(reply.request, ())])
        self._end(reply.request, payload, "", reply, out_bytes)

    def _refused(self, refusal: Refuse) -> None:
        self.ended(refusal.request, str(refusal.reason))

    def _cancelled(self, event: RequestCancelled) -> None:
        self.ended(event.request, CANCELLED)

    def ended(self, request: RequestId, reason: str) -> None:
        """Without an answer; unless there is an entry of it already."""
        payload = self._payloads.get(request)
        if payload is not None and not payload.entered:
            self._end(request, payload, reason, None, 0)

    def _end(self, request: RequestId, payload: Payload, reason: str, reply: Reply | None, out_bytes: Bytes) -> None:
        payload.entered = True
        now = self._now
        latency_ns = now - self._offset_ns - payload.began_ns
        in_bytes = sum([tensor.size_bytes for tensor in payload.inputs])
        if reply is None:
            entry = RequestEnded(
                request, payload.function, payload.tenant, now, latency_ns, 0, 0, "", False, in_bytes, 0, reason
            )
        else:
            entry = RequestEnded(
                request,
                payload.function,
                payload.tenant,
                now,
                latency_ns,
                reply.queued_ns,
                reply.part_ns,
                reply.path,
                reply.in_time,
                in_bytes,
                out_bytes,
            )
        self._records.append(entry)

    def shut_down(self, now: Ns, reason: str) -> list[Record]:
        """Of every request that is still open."""
        self._records, self._now = [], now + self._offset_ns
        for request in self._payloads.open_requests():
            self.ended(request, reason)
        return self._records

    def _unbilled(self, event: ExecutionFinished, commands: list[Command]) -> None:
        """The rest of the device's time went to requests that nobody waited for any more."""
        billed_ns = sum([command.part_ns for command in commands if type(command) is Reply])
        if billed_ns < event.device_ns:
            function = self._payloads[event.request].function
            self._records.append(Unbilled(function, event.executor, self._now, event.device_ns - billed_ns))

    # ------------------------------------------------------------------ functions

    def _deployed(self, event: FunctionDeployed) -> None:
        spec, state = event.spec, self._state
        regions = [executor.region_bytes(spec) for executor in state.executors.values()]
        self._records.append(
            FunctionKnown(
                spec.id,
                self.owners.get(spec.id, ""),
                self._now,
                spec.image_bytes,
                max(regions, default=spec.image_bytes),
                spec.slo.deadline_ns,
                spec.slo.share_ppm,
                spec.pin is Pin.DEVICE,
            )
        )
        if not event.restored:
            self._deploys[event.operation] = spec
        elif spec.id in state.functions:
            self._begin_deployed(spec, "restored")

    def _acknowledged(self, command: Acknowledge) -> None:
        spec = self._deploys.pop(command.operation, None)
        if spec is None:
            return
        if command.reason is None:
            self._begin_deployed(spec, "deployed")
        else:
            self.owners.pop(spec.id, None)
            self._records.append(AdmissionRefused(spec.id, self._now, str(command.reason)))

    def _begin_deployed(self, spec: FunctionSpec, how: str) -> None:
        regions = [executor.region_bytes(spec) for executor in self._state.executors.values()]
        self._begin(DEPLOYED, spec.id, "", max(regions, default=spec.image_bytes), how)

    def _deleted(self, command: DeleteImage) -> None:
        self._end_interval(DEPLOYED, command.function, "", "removed")
        self.owners.pop(command.function, None)
        self._seen.discard(command.function)

    # ------------------------------------------------------------------ host memory

    def _image_read(self, event: ImageRead) -> None:
        function = self._state.functions.get(event.function)
        if function is None:  # it was removed in the same turn
            return
        how = "read back" if event.function in self._seen else "admitted"
        self._seen.add(event.function)
        self._begin(HOST, event.function, "host", function.host_bytes, how)

    def _dropped(self, command: DropImage) -> None:
        function = self._state.functions.get(command.function)
        why = "dropped"
        if function is None:
            why = "removed"
        elif function.service is Service.UNAVAILABLE:
            why = "unloaded"
        self._end_interval(HOST, command.function, "host", why)

    # ------------------------------------------------------------------ devices

    def _load(self, command: Load) -> None:
        self._loads[command.executor, command.function] = command.path

    def _load_finished(self, event: LoadFinished) -> None:
        path = self._loads.pop((event.executor, event.function))
        function = self._state.functions[event.function]
        size_bytes = function.spec.image_bytes
        self._records.append(Loaded(event.function, event.executor, self._now, path, size_bytes, event.load_ns))
        region_bytes = self._state.executors[event.executor].region_bytes(function.spec)
        self._begin(DEVICE, event.function, event.executor, region_bytes, path)

    def _load_failed(self, event: LoadFailed) -> None:
        self._loads.pop((event.executor, event.function), None)

    def _evicted(self, command: Evict) -> None:
        cause = command.cause or ""
        self._records.append(Displaced(command.function, command.executor, self._now, cause))
        self._end_interval(DEVICE, command.function, command.executor, "displaced" if cause else "left")

    def _executor_lost(self, event: ExecutorLost) -> None:
        for kind, function, place in sorted(self._open):
            if kind == DEVICE and place == event.executor:
                self._end_interval(kind, function, place, "lost")

    # ------------------------------------------------------------------ intervals

    def _begin(self, kind: str, function: FunctionId, place: str, size_bytes: Bytes, how: str) -> None:
        if (kind, function, place) not in self._open:
            self._open.add((kind, function, place))
            self._records.append(Began(kind, function, place, self._now, size_bytes, how))

    def _end_interval(self, kind: str, function: FunctionId, place: str, why: str) -> None:
        if (kind, function, place) in self._open:
            self._open.discard((kind, function, place))
            self._records.append(Ended(kind, function, place, self._now, why))
