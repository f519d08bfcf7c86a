"""MRBench: judges label tutors' replies on eight dimensions, and are compared with the people who labelled them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from classroom_rl.config.base import GenerationConfig, JudgeModelConfig
from classroom_rl.config.benchmark import JUDGE, BenchmarkConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.values import EMBEDDED_JUDGES
from classroom_rl.errors import ConfigError
from classroom_rl.evaluation.published.asking import ask_judge
from classroom_rl.evaluation.published.checked_rows import draw
from classroom_rl.evaluation.published.label_agreement import (
    ReplyLabels,
    judge_agreement,
    kappa_differences,
    people_answers,
)
from classroom_rl.evaluation.published.mrbench import DIMENSIONS, READ_AS, LabelledReply, read_mrbench
from classroom_rl.judges.moves.rules import RULES
from classroom_rl.judges.moves.stored import TrainedReaders
from classroom_rl.judges.readings import Exchange
from classroom_rl.rollout.prompts import render
from classroom_rl.server.open_models import open_readers
from classroom_rl.system.storage import write_whole


class MessageLabels:
    """Assigns the labels of `classroom_rl.judges.readings` to messages: with trained move classifiers where there are
    some, else by rules.

    Args:
        generation: names the move classifiers, if any (`readers_path`).
        benchmark: the benchmark's file or name on the Hub.

    Raises:
        ConfigError: if the move classifiers were trained on this benchmark, so that their agreement would mean nothing.
        DataError: if the move classifiers are missing or damaged.
    """

    def __init__(self, generation: GenerationConfig, benchmark: str):
        self._readers = open_readers(generation)
        if isinstance(self._readers, TrainedReaders) and self._readers.was_trained_on(benchmark):
            raise ConfigError(
                f"The readers in generation.readers_path ({generation.readers_path}) were trained on {benchmark}: "
                "their agreement with people there measures memory. Train them on other dialogues, or leave "
                "generation.readers_path out."
            )

    def about(self, labels: Sequence[str]) -> dict[str, Any]:
        """Which labels come from move classifiers and which from rules, for metrics.json."""
        trained = [] if self._readers is None else [label for label in labels if label in self._readers.trust]
        version = None if self._readers is None else self._readers.version
        by_rules = [label for label in labels if label not in trained]
        return {"readers": version, "by_readers": trained, "by_rules": by_rules}

    def reads(self, label: str, about: Exchange) -> bool:
        """Whether the label holds for the message."""
        if self._readers is not None and label in self._readers.trust:
            return self._readers.reads(label, about)
        return RULES[label](about)


CHOICES = {name: dimension.answers for name, dimension in DIMENSIONS.items()}
ANSWERS_NAME = "answers.jsonl"


async def compare_judges(config: EvalConfig, benchmark: BenchmarkConfig, folder: Path) -> dict[str, Any]:
    """Have each of `judges` label every reply once, and compare its labels with the human ones. All labels are written
    to `answers.jsonl`.

    Returns:
        The entries of metrics.json: the answers of `people`, `judges`, each with its agreement, failures and costs, and
        `differences`.

    Raises:
        DataError: if the benchmark cannot be read.
        ConfigError: if a key is missing, or the move classifiers were trained on this benchmark.
        ProviderFailure: if a judge cannot be asked at all.
    """
    everything = read_mrbench(benchmark.path, benchmark.split)
    replies = draw(everything, lambda reply: reply.history, benchmark.max_dialogues, config.seed)
    prompts = [judge_prompt(benchmark.prompts_paths[JUDGE], reply) for reply in replies]
    # Judges without a model come first: an error in the move classifiers shows before anything is paid.
    judges = sorted(config.judges, key=lambda judge: judge.model_name_or_path not in EMBEDDED_JUDGES)
    by_judge, about = {}, {}
    for judge in judges:
        name = judge.model_name_or_path
        by_judge[name], about[name] = await _label(judge, config, replies, prompts, folder)
        about[name] |= judge_agreement(replies, by_judge[name])
    configured = [judge.model_name_or_path for judge in config.judges]
    _write_answers(folder / ANSWERS_NAME, replies, {name: by_judge[name] for name in configured})
    return {
        "replies": len(replies),
        "dialogues": len({reply.history for reply in replies}),
        "people": people_answers(replies),
        "judges": {name: about[name] for name in configured},
        "differences": kappa_differences(replies, {name: by_judge[name] for name in configured}),
    }


async def _label(
    judge: JudgeModelConfig, config: EvalConfig, replies: list[LabelledReply], prompts: list[str], folder: Path
) -> tuple[ReplyLabels, dict[str, Any]]:
    """A judge's labels, and the entries of metrics.json about where they come from."""
    if judge.model_name_or_path in EMBEDDED_JUDGES:
        reader = MessageLabels(config.generation, config.benchmark.path)
        labels = [{name: reader.reads(label, reply.exchange) for name, label in READ_AS.items()} for reply in replies]
        return labels, {"read_by": reader.about([*READ_AS.values()])}
    max_tokens = config.generation.max_tokens_per_judge_attempt
    answers = await ask_judge(judge, prompts, CHOICES, max_tokens, folder / "judges")
    return answers.found, answers.about()


def judge_prompt(path: str, reply: LabelledReply) -> str:
    """The prompt that asks a judge model about a reply."""
    return render(path, history=reply.history, solution=reply.solution, reply=reply.text)


def _write_answers(path: Path, replies: list[LabelledReply], by_judge: dict[str, ReplyLabels]) -> None:
    lines = [
        {
            "id": reply.id,
            "people": dict(reply.labels),
            "judges": {name: labels[index] for name, labels in by_judge.items()},
        }
        for index, reply in enumerate(replies)
    ]
    write_whole(path, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
