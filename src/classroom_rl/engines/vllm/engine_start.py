"""Starts the processes of vLLM's engines, each with the environment variables that its model needs."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from classroom_rl.config.models import ModelConfig
from classroom_rl.config.values import SERVED_RANKS
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.models.lora import adapter_shape
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.system.startup import short_openmp_wait

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


SLOTS = 2
"""One more than the adapters in use: if all slots are full, vLLM applies the last adapter to requests without adapter.
While a new version replaces the old one, both are loaded, and no request is sampled."""


class AdapterSlot:
    """The current version of an engine's adapter. Until the first one is loaded, the model samples without adapter.

    Attributes:
        current: vLLM's `LoRARequest` of that version; None before the first version.
    """

    def __init__(self, engine: "AsyncLLM"):
        self._engine = engine
        self._loaded = 0
        self.current: LoRARequest | None = None

    async def load(self, folder: Path, policy: PolicyVersion) -> None:
        """Replace the adapter with a published one. Nothing may be sampled meanwhile. Raises a `DataError` if vLLM
        refuses the new adapter; the old one stays."""
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        # vLLM does not reload a known id, and looks up cached prefixes by the adapter's name. So each load gets a new
        # id and a new name, even if the same version is published again.
        self._loaded += 1
        adapter = LoRARequest(f"{policy} ({self._loaded})", self._loaded, str(folder))
        try:
            await self._engine.add_lora(adapter)
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM raises its workers' errors without a specific type
            raise DataError(f"vLLM did not take the adapter in {folder}: {error}") from error
        previous, self.current = self.current, adapter
        if previous is not None:
            await self._engine.remove_lora(previous.lora_int_id)


def adapter_arguments(model: ModelConfig) -> dict[str, Any]:
    """vLLM's engine arguments for a model's adapter; empty without one.

    The modules are listed so that the output head gets no adapter slot. A slot would need rank × vocabulary parameters,
    and the head could not compute log-probs of prompts, which would kill the engine.

    Raises:
        ConfigError: if `lora.target_modules` does not fit the model.
    """
    if model.adapter is None:
        return {}
    shape = adapter_shape("teacher_model.lora", model.model_name_or_path, model.adapter)
    return {
        "enable_lora": True,
        "max_loras": SLOTS,
        "max_lora_rank": served_rank(shape.rank),
        "lora_target_modules": list(shape.modules),
    }


def served_rank(rank: int) -> int:
    """The smallest rank supported by vLLM that is at least `rank`. Raises a `ConfigError` if there is none."""
    if rank > SERVED_RANKS[-1]:
        raise ConfigError(
            f"The teacher's adapter has a matrix of rank {rank}, but vLLM serves ranks up to {SERVED_RANKS[-1]}: lower "
            "teacher_model.lora.rank."
        )
    return min(supported for supported in SERVED_RANKS if supported >= rank)


_POLL_S = 0.05
_ENVIRONMENT_LOCK = threading.Lock()
"""Held while this process's environment variables are those of one engine. A started process keeps what it
inherited."""


def start_engine(model: ModelConfig, load: Callable[[], "AsyncLLM"]) -> tuple["AsyncLLM", list[int]]:
    """Call `load` with the environment variables for `model`, which stay set until vLLM has started the engine's
    processes: one, or with several copies of the model one for each and a coordinator. Several threads may start
    engines at once: one waits until the other's processes have started, not until its model is loaded.

    Processes are spawned. vLLM's default on GPUs is to fork, but a fork from a server's thread would inherit locks that
    other threads hold. VLLM_WORKER_MULTIPROC_METHOD and VLLM_USE_FLASHINFER_SAMPLER are respected if they are set.

    Returns:
        The engine, and its process ids.
    """
    with ThreadPoolExecutor(1, "vllm-start") as pool:
        with _ENVIRONMENT_LOCK, _engine_environment(model):
            earlier_processes = set(multiprocessing.active_children())
            loading = pool.submit(load)
            copies = model.vllm.data_parallel_size or 1
            processes = _wait_for_processes(earlier_processes, loading, copies + (copies > 1))
        engine = loading.result()
    children = [child for process in processes for child in psutil.Process(process.pid).children(recursive=True)]
    return engine, sorted(process.pid for process in (*processes, *children))


def _wait_for_processes(others: set[BaseProcess], loading: Future, count: int) -> set[BaseProcess]:
    """The processes that the engine starts, as soon as all run; fewer if the engine failed, or needed fewer."""
    while True:
        done = loading.done()  # before looking for processes, so that those started in between are not missed
        started = set(multiprocessing.active_children()) - others
        if len(started) >= count or done:
            return started
        wait([loading], _POLL_S)


class _engine_environment:
    """Sets an engine's environment variables inside the `with` block: how vLLM starts processes and samples, and for
    CPUs the cores, how threads wait, and the size of the KV cache.

    OpenMP reads its variables when the engine's process starts, so the model may run in that process. On GPUs, vLLM
    would sample turns with `top_k` or `top_p` by FlashInfer. In the middle of the first such turn, that downloads and
    compiles kernels, which takes minutes or fails. vLLM's own kernels need neither.
    """

    def __init__(self, model: ModelConfig):
        from vllm.utils.cpu_resource_utils import parse_id_list

        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        self._variables = {"VLLM_CPU_KVCACHE_SPACE": str(model.vllm.cpu_kvcache_gib), **short_openmp_wait()}
        if model.vllm.cpu_cores is not None:
            self._variables["VLLM_CPU_OMP_THREADS_BIND"] = model.vllm.cpu_cores
            cores = parse_id_list(model.vllm.cpu_cores)
            self._variables["OMP_NUM_THREADS"] = str(len(cores))
            self._variables["OMP_PLACES"] = f"{{{','.join(map(str, cores))}}}"
            self._variables["OMP_PROC_BIND"] = "true"

    def __enter__(self) -> None:
        self._previous = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)

    def __exit__(self, *_error) -> None:
        for name, value in self._previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
