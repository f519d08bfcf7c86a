"""The base class of all vLLM engines: start, sleep, health check, deadlines of turns, and shutdown.

It uses vLLM's sleep level 1: the weights move to host memory, and the KV cache is dropped. Level 2 would drop the
weights, too, and save that host memory (and a copy, which is a small part of the time for publishing). But then an
engine could only wake up with newly published weights: a server whose trainer died could not continue with the old
ones, and everything that vLLM holds besides parameters and buffers would be lost.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import ModelConfig
from classroom_rl.config.values import PHASED
from classroom_rl.engines.vllm.engine_start import start_engine
from classroom_rl.engines.vllm.role_metrics import metrics_of
from classroom_rl.engines.vllm.weights_gate import WeightsGate
from classroom_rl.errors import DataError, EngineFailure, GpuFull
from classroom_rl.rollout.chat_template import set_variables
from classroom_rl.rollout.engine import EngineHealth

if TYPE_CHECKING:
    from prometheus_client import Metric
    from vllm import RequestOutput
    from vllm.outputs import PoolingRequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


class TurnDeadlines:
    """Gives each turn a deadline. Whenever a turn ends, the deadlines of all other turns start anew: with a small KV
    cache, an engine samples turns one after the other, so waiting alone is no failure.

    Attributes:
        seconds: the time within which some turn must end.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._extended_at = float("-inf")

    def extend(self) -> None:
        """Restart the time of all turns. Their timers stay as they are: each checks for an extension when it fires."""
        self._extended_at = asyncio.get_running_loop().time()

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """A context in which one turn is sampled. Raises a `TimeoutError` if neither this turn nor any other ended in
        time."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as timeout:

            def check_deadline() -> None:
                nonlocal timer
                deadline = self._extended_at + self.seconds
                if deadline > loop.time():
                    timer = loop.call_at(deadline, check_deadline)
                else:
                    timeout.reschedule(loop.time())  # raises TimeoutError in the turn

            timer = loop.call_later(self.seconds, check_deadline)
            try:
                yield
            finally:
                timer.cancel()


_SLEEP_LEVEL = 1


class SleepControl:
    """Puts one engine to sleep and wakes it up. Its gate is closed while it sleeps, so turns wait. Calls run one at a
    time.

    Args:
        gate: the gate that the engine's turns pass through.
        can_sleep: whether vLLM supports sleep for this engine. On CPUs it does not; there only the gate is closed.

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
        """Wait for the turns in flight, then put the engine to sleep. Does nothing if it already sleeps. Raises a
        `DeadlineExceeded` if turns are still in flight after `timeout_s` seconds; the engine stays awake."""
        async with self._changes:
            if self.asleep:
                return
            await self._gate.close(timeout_s)
            try:
                if self.can_sleep:
                    await self._engine.sleep(level=_SLEEP_LEVEL)
            except BaseException:
                self._gate.open()
                raise
            self.asleep = True

    async def wake_up(self) -> None:
        """Wake the engine up with the same weights. Does nothing if it is awake.

        Raises:
            GpuFull: if the GPU has no free memory for it; the engine stays asleep and can be woken up later.
            EngineFailure: if an earlier change of its weights failed halfway.
        """
        async with self._changes:
            if self.asleep:
                await self._wake(None)
                self._mark_awake()

    @asynccontextmanager
    async def loading(self, timeout_s: float) -> AsyncIterator[None]:
        """A context in which new weights can be loaded: no turn is sampled, and the weights are in GPU memory.
        Afterwards the engine is awake. The KV cache is allocated last, so that its memory is free during loading.

        Raises:
            DeadlineExceeded: if turns are still in flight after `timeout_s` seconds.
            GpuFull: if the GPU has no free memory for the engine.
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
        """Allocate GPU memory again for these `tags` of vLLM ("weights", "kv_cache"); None means all that sleep."""
        self._gate.check()
        if not self.can_sleep:
            return
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._engine.wake_up(tags=tags)
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM raises its workers' errors without a specific type
            raise GpuFull(
                f"An engine could not take its GPU's memory again: {error}. Lower vllm.gpu_memory_utilization of the "
                "engines, or what the trainer keeps there; dry_run=true shows who takes how much."
            ) from error

    def _mark_awake(self) -> None:
        self.asleep = False
        self._gate.open()


Output = TypeVar("Output", "RequestOutput", "PoolingRequestOutput")


class EngineProcess:
    """One model on vLLM's `AsyncLLM`. Subclasses define how it is loaded and which requests it accepts.

    Attributes:
        model_name: the configured name of the model.
        gate: the engine's gate. The weights do not change while a turn is inside it.
        tokenizer: the model's tokenizer.
    """

    def __init__(
        self, engine: "AsyncLLM", model: ModelConfig, pids: list[int], gpus: list[str], generation: GenerationConfig
    ):
        self._engine = engine
        self._model = model
        self.model_name = model.model_name_or_path
        self._pids = pids
        self._gpus = gpus
        self._deadlines = TurnDeadlines(generation.turn_timeout_s)
        self._places = (model.vllm.data_parallel_size or 1) * model.vllm.max_num_seqs
        self.gate = WeightsGate(generation.sample_timeout_s, self._places)
        self._failure: EngineFailure | None = None
        self._sleep_control = SleepControl(engine, self.gate, engine.model_config.enable_sleep_mode)
        self.tokenizer = copy(engine.get_tokenizer())  # vLLM gives two engines of one model the same one
        set_variables(self.tokenizer, model.vllm.chat_template_kwargs)

    @classmethod
    async def start(cls, model: ModelConfig, seed: int, generation: GenerationConfig) -> Self:
        """Load a model. This takes about twenty seconds on a CPU, longer for large models. Several engines may start at
        the same time, unless they share a GPU's memory.

        If the start is cancelled, it first waits until the model is loaded, because vLLM loads it in a thread, and then
        ends the engine.

        Args:
            generation: sets the deadlines, and whether the engine needs sleep mode.

        Raises:
            EngineFailure: if vLLM cannot load it; the message is vLLM's.
        """
        sleep_mode = generation.colocate is not False or generation.schedule == PHASED
        load = partial(cls._load, model, seed, sleep_mode)
        try:
            engine, pids = await _end_if_cancelled(asyncio.to_thread(start_engine, model, load))
            try:
                await engine.collective_rpc("exit_with_server", args=(os.getpid(), pids))
                gpus = [gpu for gpu in await _ask_all_copies(engine, "gpu") if gpu is not None]
                return cls(engine, model, pids, gpus, generation)
            except BaseException:
                _shut_down(engine)
                raise
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineFailure(f"vLLM could not load {model.model_name_or_path}: {error}") from error

    @staticmethod
    def _load(model: ModelConfig, seed: int, sleep_mode: bool) -> "AsyncLLM":
        raise NotImplementedError

    async def sleep(self, timeout_s: float) -> None:
        """Wait for the turns in flight, then free the GPU's memory; the weights move to host memory. New turns wait
        until `wake_up`. On CPUs turns also wait, but no memory is freed.

        Raises:
            DeadlineExceeded: if turns are still in flight after `timeout_s` seconds; the engine stays awake.
            EngineFailure: if the engine died.
        """
        with engine_errors(self._model):
            await self._sleep_control.sleep(timeout_s)

    async def wake_up(self) -> None:
        """Allocate GPU memory again and continue with the same weights.

        Raises:
            GpuFull: if the GPU has no free memory for it; the engine stays asleep.
            EngineFailure: if the engine died.
        """
        with engine_errors(self._model):
            await self._sleep_control.wake_up()

    def health(self) -> EngineHealth:
        """The model, the vLLM version, and the engine's process ids, GPUs and sleep state."""
        import vllm

        self.check_alive()
        return EngineHealth(
            model=self._model.model_name_or_path,
            engine="vllm",
            engine_version=vllm.__version__,
            pids=self._pids,
            gpus=self._gpus,
            can_sleep=self._sleep_control.can_sleep,
            asleep=self._sleep_control.asleep,
            places=self._places,
        )

    def metrics(self) -> list["Metric"]:
        """This engine's vLLM metrics, for Prometheus."""
        return metrics_of(self._engine)

    def check_alive(self) -> None:
        """Check that the engine works. Raises an `EngineFailure` if one of its processes died, or a change of its
        weights failed halfway."""
        if self._failure is not None:
            raise self._failure
        if self._engine.errored:
            raise EngineFailure(f"The engine of {self._model.model_name_or_path} died: {self._engine.dead_error}")

    def shutdown(self) -> None:
        """End the engine's processes."""
        del self._sleep_control  # it also holds a reference to the engine
        _shut_down(self.__dict__.pop("_engine"))

    @contextmanager
    def _weight_change(self, action: str) -> Iterator[None]:
        """A context in which the weights change. If it fails or is cancelled, the engine may hold a mix of old and new
        weights, perhaps a different mix on each GPU. Then no turn is sampled any more, and the engine counts as dead.

        Args:
            action: describes the change, for the message.

        Raises:
            DataError: passed through: the change was refused before any weight changed.
            EngineFailure: for every other error.
        """
        try:
            yield
        except DataError:
            raise
        except BaseException as error:
            self._failure = EngineFailure(
                f"The engine of {self._model.model_name_or_path} failed while it {action}, and may hold parts of the "
                f"old weights and of the new ones: {error or type(error).__name__}"
            )
            self.gate.close_for_good(self._failure)
            if isinstance(error, Exception):
                raise self._failure from error
            raise

    async def _finish(self, request: AsyncIterator[Output]) -> Output:
        """The final output of a request to vLLM. Call it inside the gate. Raises an `EngineFailure` if the engine died,
        or finished no request in time."""
        try:
            async with self._deadlines.deadline():
                with engine_errors(self._model):
                    async for output in request:
                        if output.finished:
                            self._deadlines.extend()
                            return output
        except TimeoutError:
            raise EngineFailure(
                f"The engine of {self._model.model_name_or_path} did not finish a turn within "
                f"generation.turn_timeout_s = {self._deadlines.seconds:g} s."
            ) from None
        raise EngineFailure(f"The engine of {self._model.model_name_or_path} ended a request without an answer.")


