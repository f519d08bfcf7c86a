"""Servers without a model that receive weights over gloo, as an engine's worker on a CPU does."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

import classroom_rl.server.app
from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.engines.vllm.weight_stream import GlooGroup, Receiver
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import EngineFailure, PolicyMismatch
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.weight_transfer import TensorInfo, TransferGroup
from classroom_rl.rollout.engine import EngineHealth
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.server.client import ClassroomClient
from classroom_rl.server.schemas import LoadWeightsResponse, ReceiveWeightsRequest
from tests.conftest import free_port
from tests.support.scripted_batches import ScriptedBatches
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import Room, serving


class ScriptedWorker:
    """What receives weights in an engine: one worker, and no model.

    Attributes:
        received: the tensors of the last version.
        dies_after: the tensors after which it dies, once; None: it does not.
        groups: the ids of the groups that it joined; "" after each restart.
    """

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self.dies_after: int | None = None
        self.groups: list[str] = [""]
        self._group: GlooGroup | None = None

    def receive(self, info: TransferGroup, tensors: Sequence[TensorInfo]) -> str:
        """Receive weights, and return their fingerprint."""
        if info.id != self.groups[-1]:
            where = (info.master_address, info.master_port)
            limits = {"wait_for_workers": False, "timeout": timedelta(seconds=60)}
            store = torch.distributed.TCPStore(*where, is_master=False, **limits)
            self._group = GlooGroup(store, info.rank_offset, info.world_size, 60)
            self.groups.append(info.id)
        receiver = Receiver(tensors, info.packed_buffer_size_bytes, self._group, torch.device("cpu"))
        received = {}
        for name, tensor in receiver:
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

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer, lambda _: "Say hello.")
        self.worker = ScriptedWorker()

    async def receive_policy(
        self, group: TransferGroup, tensors: Sequence[TensorInfo], policy: PolicyVersion, timeout_s: float
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                self.weights = await asyncio.to_thread(self.worker.receive, group, tensors)
        except (RuntimeError, TimeoutError) as error:
            self.restart()
            raise EngineFailure(f"the scripted engine failed: {error or 'too late'}") from error
        self.policy = policy

    def restart(self) -> None:
        self.worker.restart()
        self.policy, self.weights = PolicyVersion(), "scripted"

    def health(self) -> EngineHealth:
        return super().health().model_copy(update=self.worker.health())


class ReceivingBatches(ScriptedBatches):
    """A server without engines for whole trainings. It restarts once, when it is asked for the batch of a step.

    Args:
        restarts_at: that step; None: it does not restart.

    Attributes:
        versions: the number and the tensors of each version that was received.
    """

    def __init__(
        self, run_folder: str, play: Callable[[int, int, Problem], ConversationRecord], restarts_at: int | None = None
    ):
        super().__init__(run_folder, play)
        self.worker, self._restarts_at = ScriptedWorker(), restarts_at
        self.versions: list[tuple[int, dict[str, torch.Tensor]]] = []

    def answer(self, path: str, body: dict) -> BaseModel:
        if path == "/health":
            engine = EngineHealth(model="scripted", engine="scripted", engine_version="", pids=[])
            return self._health.model_copy(
                update={"roles": {"teacher": engine.model_copy(update=self.worker.health())}}
            )
        if path != "/weights/receive":
            return super().answer(path, body)
        request = ReceiveWeightsRequest.model_validate(body)
        try:
            fingerprint = self.worker.receive(request.group, request.tensors)
        except RuntimeError as error:
            self.worker.restart()
            raise EngineFailure(str(error)) from error
        self.versions.append((request.version, self.worker.received))
        policy = PolicyVersion(request.run_id, request.version)
        return LoadWeightsResponse(policy=policy, seconds=0.0, weights=fingerprint)

    def _sample(self, request: SampleRequest) -> SampleResponse:
        if request.step == self._restarts_at:
            self._restarts_at = None
            self.worker.restart()
        if not self.worker.groups[-1]:
            raise PolicyMismatch(f"it has initial weights, and not {request.wanted_policy}")
        return super()._sample(request)


@contextmanager
def receiving_servers(
    count: int, tokenizer: PreTrainedTokenizerBase, folder: Path, generation: GenerationConfig, timeout_s: float
) -> Iterator[tuple[list[ReceivingTeacher], list[ClassroomClient]]]:
    """The server's real application on ports of this machine. An engine that fails is back at once."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        rooms = {free_port(): Room(tokenizer, folder / f"server{number}") for number in range(count)}

        async def open_service(config: TrainRLConfig, *_: object) -> object:
            return rooms[config.generation.server_port].open(generation)

        patch.setattr(classroom_rl.server.app, "open_service", open_service)
        patch.setattr(classroom_rl.server.app, "_stop", lambda *_: None)
        for port, room in rooms.items():
            room.teacher = ReceivingTeacher(tokenizer)
            config = load(TrainRLConfig, "train_rl", [f"logging.save_dir={room.folder}"])
            config.generation = replace(generation, server_port=port, load_weights_timeout_s=timeout_s)
            stack.enter_context(serving(classroom_rl.server.app.create_app(config, room.folder), port))
        clients = [ClassroomClient(f"http://127.0.0.1:{port}", load_timeout_s=timeout_s) for port in rooms]
        yield [room.teacher for room in rooms.values()], clients
