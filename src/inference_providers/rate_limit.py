"""How fast requests may leave: so many, and so many tokens, in any minute."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_MINUTE_S = 60.0
_LOOK_AGAIN_S = 1.0


@dataclass
class Turn:
    """A request that was let go: when, and the tokens counted for it; set `tokens` to what it really took."""

    time: float
    tokens: int


class Pace:
    """Lets requests go one after the other, spread over the minute. None means no limit."""

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
        self._turns: deque[Turn] = deque()
        self._next_at = 0.0
        self._queue = asyncio.Lock()

    async def turn(self, tokens: int) -> Turn:
        """Wait until a request of at most so many tokens may go. One that is larger than a minute's tokens goes alone
        in its minute."""
        async with self._queue:
            while (wait_s := self._wait_s(tokens)) > 0:
                await self._sleep(min(wait_s, _LOOK_AGAIN_S))
            now = self._clock()
            self._next_at = now + self._gap_s
            turn = Turn(now, tokens)
            if self._tokens_per_minute is not None:
                self._turns.append(turn)
            return turn

    def _wait_s(self, tokens: int) -> float:
        now = self._clock()
        while self._turns and self._turns[0].time <= now - _MINUTE_S:
            self._turns.popleft()
        wait_s = self._next_at - now
        if self._turns and sum(turn.tokens for turn in self._turns) + tokens > self._tokens_per_minute:
            wait_s = max(wait_s, self._turns[0].time + _MINUTE_S - now)
        return wait_s
