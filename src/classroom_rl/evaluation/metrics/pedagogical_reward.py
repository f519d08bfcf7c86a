"""Scores a tutor's messages with a pedagogical reward model, each one given the dialogue before it.

The model is that of Macina et al., "MathTutorBench" (EMNLP 2025), or another one with a single logit.
"""

import asyncio
from collections.abc import Sequence

from classroom_rl.config.base import ModelConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ConfigError
from classroom_rl.evaluation.progress import EvaluationProgress
from classroom_rl.models.pretrained import check_model, load_tokenizer
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.thoughts import visible_text

_KEY = "pedagogical_reward_model"


def check_scorer(config: EvalConfig) -> None:
    """Check the reward model and its prompt, before hours are spent on conversations.

    Raises:
        ConfigError: if the model cannot be loaded, or has fewer positions than `pedagogical_reward_vllm.max_length`.
        DataError: if the prompt cannot be rendered.
    """
    from transformers import AutoConfig

    name, length = config.pedagogical_reward_model, config.pedagogical_reward_vllm.max_length
    check_model(_KEY, name)
    load_tokenizer(_KEY, name)
    render(config.pedagogical_reward_prompt_path)
    positions = getattr(AutoConfig.from_pretrained(name, trust_remote_code=False), "max_position_embeddings", length)
    if length > positions:
        raise ConfigError(
            f"pedagogical_reward_vllm.max_length is {length}, but {name} reads {positions} tokens at most: lower it."
        )


async def score_messages(config: EvalConfig, records: Sequence[ConversationRecord]) -> list[list[float]]:
    """Score each teacher message of each conversation, in order; errors as in `score_dialogues`."""
    instruction = render(config.pedagogical_reward_prompt_path)
    dialogues = [scored_dialogues(record, instruction) for record in records]
    scores = iter(await score_dialogues(config, [dialogue for group in dialogues for dialogue in group]))
    return [[next(scores) for _ in group] for group in dialogues]


async def score_dialogues(config: EvalConfig, dialogues: Sequence[list[Message]]) -> list[float]:
    """Score the last message of each dialogue, given those before it. A score is the model's unbounded logit. The
    engine is started for this call and shut down afterwards.

    Raises:
        EngineFailure: if the model cannot be loaded, or its engine dies.
        DataError: if a dialogue is too long for the model.
    """
    from classroom_rl.engines.vllm.reward_engine import RewardEngine

    model = ModelConfig(config.pedagogical_reward_model, config.pedagogical_reward_vllm)
    progress = EvaluationProgress(len(dialogues), "pedagogical reward", "messages")
    engine = await RewardEngine.start(model, config.seed, config.generation)
    slots = asyncio.Semaphore(model.vllm.max_num_seqs)

    async def score(dialogue: list[Message]) -> float:
        async with slots:
            result = await engine.score(dialogue)
        progress.add(1)
        return result

    try:
        return await asyncio.gather(*map(score, dialogues))
    finally:
        progress.close()
        engine.shutdown()


def scored_dialogues(record: ConversationRecord, instruction: str) -> list[list[Message]]:
    """The dialogues that the reward model scores: one for each message that the teacher wrote itself, ending with that
    message.

    A dialogue holds the instruction, the problem (with an empty reference solution, because tutors get none), the
    student as user, and the teacher as assistant. Thoughts and the end-of-conversation mark are removed.
    """
    shown = [
        {"role": "system", "content": instruction},
        {"role": "user", "content": f"Problem: {record.problem}\nReference Solution: "},
    ]
    dialogues = []
    for turn in record.turns:
        text = visible_text(turn.text).replace(END_OF_CONVERSATION, "").strip()
        shown.append({"role": "assistant" if turn.role == "teacher" else "user", "content": text})
        if turn.role == "teacher" and not turn.given:
            dialogues.append(list(shown))
    return dialogues
