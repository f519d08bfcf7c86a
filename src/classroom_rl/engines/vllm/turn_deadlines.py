"""Deadlines of an engine's turns."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TurnDeadlines:
    """Gives each turn a time, which begins anew for all of them whenever one ends: with a small KV cache, an engine
    samples turns one after the other.

    Attributes:
        seconds: the time in which some turn must end.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._extended_at = float("-inf")

    def extend(self) -> None:
        """Begin the time of all turns anew. They are not touched: each looks again when its own time is over."""
        self._extended_at = asyncio.get_running_loop().time()

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """A turn goes inside.

        Raises:
            TimeoutError: if neither it nor any other turn ended in time.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as timeout:

            def look_again() -> None:
                nonlocal timer
                until = self._extended_at + self.seconds
                if until > loop.time():
                    timer = loop.call_at(until, look_again)
                else:
                    timeout.reschedule(loop.time())

            timer = loop.call_later(self.seconds, look_again)
            try:
                yield
            finally:
                timer.cancel()
