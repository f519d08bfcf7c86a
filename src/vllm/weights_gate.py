"""A gate in front of an engine. Turns pass as long as it has room for them; while weights are loaded or it sleeps, none
do."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from src.errors import DeadlineExceeded, EngineFailure


class WeightsGate:
    """Turns pass through `turn()`; `close(timeout)` keeps new ones out and waits for those inside, until `open()`.

    So every answer is wholly of one policy version, and the version read inside `turn()` is the one it was sampled
    by. What waits for a place is outside: it holds nobody up who closes the gate. For use within one event loop.

    Args:
        patience_s: how long a turn waits in front of the gate.
        places: how many turns may have passed at a time; an engine's `vllm.max_num_seqs`.
    """

    def __init__(self, patience_s: float = 3600.0, places: int = 256) -> None:
        self._patience_s = patience_s
        self._places = asyncio.Semaphore(places)
        self._inside = 0
        self._failure: EngineFailure | None = None
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Pass, in the order of coming: waits for a place, and while the gate is closed.

        Raises:
            DeadlineExceeded: if there is no place, or the gate stays closed, for too long.
            EngineFailure: if it was closed for good.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                await self._places.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                f"The engine had no place free within {self._patience_s:g} s. Raise its vllm.max_num_seqs or "
                "generation.sample_timeout_s, or ask for fewer conversations at a time."
            ) from None
        try:
            await self._wait_until_open()
            with self.inside():
                yield
        finally:
            self._places.release()

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

    async def close(self, timeout_s: float) -> None:
        """Close the gate, with nobody inside.

        Raises:
            DeadlineExceeded: if turns are still in flight after `timeout_s` seconds; the gate is open again then.
        """
        await self._wait_until_open()
        self._open.clear()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except BaseException as error:
            self._open.set()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"{self._inside} turns were still being sampled after {timeout_s:g} s; nothing was changed. Raise "
                    "generation.load_weights_timeout_s or lower generation.max_tokens_per_turn."
                ) from None
            raise

    def open(self) -> None:
        """Let turns pass again."""
        self._open.set()

    def close_for_good(self, failure: EngineFailure) -> None:
        """Let no turn pass any more: those that wait, and all that come, fail with `failure`."""
        self._failure = failure
        self._open.set()

    def check(self) -> None:
        """Raises:
        EngineFailure: if it was closed for good.
        """
        if self._failure is not None:
            raise self._failure

    @asynccontextmanager
    async def closed(self, timeout_s: float) -> AsyncIterator[None]:
        """Hold the gate closed, with nobody inside; raises as `close` does."""
        await self.close(timeout_s)
        try:
            yield
        finally:
            self.open()

    async def _wait_until_open(self) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                while not self._open.is_set():
                    await self._open.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"The engine did not take up work again within {self._patience_s:g} s: it sleeps while a trainer uses "
                "its GPU, or it is loading weights. POST /wake_up wakes it."
            ) from None
        self.check()
