"""Limits the requests and the tokens that are sent per minute."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_MINUTE_S = 60.0
_POLL_S = 1.0


@dataclass
class Reservation:
    """A request's reservation of tokens per minute: the time at which it may be sent, and its number of tokens. Set
    `tokens` to the real number once it is known."""

    time: float
    tokens: int


class RateLimiter:
    """Spreads requests evenly over the minute, and keeps the tokens of any minute within a limit. None: no limit."""

    def __init__(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ):
        self._gap_s = _MINUTE_S / requests_per_minute if requests_per_minute else 0.0
        self._tokens_per_minute = tokens_per_minute
        self._clock = clock
        self._sleep = sleep
        self._reservations: deque[Reservation] = deque()
        self._next_at = 0.0
        self._queue = asyncio.Lock()

    async def reserve(self, tokens: int) -> Reservation:
        """Wait until a request of at most `tokens` tokens may be sent. A request larger than the limit waits until no
        other request counts in its minute."""
        async with self._queue:
            while (wait_s := self._wait_s(tokens)) > 0:
                await self._sleep(min(wait_s, _POLL_S))
            now = self._clock()
            self._next_at = now + self._gap_s
            reservation = Reservation(now, tokens)
            if self._tokens_per_minute is not None:
                self._reservations.append(reservation)
            return reservation

    def _wait_s(self, tokens: int) -> float:
        now = self._clock()
        while self._reservations and self._reservations[0].time <= now - _MINUTE_S:
            self._reservations.popleft()
        wait_s = self._next_at - now
        if self._reservations and sum(each.tokens for each in self._reservations) + tokens > self._tokens_per_minute:
            wait_s = max(wait_s, self._reservations[0].time + _MINUTE_S - now)
        return wait_s
