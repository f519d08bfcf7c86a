"""Code that runs inside each vLLM worker process, with access to the model."""

import logging
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from classroom_rl.models.weight_transfer import TRANSFER_ENGINE
from classroom_rl.system.distributed import gpu_id

if TYPE_CHECKING:
    import torch

WeightTransferEngineFactory.register_engine(
    TRANSFER_ENGINE, "classroom_rl.engines.vllm.transfer_engine", "PolicyTransfer"
)


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
        """Load the safetensors in `path` into the running model, in place. Raises a `RuntimeError` if `path` has no
        weights for some parameters. vLLM would only log a warning and keep their old weights."""
        with _loads_all_parameters(self.model_runner.get_model(), path):
            self.reload_weights(weights_path=path)

    def receive_policy(self, group: str, init_info: dict[str, Any], update_info: dict[str, Any]) -> str:
        """Receive weights from the trainer's memory into the running model, in place.

        Args:
            group: the id of the group to receive them in. If this worker is not in it, it joins it first.
            init_info, update_info: how to join it, and which tensors come, as vLLM's transfer of weights has them.

        Returns:
            The fingerprint of the weights.

        Raises:
            RuntimeError: if they arrived damaged, or are not all weights of the model.
        """
        if group != getattr(self, "_policy_group", None):
            self.init_weight_transfer_engine(init_info)
            self._policy_group = group
        with _loads_all_parameters(self.model_runner.get_model(), "what the trainer sent"):
            self.start_weight_update()
            self.update_weights(update_info)
            self.finish_weight_update()
        return self.weight_transfer_engine.fingerprint


def _kill_after_exit_of(pidfd: int, pids: list[int]) -> None:
    select.select([pidfd], [], [])  # a pidfd becomes readable when its process ends
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _loads_all_parameters(model: "torch.nn.Module", path: str) -> Iterator[None]:
    """Check that the model's `load_weights`, if it is called inside the `with` block, loads all parameters. Afterwards
    the output head is packed again: on CPUs, vLLM keeps a packed copy of it, and if the head is tied to the embeddings,
    loading does not update this copy. Raises a `RuntimeError` if it did not load some of them."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import layerwise

    load_weights, expected, loaded = model.load_weights, {name for name, _ in model.named_parameters()}, None

    def load_and_record(weights: Any) -> Any:
        nonlocal loaded
        loaded = load_weights(weights)
        return loaded

    model.load_weights = load_and_record
    layerwise.logger.addFilter(_is_relevant)
    try:
        yield
    finally:
        layerwise.logger.removeFilter(_is_relevant)
        del model.load_weights  # removes the instance attribute, so the class's method is used again
    missing = sorted(expected - loaded) if loaded is not None else []
    if missing:
        raise RuntimeError(f"{path} lacks weights of the model, {len(missing)} in all: {', '.join(missing[:8])}")
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _is_relevant(record: logging.LogRecord) -> bool:
    """A logging filter that drops vLLM's warnings that a tied head or a rotary embedding has no weights to load."""
    return not record.getMessage().startswith(("ParallelLMHead: Failed to load", "RotaryEmbedding: Failed to load"))
