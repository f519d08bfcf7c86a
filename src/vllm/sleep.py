"""An engine's sleep: it gives the GPU's memory back and keeps everything that it needs to go on.

Level 1 of vLLM's two: the weights move to host memory, the KV cache is dropped. Level 2 would drop the weights as well
and spare the host that memory (and a copy, a small part of the time that publishing takes). But then an engine could
only wake with weights that are published to it, and a server whose trainer died could not answer with the ones it
had; whatever vLLM keeps beside parameters and buffers would be lost, too.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from src.errors import GpuFull
from src.vllm.weights_gate import WeightsGate

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_LEVEL = 1


class Rest:
    """Puts one engine to sleep and wakes it. Turns wait at its gate meanwhile; one change is made at a time.

    Args:
        gate: where the engine's turns pass.
        can_sleep: whether vLLM can put this engine to sleep. On CPUs it cannot: then only the turns wait.

    Attributes:
        asleep: whether it sleeps.
    """

    def __init__(self, engine: "AsyncLLM", gate: WeightsGate, can_sleep: bool):
        self._engine = engine
        self._gate = gate
        self.can_sleep = can_sleep
        self.asleep = False
        self._changes = asyncio.Lock()

    async def sleep(self, timeout_s: float) -> None:
        """Fall asleep, once all turns in flight have ended; nothing happens if it sleeps already.

        Raises:
            DeadlineExceeded: if turns are still in flight after `timeout_s` seconds; it stays awake then.
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
        """Wake with the weights that it had; nothing happens if it is awake.

        Raises:
            GpuFull: if the GPU has no room for it; it sleeps on and can be woken later.
            EngineFailure: if its weights were loaded half.
        """
        async with self._changes:
            if self.asleep:
                await self._wake(None)
                self._end()

    @asynccontextmanager
    async def loading(self, timeout_s: float) -> AsyncIterator[None]:
        """Inside, new weights can be loaded: nothing is sampled, and the weights have their place in the GPU's memory.
        Afterwards the engine is awake. Its cache gets its memory last, so that loading has room.

        Raises:
            DeadlineExceeded: if turns are still in flight after `timeout_s` seconds.
            GpuFull: if the GPU has no room for it.
        """
        async with self._changes:
            if not self.asleep:
                async with self._gate.closed(timeout_s):
                    yield
                return
            await self._wake(["weights"])
            yield
            await self._wake(["kv_cache"])
            self._end()

    async def _wake(self, tags: list[str] | None) -> None:
        """`tags` None wakes whatever sleeps still."""
        self._gate.check()
        if not self.can_sleep:
            return
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._engine.wake_up(tags=tags)
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM gives what failed inside a worker no type of its own
            raise GpuFull(
                f"An engine could not take its GPU's memory again: {error}. Lower vllm.gpu_memory_utilization of the "
                "engines, or what the trainer keeps there; dry_run=true shows who takes how much."
            ) from error

    def _end(self) -> None:
        self.asleep = False
        self._gate.open()
