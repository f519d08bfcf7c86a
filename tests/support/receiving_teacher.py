"""A scripted teacher that receives weights over gloo, as an engine's worker on a CPU does."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from classroom_rl.engines.vllm.weight_stream import GlooGroup, Receiver
from classroom_rl.errors import EngineFailure
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.weight_transfer import TensorInfo, TransferGroup
from classroom_rl.rollout.engine import EngineHealth
from tests.support.scripted_engine import Script, ScriptedEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ScriptedWorker:
    """What receives weights in an engine: one worker, and no model.

    Attributes:
        received: the tensors of the last version.
        at_tensor: called with the number of each tensor as it comes, from 0.
        dies_after: the tensors after which it dies, once; None: it does not.
        groups: the ids of the groups that it joined; "" after each restart.
    """

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self.at_tensor: Callable[[int], None] = lambda number: None
        self.dies_after: int | None = None
        self.groups: list[str] = [""]
        self._group: GlooGroup | None = None

    def receive(self, info: TransferGroup, tensors: Sequence[TensorInfo]) -> str:
        """Receive weights, and return their fingerprint."""
        if info.id != self.groups[-1]:
            address = (info.master_address, info.master_port)
            limits = {"wait_for_workers": False, "timeout": timedelta(seconds=5)}  # the sender listens already
            store = torch.distributed.TCPStore(*address, is_master=False, **limits)
            self._group = GlooGroup(store, info.rank_offset, info.world_size, 60)
            self.groups.append(info.id)
        receiver = Receiver(tensors, info.packed_buffer_size_bytes, self._group, torch.device("cpu"))
        received = {}
        for name, tensor in receiver:
            self.at_tensor(len(received))
            received[name] = tensor.clone()
            if len(received) == self.dies_after:
                self.dies_after = None
                raise RuntimeError("it died")
        fingerprint = receiver.check()
        self.received = received
        return fingerprint

    def restart(self) -> None:
        """Lose the group, as an engine that starts again does."""
        if self._group is not None:
            self._group.destroy()
        self._group = None
        self.groups.append("")

    def health(self) -> dict[str, Any]:
        """What the engine's health says of it."""
        return {"receivers": 1, "weight_group": self.groups[-1]}


class ReceivingTeacher(ScriptedEngine):
    """A teacher with such a worker, which loses its weights when it fails."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", script: Script):
        super().__init__(tokenizer, script)
        self.worker = ScriptedWorker()

    async def receive_policy(
        self, group: TransferGroup, tensors: Sequence[TensorInfo], policy: PolicyVersion, timeout_s: float
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                self.weights = await asyncio.to_thread(self.worker.receive, group, tensors)
        except (RuntimeError, TimeoutError) as error:
            self.restart()
            raise EngineFailure(f"the scripted engine failed: {str(error) or 'too late'}") from error
        self.policy = policy

    def restart(self) -> None:
        self.policy, self.weights = PolicyVersion(), "scripted"
        self.worker.restart()  # last: once it has left the group, the sender goes on

    def health(self) -> EngineHealth:
        return super().health().model_copy(update=self.worker.health())
