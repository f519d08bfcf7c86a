"""A tutor's messages, each scored by a pedagogical reward model, given what came before it.

The model is Macina et al.'s, "MathTutorBench" (EMNLP 2025), or another with one logit.
"""

import asyncio
from collections.abc import Sequence

from config.base import ModelConfig
from config.eval_model import EvalConfig
from src.classroom.conversation import END_OF_CONVERSATION, visible_text
from src.classroom.record import ConversationRecord
from src.errors import ConfigError
from src.evaluation.progress import EvaluationProgress
from src.models.pretrained import check_model, load_tokenizer
from src.rollout.chat_template import Message
from src.rollout.prompts import render

_KEY = "pedagogical_reward_model"


def check_scorer(config: EvalConfig) -> None:
    """Look at the reward model and its prompt before hours are spent on conversations for it.

    Raises:
        ConfigError: if the model cannot be loaded, or reads fewer tokens than it is to.
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
    """One score for each teacher message of each conversation, in their order: the model's logit, unbounded. The model
    is loaded for this and ended afterwards.

    Raises:
        EngineFailure: if the model cannot be loaded, or dies.
        DataError: if a conversation is too long for it.
    """
    from src.vllm.reward_engine import RewardEngine

    model = ModelConfig(config.pedagogical_reward_model, config.pedagogical_reward_vllm)
    instruction = render(config.pedagogical_reward_prompt_path)
    dialogues = [scored_dialogues(record, instruction) for record in records]
    progress = EvaluationProgress(sum(map(len, dialogues)), "pedagogical reward", "messages")
    engine = await RewardEngine.start(model, config.seed, config.generation)
    places = asyncio.Semaphore(model.vllm.max_num_seqs)

    async def score(dialogue: list[Message]) -> float:
        async with places:
            found = await engine.score(dialogue)
        progress.add(1)
        return found

    try:
        return [await asyncio.gather(*map(score, each)) for each in dialogues]
    finally:
        progress.close()
        engine.shutdown()


def scored_dialogues(record: ConversationRecord, instruction: str) -> list[list[Message]]:
    """For each message that the teacher wrote itself the dialogue that ends with it, as the reward model is shown it:
    the instruction, the problem (the reference solution is left empty: tutors have none), the student as user, the
    teacher as assistant. Thoughts and the mark of the end are left out."""
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
