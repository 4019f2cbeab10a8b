"""The ways by which an image can reach a device, and what each would cost. Decides which of them a load takes.

Costs are the topology's rates; whether a way is open now is in the executors' records.
"""

from dormouse.core.state import Executor, Function, ResidencyState, State
from dormouse.core.types import ExecutorId, Ns

SECOND_NS: Ns = 1_000_000_000
WORTH_A_DETOUR_PERCENT = 80
"""A load takes neighbours' links if that makes it at most so long: it holds up whoever wants those links."""
MOST_HELPERS = 1
"""More than one has not been measured."""


def peer_ns(state: State, executor: Executor, function: Function, source: Executor) -> Ns | None:
    """How long a load from another executor's device would take, building included; None: there is no such way.

    Runtime state has one home: a function that has any is never on two devices.
    """
    residency = function.residencies[source.id]
    holds = residency.state in (ResidencyState.RESIDENT, ResidencyState.RUNNING)
    if not holds or source.id not in executor.routes or function.spec.state_bytes:
        return None
    rate = state.settings.topology.pair(source.device, executor.device).peer_bytes_per_s
    build_ns = 0 if function.id in executor.built else function.build_ns
    return function.spec.image_bytes * SECOND_NS // rate + build_ns if rate else None


def helpers(state: State, executor: Executor, function: Function, now: Ns) -> tuple[ExecutorId, ...]:
    """Whose links a load from host memory should borrow: idle ones that nobody waits for, if it pays."""
    if not executor.routes or len(state.homeless) > 1 or now < function.plain_until_ns:
        return ()
    topology = state.settings.topology
    able = []
    for name, detours in executor.routes.items():
        helper = state.executors[name]
        rate = topology.pair(helper.device, executor.device).detour_bytes_per_s
        if detours and rate and helper.may_load:
            able.append((-rate, name))
    chosen = sorted(able)[:MOST_HELPERS]
    own, size_bytes = topology.host_rate(executor.device), function.spec.image_bytes
    together = own - sum(rate for rate, _ in chosen)
    detoured_ns = size_bytes * SECOND_NS // together + topology.detour_ns
    pays = detoured_ns * 100 <= size_bytes * SECOND_NS // own * WORTH_A_DETOUR_PERCENT
    return tuple(name for _, name in chosen) if pays else ()
