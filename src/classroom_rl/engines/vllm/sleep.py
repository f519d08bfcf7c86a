"""Puts an engine to sleep, which frees its GPU memory, and wakes it up.

This uses sleep level 1 of vLLM: the weights move to host memory, and the KV cache is dropped. Level 2 would drop the
weights, too, and save that host memory (and a copy, a small part of the time for publishing). But then an engine could
only wake up with newly published weights: a server whose trainer died could not go on with the old ones, and
everything that vLLM holds besides parameters and buffers would be lost.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from classroom_rl.engines.vllm.weights_gate import WeightsGate
from classroom_rl.errors import GpuFull

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_LEVEL = 1


class SleepControl:
    """Puts one engine to sleep and wakes it up. Its gate is closed meanwhile, so turns wait. Calls run one at a time.

    Args:
        gate: the gate that the engine's turns pass through.
        can_sleep: whether vLLM supports sleep for this engine. It does not on CPUs; there only the gate is closed.

    Attributes:
        asleep: whether the engine sleeps (on CPUs: whether its gate is closed).
    """

    def __init__(self, engine: "AsyncLLM", gate: WeightsGate, can_sleep: bool):
        self._engine = engine
        self._gate = gate
        self.can_sleep = can_sleep
        self.asleep = False
        self._changes = asyncio.Lock()

    async def sleep(self, timeout_s: float) -> None:
        """Wait for the turns in flight, then put the engine to sleep. Does nothing if it sleeps already.

        Raises:
            DeadlineExceeded: if turns are still in flight after `timeout_s` seconds; the engine stays awake.
        """
        async with self._changes:
            if self.asleep:
                return
            await self._gate.close(timeout_s)
            try:
                if self.can_sleep:
                    await self._engine.sleep(level=_LEVEL)
            except BaseException:
                self._gate.open()
                raise
            self.asleep = True

    async def wake_up(self) -> None:
        """Wake the engine up with the weights that it had. Does nothing if it is awake.

        Raises:
            GpuFull: if the GPU has no room; the engine stays asleep and can be woken up later.
            EngineFailure: if an earlier change of its weights failed halfway.
        """
        async with self._changes:
            if self.asleep:
                await self._wake(None)
                self._mark_awake()

    @asynccontextmanager
    async def loading(self, timeout_s: float) -> AsyncIterator[None]:
        """A context in which new weights can be loaded: no turn is sampled, and the weights are in GPU memory.
        Afterwards the engine is awake. The KV cache is allocated last, so that loading has room.

        Raises:
            DeadlineExceeded: if turns are still in flight after `timeout_s` seconds.
            GpuFull: if the GPU has no room for the engine.
        """
        async with self._changes:
            if not self.asleep:
                async with self._gate.closed(timeout_s):
                    yield
                return
            await self._wake(["weights"])
            yield
            await self._wake(["kv_cache"])
            self._mark_awake()

    async def _wake(self, tags: list[str] | None) -> None:
        """Take GPU memory again for these vLLM `tags`; None means all that still sleep."""
        self._gate.check()
        if not self.can_sleep:
            return
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._engine.wake_up(tags=tags)
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM raises errors of its workers without a type of their own
            raise GpuFull(
                f"An engine could not take its GPU's memory again: {error}. Lower vllm.gpu_memory_utilization of the "
                "engines, or what the trainer keeps there; dry_run=true shows who takes how much."
            ) from error

    def _mark_awake(self) -> None:
        self.asleep = False
        self._gate.open()
