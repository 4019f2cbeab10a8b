"""What functions have cost since the server started, as far as the ledger has got: for people who watch, not for bills.

Bills of periods that follow on each other add up, so each time only what has come since is billed.
"""

from collections.abc import Awaitable, Callable

from dormouse.billing.bills import Bill
from dormouse.core.types import FunctionId, Ns

BillSince = Callable[[Ns], Awaitable[Bill]]
"""By function, from a moment to the one up to which the ledger has everything."""


class Costs:
    """Sums, by function."""

    def __init__(self, bill_since: BillSince, since_ns: Ns) -> None:
        self.currency = ""
        """Empty: nothing is known yet."""
        self._bill_since = bill_since
        self._since_ns = since_ns
        self._nanos: dict[str, int] = {}
        self._in_time: dict[str, int] = {}

    async def look(self) -> None:
        """Add what has come. Raises what the ledger raises; what is not added now is added later."""
        bill = await self._bill_since(self._since_ns)
        self._since_ns, self.currency = bill.question.until_ns, bill.currency
        for name, line in bill.lines.items():
            self._nanos[name] = self._nanos.get(name, 0) + line.total_nanos
            self._in_time[name] = self._in_time.get(name, 0) + line.in_time

    def of(self, function: FunctionId) -> tuple[int | None, int]:
        """Billionths of the currency, None as long as nothing is known; and the requests in time that are in it."""
        if not self.currency:
            return None, 0
        return self._nanos.get(function, 0), self._in_time.get(function, 0)
