"""`vllm_server.py` with ways of earlier trainers switched on; `benchmarks.earlier_launch` starts it and lists the ways.

python -m benchmarks.earlier_server lockstep+no_cache --config-name quickstart [overrides]
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

import classroom_rl.engines.vllm.engine
import classroom_rl.server.app
import classroom_rl.server.open_models
import classroom_rl.server.sampling_service
from benchmarks.earlier_launch import LOCKSTEP, NO_CACHE, RESTART, RESTART_ALL, TEXT, take_ways
from benchmarks.schedules import Lockstep
from classroom_rl.config.base import EnvironmentConfig, GenerationConfig
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import program
from classroom_rl.config.models import ModelConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.teacher import system_message
from classroom_rl.errors import UnknownConversation
from classroom_rl.models.policy_folder import check_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.environment import POLICY_ROLE
from classroom_rl.rollout.requests import SampleResponse, StrictModel
from classroom_rl.rollout.runner import Runner
from classroom_rl.server.schemas import RewardResponse

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
Engines = Mapping[str, Any]
StartEngines = Callable[[dict[str, ModelConfig], EnvironmentConfig, int], Awaitable[Engines]]


# No prefix cache ------------------------------------------------------------------------------------------------------


def load_without_cache(model: ModelConfig, seed: int, sleep_mode: bool, runner: str) -> "AsyncLLM":
    """In place of `classroom_rl.engines.vllm.engine.load_engine`: the same engine, which keeps no prefixes."""
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = classroom_rl.engines.vllm.engine.engine_arguments(model, seed, sleep_mode, runner)
    arguments.enable_prefix_caching = False
    return AsyncLLM.from_engine_args(arguments)


# Engines that are started again for new weights -----------------------------------------------------------------------


class RestartedEngine:
    """An engine of which nothing stays when weights are published: it is ended, and one that loads the published folder
    is started. It must have no turns in flight then, as between the batches of a trainer.

    Args:
        engine: the running one; everything but the loading of weights is its.
        others: engines that are ended and started again with this one, on their own weights.
    """

    def __init__(
        self,
        engine: classroom_rl.engines.vllm.engine.VllmEngine,
        model: ModelConfig,
        seed: int,
        generation: EnvironmentConfig,
        others: Sequence["RestartedEngine"] = (),
    ):
        self._engine, self._model, self._seed, self._generation = engine, model, seed, generation
        self._others = others
        self._ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """As `VllmEngine.generate`. A class has to have this method to count as a model that can be trained."""
        return await self._engine.generate(prompt_ids, sampling)

    async def load_policy(self, folder: Path, policy: PolicyVersion, timeout_s: float) -> None:
        """End the engine, and start another with published weights; in place of `VllmEngine.load_policy`."""
        weights = check_policy(folder, policy)
        self._model = replace(self._model, model_name_or_path=str(folder))
        for engine in (self, *self._others):
            engine.end()
        for engine in (self, *self._others):
            await engine.start_again()
        self._engine.policy, self._engine.weights = policy, weights

    def end(self) -> None:
        """End the engine's processes."""
        self._ended = True
        self._engine.shutdown()

    async def start_again(self) -> None:
        """Start the engine anew."""
        started = time.monotonic()
        self._engine = await type(self._engine).start(self._model, self._seed, self._generation)
        self._ended = False
        name, pids = self._model.model_name_or_path, self._engine.health().pids
        logger.info("%s was loaded anew in %.1f s, by the processes %s", name, time.monotonic() - started, pids)

    def shutdown(self) -> None:
        """End the engine's processes, unless the server ends while the engine is being started again."""
        if not self._ended:
            self.end()

    def check_alive(self) -> None:
        """Raise an `EngineFailure` if the engine died by itself."""
        if not self._ended:
            self._engine.check_alive()


