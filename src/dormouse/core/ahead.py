"""Whether a device is given its next execution before it has ended the one it has.

A short run ends before the news of it has come back and the next command has gone out, and the device would idle
meanwhile as long as it computes. So one more execution is queued there behind a run that is known to be short. Whoever
comes in that time, however urgent, waits for both: that is why it is one, and only behind a short one.
"""

from dormouse.core.state import RUNNING, Executor, State


def may_queue_behind(state: State, executor: Executor) -> bool:
    """Whether what the executor runs now will soon end, and nothing is queued behind it."""
    running = executor.executing
    if running is None or executor.ahead is not None:
        return False
    function = state.functions[running.function]
    if function.residencies[executor.id].state is not RUNNING:
        return False  # it waits for the rest of its image
    return function.lead.known and function.lead.computing_ns <= state.settings.ahead_ns
