"""A gate between sampling and new weights: many turns pass at once, and none while weights are loaded."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from src.errors import DeadlineExceeded


class WeightsGate:
    """Turns pass through `turn()`; `closed(timeout)` keeps new ones out, waits for those inside, and holds the gate.

    So every answer is wholly of one policy version, and the version read inside `turn()` is the one it was sampled
    by. For use within one event loop.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Pass: waits while the gate is closed."""
        while not self._open.is_set():
            await self._open.wait()
        with self.inside():
            yield

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Stay inside, for work of a turn that has passed and that may outlast it."""
        self._inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._idle.set()

    @asynccontextmanager
    async def closed(self, timeout_s: float) -> AsyncIterator[None]:
        """Hold the gate closed, with nobody inside.

        Raises:
            DeadlineExceeded: if turns are still in flight after `timeout_s` seconds; the gate is open again then.
        """
        while not self._open.is_set():
            await self._open.wait()
        self._open.clear()
        try:
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{self._inside} turns were still being sampled after {timeout_s:g} s; the weights were not "
                    "loaded. Raise generation.load_weights_timeout_s or lower generation.max_tokens_per_turn."
                ) from None
            yield
        finally:
            self._open.set()
