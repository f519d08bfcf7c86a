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
    """Mixed into vLLM's worker by `worker_extension_cls`; called through `collective_rpc` on every rank."""

    def end_with(self, server: int) -> None:
        """End this worker and its engine when the server's process is gone: one that was killed could not do so, and
        its successor would find the memory taken."""
        engine = [parent.pid for parent in psutil.Process().parents()]
        engine = engine[: engine.index(server)]
        watched = os.pidfd_open(server)
        threading.Thread(target=_end_after, args=(watched, [*engine, os.getpid()]), daemon=True).start()

    def gpu(self) -> str | None:
        """Which GPU this worker has, as `gpu_id` names it."""
        return gpu_id(self.device)

    def load_policy(self, path: str) -> None:
        """Load the safetensors in `path` into the running model, in place.

        On CPUs vLLM keeps a packed copy of the output head, which `reload_weights` leaves as it was when the head is
        tied to the embeddings; packing it again makes the head follow.

        Raises:
            RuntimeError: if parameters found no weights in `path`, of which vLLM only warns: theirs are the old ones.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import layerwise

        model = self.model_runner.get_model()
        layerwise.logger.addFilter(_has_weights_of_its_own)
        try:
            with _loads_all_parameters(model, path):
                self.reload_weights(weights_path=path)
        finally:
            layerwise.logger.removeFilter(_has_weights_of_its_own)
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def _end_after(watched: int, pids: list[int]) -> None:
    select.select([watched], [], [])
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _loads_all_parameters(model: "torch.nn.Module", path: str) -> Iterator[None]:
    """Raises:
    RuntimeError: if the model's `load_weights` was called inside and left parameters as they were.
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
        del model.load_weights  # the class's own shows again
    lacking = sorted(wanted - loaded) if loaded is not None else []
    if lacking:
        raise RuntimeError(f"{path} lacks weights of the model, {len(lacking)} in all: {', '.join(lacking[:8])}")


def _has_weights_of_its_own(record: logging.LogRecord) -> bool:
    """Leaves out vLLM's warning that a tied head, or a rotary embedding, has no weights in the checkpoint."""
    return not record.getMessage().startswith(("ParallelLMHead: Failed to load", "RotaryEmbedding: Failed to load"))


def gpu_id(device: "torch.device") -> str | None:
    """The GPU's own name, the same in every process on every machine; None for a CPU."""
    if device.type != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
