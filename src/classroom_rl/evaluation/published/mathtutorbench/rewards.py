"""Win rates of MathTutorBench: a reward model scores a tutor's turn and the human teacher's, given the dialogue before.

The model is a classifier with one logit that reads the conversation in its own chat template, without a generation
prompt. It is loaded here with transformers, one conversation at a time as in the benchmark's program, or asked on a
vLLM server (`vllm serve MODEL --runner pooling`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.models import ApiModelConfig
from classroom_rl.engines.api.chat_api import connect
from classroom_rl.errors import ClassroomError, ConfigError, ProviderFailure
from classroom_rl.evaluation.progress import EvaluationProgress, gather_or_stop
from classroom_rl.evaluation.published.mathtutorbench.clone import Question, reward_instruction
from classroom_rl.models.pretrained import check_model, load_tokenizer
from classroom_rl.rollout.chat_template import Message, encode_dialogue
from classroom_rl.rollout.intervals import by_lesson, mean_with_ci

_TEACHERS = ("Teacher", "Tutor")
_AT_ONCE = 32
_RETRIES, _TIMEOUT_S = 5, 600.0
Turns = Sequence[tuple[Question, str]]
"""Questions of a teaching task, each with the turn that the tutor wrote."""


def why_not_scored(config: EvalConfig) -> str | None:
    """Why turns cannot be scored, as far as it is known before any is written; None if they can."""
    if not config.score_using_pedagogical_reward:
        return "score_using_pedagogical_reward is false"
    try:
        reward_instruction(Path(config.benchmark.path))
        if config.benchmark.reward_url is None:
            check_model("pedagogical_reward_model", config.pedagogical_reward_model)
    except ClassroomError as error:
        return str(error)
    return None


async def win_rates(config: EvalConfig, turns: Mapping[str, Turns]) -> dict[str, dict[str, Any]]:
    """For each task its `win_rate`, the share of turns that score higher than the human's with an interval over
    dialogues, and the mean `score`, `baseline_score` of the human's turns, and `mean_margin` between them.

    Raises:
        ConfigError: if the model cannot be loaded, or has not one logit.
        ProviderFailure: if the server at `benchmark.reward_url` does not answer with scores.
    """
    instruction = reward_instruction(Path(config.benchmark.path))
    dialogues = [
        scored_dialogue(question, reply, instruction)
        for group in turns.values()
        for question, turn in group
        for reply in (turn, question.variables["ground_truth_response"]["text"])
    ]
    with EvaluationProgress(len(dialogues), "reward model", "turns") as progress:
        if config.benchmark.reward_url is None:
            scores = iter(await asyncio.to_thread(_local_scores, config, dialogues, progress))
        else:
            scores = iter(await _served_scores(config, dialogues, progress))
    pairs = {task: [(next(scores), next(scores)) for _ in group] for task, group in turns.items()}
    return {task: _rate(turns[task], pairs[task]) for task in turns}


def scored_dialogue(question: Question, reply: str, instruction: str) -> list[Message]:
    """The conversation that the reward model reads, in the benchmark's format."""
    variables = question.variables
    text = f"Problem: {variables['question']}\nReference Solution: {variables['reference_solution']}"
    turns = [
        {"role": "assistant" if turn["user"] in _TEACHERS else "user", "content": turn["text"]}
        for turn in variables["conversation_json"]
    ]
    opening = [{"role": "system", "content": instruction}, {"role": "user", "content": text}]
    return [*opening, *turns, {"role": "assistant", "content": reply}]


def _rate(turns: Turns, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    problems = [question.problem_id for question, _ in turns]
    wins = by_lesson(problems, [tutor_score > human_score for tutor_score, human_score in pairs])
    means = {
        "score": [tutor_score for tutor_score, _ in pairs],
        "baseline_score": [human_score for _, human_score in pairs],
    }
    means["mean_margin"] = [tutor_score - human_score for tutor_score, human_score in pairs]
    return {"win_rate": mean_with_ci(wins)} | {name: fmean(values) for name, values in means.items()}


def _local_scores(config: EvalConfig, dialogues: Sequence[list[Message]], progress: EvaluationProgress) -> list[float]:
    import torch
    from transformers import AutoModelForSequenceClassification

    name = config.pedagogical_reward_model
    tokenizer = load_tokenizer("pedagogical_reward_model", name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            name, dtype=config.pedagogical_reward_vllm.dtype, trust_remote_code=False, use_safetensors=True
        )
        model = model.to(device).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"pedagogical_reward_model: {name} cannot be loaded on {device}: {error}") from error
    if model.config.num_labels != 1:
        raise ConfigError(
            f"pedagogical_reward_model: {name} gives {model.config.num_labels} numbers where a reward model gives one."
        )
    scores = []
    try:
        with torch.inference_mode():
            for dialogue in dialogues:
                ids = torch.tensor([encode_dialogue(tokenizer, dialogue)], device=device)
                scores.append(model(input_ids=ids).logits[0, 0].item())
                progress.add(1)
    except RuntimeError as error:  # such as a GPU whose memory is full
        raise ConfigError(f"pedagogical_reward_model: {name} cannot score on {device}: {error}") from error
    return scores


async def _served_scores(
    config: EvalConfig, dialogues: Sequence[list[Message]], progress: EvaluationProgress
) -> list[float]:
    from openai import OpenAIError

    url = config.benchmark.reward_url
    slots = asyncio.Semaphore(_AT_ONCE)
    payload = {"model": config.pedagogical_reward_model, "task": "classify", "use_activation": False}  # the raw logit

    async def score(dialogue: list[Message]) -> float:
        async with slots:
            try:
                reply = await client.post("/pooling", cast_to=object, body=payload | {"messages": dialogue})
                value = reply["data"][0]["data"]
                (number,) = value[-1] if isinstance(value[-1], list) else value
                progress.add(1)
                return float(number)
            except (OpenAIError, TypeError, LookupError, ValueError) as error:
                raise ProviderFailure(
                    f"The reward model at {url}/pooling gave no score: {error}. benchmark.reward_url must be a vLLM "
                    f"server of {config.pedagogical_reward_model}: vllm serve MODEL --runner pooling"
                ) from error

    model = ApiModelConfig(model_name_or_path=config.pedagogical_reward_model, base_url=url)
    async with connect(model) as connected:
        client = connected.with_options(max_retries=_RETRIES, timeout=_TIMEOUT_S)
        return await gather_or_stop(map(score, dialogues))
