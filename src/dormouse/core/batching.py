"""Which requests of one function run together, and how long the first of them waits for company.

Every execution is headed by the oldest request. Others that are alike ride along while there is room, past those that
are not: so no request waits for more executions than there are requests before it, and requests of many shapes that
come mixed are batched all the same. Whether two are alike is for others to know; here it is an equal word.
"""

from itertools import islice

from dormouse.core.state import Executor, Function, Request
from dormouse.core.types import Ns

LOOK_AHEAD = 256
"""Of a long queue so many requests are looked at, so that a turn stays short."""


def may_share(function: Function, request: Request, executor: Executor) -> bool:
    """Whether a request may be run together with others on an executor."""
    shares = request.alike and not request.alone and request.rows <= function.spec.batch.rows
    return bool(shares) and function.id not in executor.unbatched


def company(function: Function, executor: Executor) -> list[Request]:
    """The requests that the next execution takes, oldest first."""
    queue, most = function.queue.values(), function.spec.batch.rows
    head = next(iter(queue))
    chosen = [head]
    if most == 1 or not may_share(function, head, executor):
        return chosen
    room = most - head.rows
    for request in islice(queue, 1, LOOK_AHEAD):
        if room == 0:
            break
        if request.alike == head.alike and not request.alone and request.rows <= room:
            chosen.append(request)
            room -= request.rows
    return chosen


def gathers_until_ns(function: Function, executor: Executor, now: Ns) -> Ns | None:
    """How long the first request may still wait for company; None: it has all it can have, or waits no longer."""
    head, batch = function.head, function.spec.batch
    if head is None or not batch.wait_ns or not may_share(function, head, executor):
        return None
    until_ns = head.arrived_ns + batch.wait_ns
    full = sum(request.rows for request in company(function, executor)) >= batch.rows
    return None if full or until_ns <= now else until_ns


def padded_rows(function: Function, executor: Executor, requests: list[Request]) -> int:
    """To how many rows an execution is filled up, so that few shapes come up: a power of two. 0: it is run as it is."""
    if function.spec.batch.rows == 1 or not may_share(function, requests[0], executor):
        return 0
    rows = sum(request.rows for request in requests)
    padded: int = 1 << (rows - 1).bit_length()
    return padded if len(requests) > 1 or padded > rows else 0


def shared(device_ns: Ns, requests: list[Request]) -> list[Ns]:
    """Each request's part of a device's time, by rows; together exactly all of it."""
    total, seen, given = sum(request.rows for request in requests), 0, 0
    parts = []
    for request in requests:
        seen += request.rows
        part = device_ns * seen // total - given
        parts.append(part)
        given += part
    return parts
