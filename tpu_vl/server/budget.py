"""Host memory of unfinished requests: taken before it is allocated, given back on every path."""

import asyncio
from collections import deque


class Reservation:
    """Bytes that one request holds of a budget; closing it twice is harmless."""

    def __init__(self, budget: "ByteBudget", num_bytes: int) -> None:
        self._budget = budget
        self.num_bytes = num_bytes

    def shrink(self, num_bytes: int) -> None:
        """Gives back what is above `num_bytes`."""
        given = self.num_bytes - min(num_bytes, self.num_bytes)
        self.num_bytes -= given
        self._budget.give_back(given)

    def close(self) -> None:
        """Gives all back."""
        self.shrink(0)


class ByteBudget:
    """A count of bytes with a limit, handed out first come, first served.

    Args:
        limit_bytes: of all reservations together, >= 1.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    async def reserve(self, num_bytes: int) -> Reservation:
        """Waits until the bytes are free; more than the limit is cut to it, so it never hangs."""
        num_bytes = min(num_bytes, self._limit_bytes)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        self._wake()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(num_bytes)
            self._wake()
            raise
        return Reservation(self, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Frees bytes and lets those go on that now fit."""
        self.used_bytes -= num_bytes
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if not turn.done() and self.used_bytes + num_bytes > self._limit_bytes:
                return
            self._waiting.popleft()
            if not turn.done():
                self.used_bytes += num_bytes
                turn.set_result(None)
