"""What executors say about graphs, as people see it."""

import asyncio
from pathlib import Path

from dormouse import wire
from dormouse.config import Config
from dormouse.control.catalog import Deployed
from dormouse.control.inventory import function_row
from dormouse.control.payloads import Outputs
from dormouse.control.processes import ExecutorProcesses
from dormouse.control.topology import Links
from dormouse.core.messages import Event, Forget
from dormouse.core.scheduler import Scheduler
from dormouse.core.types import CommandId, ExecutorId, FunctionId, Settings, Topology
from dormouse.functions import Manifest
from dormouse.slab import Slab
from dormouse.store.arena import Arena
from dormouse.tensors import Signature

EXECUTOR = ExecutorId("cpu:0")
FUNCTION = FunctionId("f/1")


def nothing(event: Event, tensors: Outputs) -> None:
    del event, tensors


def grown(offset: int, size_bytes: int) -> None:
    del offset, size_bytes


def test_a_function_says_where_graphs_of_it_are_and_why_there_are_no_more(tmp_path: Path) -> None:
    async def scenario() -> list[dict[str, wire.GraphsHeld]]:
        slab = Slab.create(4096, owner=True)
        executors = ExecutorProcesses(Config(tmp_path), slab, Links(Topology(), 1))
        executors._add("cpu", Arena(2 * 1024 * 1024, grown), nothing, Scheduler(Settings(1)).state)
        process = executors._processes[EXECUTOR]
        seen = [executors.graphs_of(FUNCTION)]
        process.received(wire.GraphsHeld(FUNCTION, 1, ""))
        process.received(wire.GraphsHeld(FUNCTION, 2, "text goes in"))
        seen.append(executors.graphs_of(FUNCTION))
        executors.send(EXECUTOR, Forget(EXECUTOR, CommandId(1), FUNCTION))
        seen.append(executors.graphs_of(FUNCTION))
        process.received(wire.GraphsHeld(FUNCTION, 1, ""))
        process.lost("it is gone")
        seen.append(executors.graphs_of(FUNCTION))
        return seen

    held = wire.GraphsHeld(FUNCTION, 2, "text goes in")
    assert asyncio.run(scenario()) == [{}, {"cpu:0": held}, {}, {}]
    deployed = Deployed(Manifest("f", "source"), 1, 10, 0, Signature((), ()), "pytorch_module")
    row = function_row(deployed, None, {"cpu:0": held})
    assert row["graphs"] == {"cpu:0": {"shapes": 2, "eager_because": "text goes in"}}
    assert function_row(deployed, None)["graphs"] == {}
