"""An engine in this process that receives weights from a sender's memory, without a server in between."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import VllmConfig
from classroom_rl.config.train_rl import TeacherModelConfig
from classroom_rl.engines.vllm.engine import VllmEngine
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.weight_transfer import TensorInfo, TransferGroup
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.server.schemas import LoadWeightsResponse, ReceiveWeightsRequest
from tests.conftest import GPU_SHARE

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 8  # longer than a block of vLLM's prefix cache


class ReceivingEngine:
    """The engine, its event loop in a thread, and what a sender uses of a server's client."""

    url = "http://127.0.0.1:1"

    def __init__(self, model: Path, timeout_s: float):
        self._loop, self.timeout_s = asyncio.new_event_loop(), timeout_s
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        options = {"dtype": "float32", "enforce_eager": True, "max_length": 256, "cpu_cores": "0"}
        config = TeacherModelConfig(
            model_name_or_path=str(model), vllm=VllmConfig(**options, gpu_memory_utilization=GPU_SHARE)
        )
        self.engine = self.run(VllmEngine.start(config, 0, GenerationConfig(colocate=False)))

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.begin(coroutine).result()

    def health(self) -> SimpleNamespace:
        return SimpleNamespace(roles={"teacher": self.engine.health()})

    def receive_weights(self, body: ReceiveWeightsRequest) -> LoadWeightsResponse:
        body = ReceiveWeightsRequest.model_validate_json(body.model_dump_json())
        self.run(self.receive(body.group, body.tensors, PolicyVersion(body.run_id, body.version)))
        return LoadWeightsResponse(policy=self.engine.policy, seconds=0.0, weights=self.engine.weights)

    def receive(
        self, group: TransferGroup, tensors: Sequence[TensorInfo], policy: PolicyVersion
    ) -> Coroutine[Any, Any, None]:
        return self.engine.receive_policy(group, tensors, policy, self.timeout_s)

    def generate(self, tokens: int = 24) -> Coroutine[Any, Any, Completion]:
        return self.engine.generate(PROMPT, Sampling(1.0, max_tokens=tokens))

    def sample(self, tokens: int = 24) -> Completion:
        return self.run(self.generate(tokens))

    def stop(self) -> None:
        if "_engine" in vars(self.engine):
            self.engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)


@contextmanager
def receiving_engine(model: Path, timeout_s: float = 60.0) -> Iterator[ReceivingEngine]:
    running = ReceivingEngine(model, timeout_s)
    try:
        yield running
    finally:
        running.stop()
