"""Turns of a core as the cashier sees them, without the rest of a server."""

import time
from pathlib import Path

from dormouse.config import MIB
from dormouse.control.cashier import Cashier
from dormouse.control.payloads import Payloads
from dormouse.core.messages import Command, ExecutionFinished, Reply
from dormouse.core.scheduler import Scheduler
from dormouse.core.types import CommandId, ExecutorId, FunctionId, Settings
from dormouse.core.types import Path as Way
from dormouse.submit import Inference
from dormouse.tensors import Tensor

INFERENCE = Inference("f", (Tensor("x", "FP32", (1, 8), bytes(32)),), tenant="acme")
OUTPUTS = (Tensor("y", "FP32", (1, 8), bytes(32)),)


async def book_turns(state_dir: Path, count: int) -> float:
    """Microseconds of the loop's thread for each turn that ends with an answer."""
    payloads = Payloads(MIB)
    now = time.monotonic_ns()
    cashier = Cashier.open(state_dir, "process", None, payloads, now)
    cashier.begin(MIB)
    state = Scheduler(Settings(host_capacity_bytes=MIB)).state
    executor, function = ExecutorId("cpu:0"), FunctionId("f/1")
    used = 0.0
    for number in range(count):
        request = payloads.accept(function, INFERENCE, now)
        event = ExecutionFinished(executor, CommandId(number), request, 1000)
        commands: list[Command] = [Reply(request, True, Way.RESIDENT, 10, 1000, 1000)]
        began = time.thread_time()
        cashier.book(now + number, event, commands, {request: OUTPUTS}, state)
        used += time.thread_time() - began
        payloads.release(request)
    await cashier.close(time.monotonic_ns())
    payloads.close()
    return used / count * 1e6
