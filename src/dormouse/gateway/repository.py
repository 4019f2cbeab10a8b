"""Load and unload for both doors, waited for or not. Knows no wire.

Normally the answer comes when the operation has ended. With the parameter ``wait`` = false it comes at once; how the
operation goes is then in the repository index, and why it failed, in the log.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from dormouse.errors import DormouseError
from dormouse.gateway.answers import unexpected
from dormouse.gateway.kserve import check_load, flag
from dormouse.submit import Submit

_LOG = logging.getLogger("dormouse.gateway")

Operation = Callable[[str], Awaitable[None]]


class Repository:
    """The operations of one door."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._unattended: set[asyncio.Task[None]] = set()

    async def load(self, name: str, parameters: Mapping[str, object]) -> None:
        """Raises what Submit raises, and InvalidRequest for parameters that a load does not have."""
        check_load(parameters)
        await self._operate(self._submit.load, name, parameters)

    async def unload(self, name: str, parameters: Mapping[str, object]) -> None:
        """Raises what Submit raises."""
        await self._operate(self._submit.unload, name, parameters)

    async def _operate(self, operation: Operation, name: str, parameters: Mapping[str, object]) -> None:
        if flag("parameter", "wait", parameters) is not False:
            await operation(name)
            return
        self._submit.describe(name)  # an unknown name is refused at once
        task = asyncio.create_task(_logged(operation, name))
        self._unattended.add(task)
        task.add_done_callback(self._unattended.discard)


async def _logged(operation: Operation, name: str) -> None:
    try:
        await operation(name)
    except DormouseError as fault:
        _LOG.warning("function %r: %s", name, fault.message)
    except Exception as fault:
        unexpected(f"an operation on function {name!r}", fault)
