"""What every vLLM engine in this process is, whatever it is asked for: its start, its sleep, its health, its end."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TypeVar

import psutil

from config.base import GenerationConfig, ModelConfig
from config.values import PHASED
from src.errors import DataError, EngineFailure
from src.rollout.engines import EngineHealth
from src.vllm.sleep import Rest
from src.vllm.weights_gate import WeightsGate

if TYPE_CHECKING:
    from vllm.outputs import PoolingRequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm import RequestOutput

Output = TypeVar("Output", "RequestOutput", "PoolingRequestOutput")


class EngineProcess:
    """One model on vLLM's `AsyncLLM`. Subclasses say how it is loaded, and what can be asked of it.

    Attributes:
        tokenizer: the model's tokenizer.
    """

    def __init__(
        self, engine: "AsyncLLM", model: ModelConfig, pids: list[int], gpus: list[str], generation: GenerationConfig
    ):
        self._engine = engine
        self._model = model
        self._pids = pids
        self._gpus = gpus
        self._turn_timeout_s = generation.turn_timeout_s
        self._gate = WeightsGate(generation.sample_timeout_s, model.vllm.max_num_seqs)
        self._deadlines: set[asyncio.Timeout] = set()
        self._failure: EngineFailure | None = None
        self._rest = Rest(engine, self._gate, engine.model_config.enable_sleep_mode)
        self.tokenizer = engine.get_tokenizer()

    @classmethod
    async def start(cls, model: ModelConfig, seed: int, generation: GenerationConfig) -> Self:
        """Load a model. Takes about twenty seconds on a CPU, longer for large models.

        Its processes are spawned: vLLM's default on GPUs is to fork, and a fork from a thread of a server takes along
        locks that other threads hold. A VLLM_WORKER_MULTIPROC_METHOD that is set already stays.

        Args:
            generation: its deadlines, and whether the engine may have to give its GPU's memory back.

        Raises:
            EngineFailure: if vLLM cannot load it; the message is vLLM's.
        """
        before = _child_pids()
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        with _cpu_environment(model):
            try:
                engine = await asyncio.to_thread(cls._load, model, seed, _may_have_to_sleep(generation))
                await engine.collective_rpc("end_with", args=(os.getpid(),))
            except (RuntimeError, ValueError, OSError) as error:
                raise EngineFailure(f"vLLM could not load {model.model_name_or_path}: {error}") from error
        gpus = [gpu for gpu in await engine.collective_rpc("gpu") if gpu is not None]
        return cls(engine, model, sorted(_child_pids() - before), gpus, generation)

    @staticmethod
    def _load(model: ModelConfig, seed: int, sleep_mode: bool) -> "AsyncLLM":
        raise NotImplementedError

    @property
    def model_name(self) -> str:
        """As it is configured."""
        return self._model.model_name_or_path

    async def sleep(self, timeout_s: float) -> None:
        """Give the GPU's memory back, once all turns in flight have ended, and keep the weights in the host's memory.
        Turns wait from now on. On CPUs that is all that happens.

        Raises:
            DeadlineExceeded: if turns are still in flight after `timeout_s` seconds; it is awake then.
            EngineFailure: if the engine died.
        """
        with engine_errors(self._model):
            await self._rest.sleep(timeout_s)

    async def wake_up(self) -> None:
        """Take the GPU's memory again and go on with the weights that it had.

        Raises:
            GpuFull: if there is no room; it sleeps on.
            EngineFailure: if the engine died.
        """
        with engine_errors(self._model):
            await self._rest.wake_up()

    def health(self) -> EngineHealth:
        """Model, vLLM version, and the ids of the engine's processes."""
        import vllm

        self.check_alive()
        return EngineHealth(
            model=self._model.model_name_or_path,
            engine="vllm",
            engine_version=vllm.__version__,
            pids=self._pids,
            gpus=self._gpus,
            can_sleep=self._rest.can_sleep,
            asleep=self._rest.asleep,
        )

    def check_alive(self) -> None:
        """Raises:
        EngineFailure: if one of its processes died, or a change of its weights was not made to its end.
        """
        if self._failure is not None:
            raise self._failure
        if self._engine.errored:
            raise EngineFailure(f"The engine of {self._model.model_name_or_path} died: {self._engine.dead_error}")

    def shutdown(self) -> None:
        """End the engine's processes."""
        del self._rest
        engine = self.__dict__.pop("_engine")
        engine.shutdown()
        engine.shutdown = _nothing  # vLLM's __del__ calls it again; as the interpreter ends, it would lack its modules

    @contextmanager
    def _whole_change(self, what: str) -> Iterator[None]:
        """Inside, the weights change. If that fails, or is broken off, some of them are old and some new, perhaps other
        ones on each GPU: no turn is sampled from them any more, and the engine counts as dead.

        Args:
            what: is done to the engine, for the message.

        Raises:
            DataError: as it is, for a change that was refused before anything was changed.
            EngineFailure: for everything else.
        """
        try:
            yield
        except DataError:
            raise
        except BaseException as error:
            self._failure = EngineFailure(
                f"The engine of {self._model.model_name_or_path} failed while it {what}, and may hold parts of the old "
                f"weights and of the new ones: {error or type(error).__name__}"
            )
            self._gate.close_for_good(self._failure)
            if isinstance(error, Exception):
                raise self._failure from error
            raise

    async def _finish(self, request: AsyncIterator[Output]) -> Output:
        """What a request to vLLM comes to that has passed the gate.

        Raises:
            EngineFailure: if the engine died, or finished nothing in time: with a small cache it takes up turns one
                after the other, so that one that ends is more time for the others.
        """
        try:
            async with asyncio.timeout(self._turn_timeout_s) as deadline:
                self._deadlines.add(deadline)
                with engine_errors(self._model):
                    async for output in request:
                        if output.finished:
                            self._put_off_deadlines()
                            return output
        except TimeoutError:
            raise EngineFailure(
                f"The engine of {self._model.model_name_or_path} did not finish a turn within "
                f"generation.turn_timeout_s = {self._turn_timeout_s:g} s."
            ) from None
        finally:
            self._deadlines.discard(deadline)
        raise EngineFailure(f"The engine of {self._model.model_name_or_path} ended a request without an answer.")

    def _put_off_deadlines(self) -> None:
        until = asyncio.get_running_loop().time() + self._turn_timeout_s
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(until)


class engine_errors:
    """Turns vLLM's errors into one that names the engine."""

    def __init__(self, model: ModelConfig):
        self._name = model.model_name_or_path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind, error, _trace) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if isinstance(error, EngineDeadError | EngineGenerateError):
            raise EngineFailure(f"The engine of {self._name} failed: {error or type(error).__name__}") from error


def _may_have_to_sleep(generation: GenerationConfig) -> bool:
    return generation.colocate is not False or generation.schedule == PHASED


class _cpu_environment:
    """Tells a vLLM engine that runs on CPUs which cores and how much cache it has; vLLM reads both as it starts."""

    def __init__(self, model: ModelConfig):
        self._wanted = {"VLLM_CPU_KVCACHE_SPACE": str(model.vllm.cpu_kvcache_gib)}
        if model.vllm.cpu_cores is not None:
            self._wanted["VLLM_CPU_OMP_THREADS_BIND"] = model.vllm.cpu_cores

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._wanted}
        os.environ.update(self._wanted)

    def __exit__(self, *_error) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _child_pids() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _nothing(timeout: float | None = None) -> None:
    """For an engine that has been shut down."""
