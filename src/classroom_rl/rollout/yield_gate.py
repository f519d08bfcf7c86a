"""Lets a few of many waiting coroutines go on in each pass of the event loop.

When thousands of episodes become ready at once, the event loop would run all of them before it looks at anything else,
and the server would answer nobody for seconds. An episode goes through a turnstile before each of its steps.
"""

import asyncio
from collections import deque

_PER_PASS = 8


class Turnstile:
    """Lets about `per_pass` coroutines through in each pass of the event loop, never more than twice as many, in the
    order in which they come."""

    def __init__(self, per_pass: int = _PER_PASS):
        self._per_pass = per_pass
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def go_through(self) -> None:
        """Go on now, or in a later pass."""
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._begin_pass)
        if self._passed < self._per_pass and not self._waiting:
            self._passed += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        await place

    def _begin_pass(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < self._per_pass:
            place = self._waiting.popleft()
            if not place.done():  # else its coroutine was cancelled
                place.set_result(None)
                self._passed += 1
        self._counting = self._passed > 0
        if self._counting:
            asyncio.get_running_loop().call_soon(self._begin_pass)
