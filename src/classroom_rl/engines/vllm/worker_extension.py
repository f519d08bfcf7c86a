"""Code that runs inside each vLLM worker process, next to the model."""

import logging
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch


class PolicyWorker:
    """A mixin for vLLM's worker (`worker_extension_cls`). `collective_rpc` calls its methods on every rank."""

    def exit_with_server(self, server: int) -> None:
        """Kill this worker and its engine when the server's process ends. A server that is killed cannot end them, and
        the next server would find the GPU's memory in use.

        Args:
            server: the server's process id.
        """
        engine = [parent.pid for parent in psutil.Process().parents()]
        engine = engine[: engine.index(server)]
        watched = os.pidfd_open(server)
        threading.Thread(target=_kill_after_exit, args=(watched, [*engine, os.getpid()]), daemon=True).start()

    def gpu(self) -> str | None:
        """The id of this worker's GPU; see `gpu_id`."""
        return gpu_id(self.device)

    def load_policy(self, path: str) -> None:
        """Load the safetensors in `path` into the running model, in place.

        On CPUs, vLLM keeps a packed copy of the output head. If the head is tied to the embeddings, `reload_weights`
        does not update the copy, so it is packed again.

        Raises:
            RuntimeError: if `path` has no weights for some parameters. vLLM would only warn and keep their old weights.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import layerwise

        model = self.model_runner.get_model()
        layerwise.logger.addFilter(_keep_record)
        try:
            with _loads_all_parameters(model, path):
                self.reload_weights(weights_path=path)
        finally:
            layerwise.logger.removeFilter(_keep_record)
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def _kill_after_exit(watched: int, pids: list[int]) -> None:
    select.select([watched], [], [])
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _loads_all_parameters(model: "torch.nn.Module", path: str) -> Iterator[None]:
    """Check that the model's `load_weights`, if it is called inside the `with` block, loads all parameters.

    Raises:
        RuntimeError: if it did not load some of them.
    """
    load, wanted, loaded = model.load_weights, {name for name, _ in model.named_parameters()}, None

    def load_and_note(weights: Any) -> Any:
        nonlocal loaded
        loaded = load(weights)
        return loaded

    model.load_weights = load_and_note
    try:
        yield
    finally:
        del model.load_weights  # the class's method is visible again
    lacking = sorted(wanted - loaded) if loaded is not None else []
    if lacking:
        raise RuntimeError(f"{path} lacks weights of the model, {len(lacking)} in all: {', '.join(lacking[:8])}")


def _keep_record(record: logging.LogRecord) -> bool:
    """A logging filter that drops vLLM's warning that a tied head or a rotary embedding has no weights to load."""
    return not record.getMessage().startswith(("ParallelLMHead: Failed to load", "RotaryEmbedding: Failed to load"))


def gpu_id(device: "torch.device") -> str | None:
    """The GPU's UUID, the same in every process and unique among all machines; None for a CPU."""
    if device.type != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
