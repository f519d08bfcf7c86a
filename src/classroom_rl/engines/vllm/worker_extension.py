"""Code that runs inside each vLLM worker process, with access to the model."""

import logging
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class PolicyWorker:
    """A mixin for vLLM's worker (`worker_extension_cls`). `collective_rpc` calls its methods on every rank."""

    def exit_with_server(self, server: int, engine: list[int]) -> None:
        """Kill this worker and its engine when the server's process ends. A killed server cannot end them itself, and
        the next server would find the GPU's memory still in use.

        Args:
            server: the server's process id.
            engine: the process ids of the engine, with those of the other copies of its model.
        """
        pids = [pid for pid in engine if pid != os.getpid()]
        pidfd = os.pidfd_open(server)
        threading.Thread(target=_kill_after_exit_of, args=(pidfd, [*pids, os.getpid()]), daemon=True).start()

    def gpu(self) -> str | None:
        """The id of this worker's GPU; see `gpu_id`."""
        return gpu_id(self.device)

    def load_policy(self, path: str) -> None:
        """Load the safetensors in `path` into the running model, in place.

        On CPUs, vLLM keeps a packed copy of the output head. If the head is tied to the embeddings, `reload_weights`
        does not update this copy, so it is packed again.

        Raises:
            RuntimeError: if `path` has no weights for some parameters. vLLM would only log a warning and keep their old
                weights.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import layerwise

        model = self.model_runner.get_model()
        layerwise.logger.addFilter(_is_relevant)
        try:
            with _loads_all_parameters(model, path):
                self.reload_weights(weights_path=path)
        finally:
            layerwise.logger.removeFilter(_is_relevant)
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def _kill_after_exit_of(pidfd: int, pids: list[int]) -> None:
    select.select([pidfd], [], [])  # a pidfd becomes readable when its process ends
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _loads_all_parameters(model: "torch.nn.Module", path: str) -> Iterator[None]:
    """Check that the model's `load_weights`, if it is called inside the `with` block, loads all parameters.

    Raises:
        RuntimeError: if it did not load some of them.
    """
    load_weights, expected, loaded = model.load_weights, {name for name, _ in model.named_parameters()}, None

    def load_and_record(weights: Any) -> Any:
        nonlocal loaded
        loaded = load_weights(weights)
        return loaded

    model.load_weights = load_and_record
    try:
        yield
    finally:
        del model.load_weights  # removes the instance attribute, so the class's method is used again
    missing = sorted(expected - loaded) if loaded is not None else []
    if missing:
        raise RuntimeError(f"{path} lacks weights of the model, {len(missing)} in all: {', '.join(missing[:8])}")


def _is_relevant(record: logging.LogRecord) -> bool:
    """A logging filter that drops vLLM's warnings that a tied head or a rotary embedding has no weights to load."""
    return not record.getMessage().startswith(("ParallelLMHead: Failed to load", "RotaryEmbedding: Failed to load"))


def gpu_id(device: "torch.device") -> str | None:
    """The GPU's UUID, the same in every process and unique among all machines; None for a CPU."""
    if device.type != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