class engine_errors:
    """Turns vLLM's errors inside the `with` block into `EngineFailure` with the model's name."""

    def __init__(self, model: ModelConfig):
        self._name = model.model_name_or_path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind, error, _trace) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if isinstance(error, EngineDeadError | EngineGenerateError):
            raise EngineFailure(f"The engine of {self._name} failed: {error or type(error).__name__}") from error


async def _ask_all_copies(engine: "AsyncLLM", method: str) -> list:
    """What the workers of all copies of the model answer; `collective_rpc` returns the answers of the first copy."""
    answers = await engine.engine_core.call_utility_all_async("collective_rpc", method, None, (), None)
    return [answer for copy in answers for answer in copy]


async def _end_if_cancelled(
    loading: Coroutine[None, None, tuple["AsyncLLM", list[int]]],
) -> tuple["AsyncLLM", list[int]]:
    """Wait for an engine. If the waiting is cancelled, the engine is shut down as soon as it is loaded."""
    task = asyncio.create_task(loading)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if task.exception() is None:
            engine, _ = task.result()
            _shut_down(engine)
        raise


def _shut_down(engine: "AsyncLLM") -> None:
    engine.shutdown()
    engine.shutdown = _do_nothing  # vLLM's __del__ calls it again, perhaps after the interpreter unloaded its modules


def _do_nothing(timeout: float | None = None) -> None:
    """Replaces `shutdown` of an engine that has been shut down."""