def restarting(start: StartEngines, everyone: bool) -> StartEngines:
    """`server.open_models._start_engines` with a teacher that is started again at each publish; if `everyone`, all
    engines are."""

    async def start_engines(wanted: dict[str, ModelConfig], generation: EnvironmentConfig, seed: int) -> Engines:
        running = await start(wanted, generation, seed)
        others = {
            role: RestartedEngine(running[role], wanted[role], seed, generation)
            for role in wanted
            if everyone and role != POLICY_ROLE
        }
        teacher = RestartedEngine(running[POLICY_ROLE], wanted[POLICY_ROLE], seed, generation, [*others.values()])
        return {**running, **others, POLICY_ROLE: teacher}

    return start_engines


# Rewards by text ------------------------------------------------------------------------------------------------------


class TextRewardRequest(StrictModel):
    """Body of `POST /by_text/get_{name}_reward`: whole conversations, as the teacher's tokenizer decodes them."""

    conversations: list[str]


class TextLookup:
    """Finds a conversation of a batch by its text: the one of which most characters, in whole messages, are found in
    it. The first one wins among equals.

    Args:
        conversations: the messages of each, the teacher's prompt first.

    Attributes:
        comparisons: how often a message was looked for in a text.
    """

    def __init__(self, conversations: Sequence[Sequence[str]]):
        self._conversations = conversations
        self.comparisons = 0

    def find(self, text: str) -> int:
        """The place of the conversation that the text is taken for.

        Raises:
            UnknownConversation: if no message of any is found in it.
        """
        best_overlap, best = 0, None
        for index, messages in enumerate(self._conversations):
            overlap = sum(len(message) for message in messages if message in text)
            self.comparisons += len(messages)
            if overlap > best_overlap:
                best_overlap, best = overlap, index
        if best is None:
            raise UnknownConversation("No conversation of the last batch has a message in this text.")
        return best


def messages_of(record: ConversationRecord, generation: GenerationConfig) -> list[str]:
    """A conversation's messages as the teacher saw them, its prompt first."""
    return [system_message(generation, record.problem, record.student_name), *(turn.text for turn in record.turns)]


class RememberingRunner(Runner):
    """A runner that remembers its last batch."""

    last: SampleResponse | None = None

    async def sample(self, *arguments: Any, **named: Any) -> SampleResponse:
        self.last = await super().sample(*arguments, **named)
        return self.last


def create_app_with_text_rewards(config: TrainRLConfig, run_folder: Path) -> FastAPI:
    """In place of `classroom_rl.server.app.create_app`: with a route that finds conversations by their text."""
    app = CREATE_APP(config, run_folder)

    @app.post("/by_text/get_{name}_reward")
    def get_reward(name: str, body: TextRewardRequest) -> RewardResponse:
        service = app.state.service
        batch = service.runner.last.conversations
        lookup = TextLookup([messages_of(record, config.generation) for record in batch])
        records = [batch[lookup.find(text)] for text in body.conversations]
        return RewardResponse(rewards=[service.environment.reward_of(name, record) for record in records])

    return app


CREATE_APP = classroom_rl.server.app.create_app


# The program ----------------------------------------------------------------------------------------------------------


def switch_on(ways: frozenset[str]) -> None:
    """Switch ways on in this process."""
    if LOCKSTEP in ways:
        classroom_rl.server.sampling_service.ConcurrentSchedule = Lockstep
    if NO_CACHE in ways:
        classroom_rl.engines.vllm.engine.load_engine = load_without_cache
    if ways & {RESTART, RESTART_ALL}:
        start = classroom_rl.server.open_models._start_engines
        classroom_rl.server.open_models._start_engines = restarting(start, RESTART_ALL in ways)
    if TEXT in ways:
        classroom_rl.server.sampling_service.Runner = RememberingRunner
        classroom_rl.server.app.create_app = create_app_with_text_rewards


@program(TrainRLConfig, "train_rl", check=check_train_rl)
def serve(config: TrainRLConfig) -> None:
    """Serve as `vllm_server.py` does."""
    classroom_rl.server.app.serve(config)


if __name__ == "__main__":
    switch_on(take_ways())
    serve()
