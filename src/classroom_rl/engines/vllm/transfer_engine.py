"""vLLM's end of the way from the trainer's memory into the engine's. Each of an engine's workers has one."""

from collections import deque
from datetime import timedelta

import torch
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from classroom_rl.engines.vllm.weight_stream import GlooGroup, Receiver
from classroom_rl.models.weight_transfer import TensorInfo

_LONGEST_WAIT_S = 3600.0  # the server's deadlines are shorter; they end the engine


class PolicyTransfer(NCCLWeightTransferEngine):
    """vLLM's engine for NCCL, which here also works between CPUs, by gloo, and has a fingerprint of what it received.

    The model's `load_weights` is called once for all weights, as when they come from files, and vLLM reloads layer by
    layer: a layer's new weights are copied in place when the last of them is there.

    Attributes:
        fingerprint: that of the weights that it received last.
    """

    fingerprint = ""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the group, and leave the one before. Returns when all have joined."""
        self.shutdown()
        if self.device.type != "cpu":
            super().init_transfer_engine(init_info)
            return
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = torch.distributed.TCPStore(
            init_info.master_address,
            init_info.master_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_LONGEST_WAIT_S),
        )
        self.model_update_group = GlooGroup(store, rank, init_info.world_size, _LONGEST_WAIT_S)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive one version of the weights, and load it. Raises a `RuntimeError` if what arrived is not what the
        trainer sent."""
        descriptions = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        tensors = [TensorInfo(*description) for description in descriptions]
        receiver = Receiver(tensors, self.packed_buffer_size_bytes, self.model_update_group, self.device)
        weights = iter(receiver)
        self.model.load_weights(weights)
        deque(weights, maxlen=0)  # what the model has no use for is received, too
        self.fingerprint = receiver.check()
