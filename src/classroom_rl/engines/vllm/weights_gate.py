"""A gate in front of an engine: it limits the turns in flight, and makes all turns wait while weights are loaded or the
engine sleeps."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from classroom_rl.errors import DeadlineExceeded, EngineFailure


class WeightsGate:
    """Turns are sampled inside `turn()`. `close(timeout_s)` lets no new turn in and waits for those inside; `open()`
    lets turns in again.

    So every turn is sampled by one policy version: the one read inside `turn()`. A turn that waits for a free slot is
    still outside, so `close` does not wait for it. All methods must be called in the same event loop.

    Args:
        patience_s: how many seconds a turn waits to get in.
        places: the maximum number of turns inside; an engine's `vllm.max_num_seqs`.
    """

    def __init__(self, patience_s: float = 3600.0, places: int = 256) -> None:
        self._patience_s = patience_s
        self._slots = asyncio.Semaphore(places)
        self._inside = 0
        self._failure: EngineFailure | None = None
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The context in which a turn is sampled. Waits, first come first served, for a free slot and an open gate.

        Raises:
            DeadlineExceeded: if no slot is free within `patience_s`, or the gate stays closed for that long.
            EngineFailure: if the gate was closed for good.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                await self._slots.acquire()
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
            self._slots.release()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count as inside, for work that a turn inside the gate starts and that may outlast the turn."""
        self._inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._idle.set()

    async def close(self, timeout_s: float) -> None:
        """Close the gate and wait until no turn is inside. Raises a `DeadlineExceeded` if turns are still in flight
        after `timeout_s` seconds; the gate is open again."""
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
        """Let turns in again."""
        self._open.set()

    def close_for_good(self, failure: EngineFailure) -> None:
        """Let no turn in any more: all waiting and future turns raise `failure`."""
        self._failure = failure
        self._open.set()

    def check(self) -> None:
        """Check that the gate was not closed for good. Raises an `EngineFailure` if it was."""
        if self._failure is not None:
            raise self._failure

    @asynccontextmanager
    async def closed(self, timeout_s: float) -> AsyncIterator[None]:
        """A context in which the gate is closed and no turn is inside. Arguments and errors as for `close`."""
        await self.close(timeout_s)
        try:
            yield
        finally:
            self.open()

    async def _wait_until_open(self) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                while not self._open.is_set():  # it may be closed again before this task runs
                    await self._open.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"The engine did not take up work again within {self._patience_s:g} s: it sleeps while a trainer uses "
                "its GPU, or it is loading weights. POST /wake_up wakes it."
            ) from None
        self.check()
