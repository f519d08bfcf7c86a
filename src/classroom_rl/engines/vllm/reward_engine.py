"""A reward model on vLLM, which gives a conversation one number as its score."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Self
from uuid import uuid4

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import ModelConfig
from classroom_rl.engines.vllm.engine import load_engine
from classroom_rl.engines.vllm.engine_base import EngineProcess
from classroom_rl.errors import ConfigError, ContextOverflow
from classroom_rl.rollout.chat_template import Message, encode_dialogue

if TYPE_CHECKING:
    import torch

_TASKS = ("classify", "token_classify")
"""vLLM's pooling tasks that return scores: one score for the whole text, or one after each token (as for
Qwen2.5-Math-RM-72B), of which the last one is used."""


class RewardEngine(EngineProcess):
    """A model with a classification head of one logit. Build it with `await RewardEngine.start(…)`."""

    _load = staticmethod(partial(load_engine, runner="pooling"))

    @classmethod
    async def start(cls, model: ModelConfig, seed: int, generation: GenerationConfig) -> Self:
        """Load a reward model, as `EngineProcess.start` does. Raises a `ConfigError` if the model does not output
        exactly one number."""
        engine = await super().start(model, seed, generation)
        try:
            await engine._find_task()
        except BaseException:
            engine.shutdown()
            raise
        return engine

    async def score(self, messages: Sequence[Message]) -> float:
        """The model's score of the last message, given the messages before it: the raw logit, without a sigmoid, so
        unbounded. Raises as `VllmEngine.generate` does."""
        ids = encode_dialogue(self.tokenizer, messages)
        limit = self._model.vllm.max_length
        if len(ids) > limit:
            raise ContextOverflow(
                f"A conversation of {len(ids)} tokens, which ends with {messages[-1]['content'][-60:]!r}, does not fit "
                f"into the context of the reward model {self.model_name}: its vllm.max_length is {limit}. Raise it, or "
                "have shorter ones."
            )
        return float((await self._head_outputs(ids))[-1])

    async def _head_outputs(self, ids: Sequence[int]) -> "torch.Tensor":
        """All outputs of the classification head for these tokens, flattened."""
        from vllm import PoolingParams

        params = PoolingParams(task=self._task, use_activation=False)
        async with self.gate.turn():
            request = self._engine.encode({"prompt_token_ids": list(ids)}, params, uuid4().hex)
            return (await self._finish(request)).outputs.data.flatten()

    async def _find_task(self) -> None:
        """Choose the pooling task, and check with a short text that the model outputs one number."""
        tasks = [task for task in _TASKS if task in await self._engine.get_supported_tasks()]
        if not tasks:
            raise ConfigError(
                f"{self.model_name} is no reward model: it has no classification head (architectures in its "
                "config.json). Name a model that was trained to score, with one logit."
            )
        self._task = tasks[0]
        probe = encode_dialogue(self.tokenizer, [{"role": "user", "content": "a"}])
        count = len(await self._head_outputs(probe)) / (len(probe) if self._task == "token_classify" else 1)
        if count != 1:
            raise ConfigError(
                f"{self.model_name} gives {count:g} numbers where a reward model gives one: num_labels in its "
                "config.json must be 1."
            )
