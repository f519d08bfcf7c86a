"""Servers without a model that receive weights from a trainer's memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

import classroom_rl.server.app
from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import EngineFailure, PolicyMismatch
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.engine import EngineHealth
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.server.client import ClassroomClient
from classroom_rl.server.schemas import LoadWeightsResponse, ReceiveWeightsRequest
from tests.support.receiving_teacher import ReceivingTeacher, ScriptedWorker
from tests.support.scripted_batches import ScriptedBatches
from tests.support.scripted_room import Room, serving


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
    ports: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    generation: GenerationConfig,
    timeout_s: float,
) -> Iterator[tuple[list[ReceivingTeacher], list[ClassroomClient]]]:
    """The server's real application on ports of this machine. An engine that fails is back at once."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        rooms = {port: Room(tokenizer, folder / f"server{number}") for number, port in enumerate(ports)}

        async def open_service(config: TrainRLConfig, *_: object) -> object:
            return rooms[config.generation.server_port].open(generation)

        patch.setattr(classroom_rl.server.app, "open_service", open_service)
        patch.setattr(classroom_rl.server.app, "_stop", lambda *_: None)
        for port, room in rooms.items():
            room.teacher = ReceivingTeacher(tokenizer, lambda _: "Say hello.")
            config = load(TrainRLConfig, "train_rl", [f"logging.save_dir={room.folder}", "train.publish_through=nccl"])
            config.generation = replace(generation, server_port=port, load_weights_timeout_s=timeout_s)
            stack.enter_context(serving(classroom_rl.server.app.create_app(config, room.folder), port))
        clients = [ClassroomClient(f"http://127.0.0.1:{port}", load_timeout_s=timeout_s) for port in rooms]
        yield [room.teacher for room in rooms.values()], clients
