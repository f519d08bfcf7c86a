"""Labels of single replies: those of a judge model that is asked closed questions, and those of move classifiers and
rules.

A call without a readable answer gives no verdict, never a default answer; such calls are counted by cause.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.values import RULES as RULES_JUDGE
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.engines.api.chat_api import ChatApi, ChatRequest
from classroom_rl.engines.api.responses import Answer
from classroom_rl.errors import ConfigError, ContentRefused, JudgeOutputError, RequestRefused, RequestTooLong
from classroom_rl.evaluation.progress import EvaluationProgress, gather_or_stop
from classroom_rl.judges.json_answer import find_object, quote
from classroom_rl.judges.model_judge import KeptReplies, first_usable, wanted_schema
from classroom_rl.judges.moves.cross_validation import agreement
from classroom_rl.judges.moves.rules import RULES
from classroom_rl.judges.moves.stored import TrainedReaders
from classroom_rl.judges.readings import Exchange
from classroom_rl.rollout.engine import Sampling
from classroom_rl.server.open_models import open_readers

Choices = Mapping[str, Sequence[str]]
"""Question → the answers that may be given."""

UNREADABLE, CONTENT, TOO_LONG, REFUSED = "unreadable", "content refused", "too long", "refused"
"""The causes of a call without a verdict."""

_REASONING = "reasoning"


@dataclass
class JudgeAnswers:
    """A judge's answers.

    Attributes:
        by_prompt: for each prompt the answer to every question; None without a verdict.
        failures: cause → the number of calls without a verdict.
        paid: tokens and dollars of all calls in this folder, including those of earlier runs.
    """

    by_prompt: list[dict[str, str] | None]
    failures: Counter[str]
    paid: dict[str, float]

    def about(self) -> dict[str, Any]:
        """The entries of metrics.json about the calls."""
        answered = sum(answer is not None for answer in self.by_prompt)
        return {
            "asked": len(self.by_prompt),
            "answered": answered,
            "failures": dict(self.failures.most_common()),
            "paid": self.paid,
        }


async def ask_judge(
    judge: JudgeModelConfig, prompts: Sequence[str], choices: Choices | Sequence[Choices], max_tokens: int, folder: Path
) -> JudgeAnswers:
    """Ask a judge behind an API all questions about each reply, with one call per prompt. The questions are the same
    for all prompts, or a list with those of each prompt.

    Answers are kept in the judge's ledger in `folder`, so the same question is not paid for twice, even after a
    restart. A call without a verdict is repeated after a restart.

    Raises:
        ProviderFailure: if the judge cannot be asked at all, or its spending cap is reached.
        StorageError: if the ledger cannot be used.
    """
    name = judge.model_name_or_path
    ledger = CallLedger(folder / ledger_name(name), judge.max_cost_usd)
    of_prompts = [choices] * len(prompts) if isinstance(choices, Mapping) else choices
    sampling = Sampling(judge.vllm.temperature, judge.vllm.top_p, max_tokens=max_tokens)
    failures: Counter[str] = Counter()
    try:
        api = ChatApi(judge, ledger, "judge")
        replies = KeptReplies(judge, ledger, api)

        async def ask(prompt: str, choices: Choices) -> dict[str, str] | None:
            schema = wanted_schema(judge, choice_schema(choices))

            async def reply(number: int) -> tuple[Answer, bool]:
                # The number makes repeated calls for the same prompt different requests in the ledger.
                request = ChatRequest([{"role": "user", "content": prompt}], sampling, schema, ("label", number))
                return await replies.get(request, lambda text: can_be_read(text, choices))

            try:
                text = await first_usable(reply, lambda text: can_be_read(text, choices), judge.replies_per_attempt)
                return read_choices(text, choices)
            except (JudgeOutputError, RequestRefused) as error:
                failures[cause_of(error)] += 1
                return None
            finally:
                progress.add(1)

        try:
            with EvaluationProgress(len(prompts), f"asking {name}", "replies") as progress:
                answers = await gather_or_stop(ask(*pair) for pair in zip(prompts, of_prompts, strict=True))
        finally:
            await api.drain()
        return JudgeAnswers(answers, failures, asdict(ledger.spending()))
    finally:
        ledger.close()


def cause_of(error: JudgeOutputError | RequestRefused) -> str:
    """The cause under which a failed call is counted."""
    # RequestRefused is the base class of the two before it, so it has to come after them.
    kinds = {ContentRefused: CONTENT, RequestTooLong: TOO_LONG, RequestRefused: REFUSED, JudgeOutputError: UNREADABLE}
    return next(cause for kind, cause in kinds.items() if isinstance(error, kind))


def ledger_name(model: str) -> str:
    """The file name of a judge's ledger. It depends on the judge's name alone, not on its position in a list."""
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", model).strip("-.")[:80]
    return f"{slug}-{hashlib.sha256(model.encode()).hexdigest()[:8]}_calls.sqlite"


def choice_schema(choices: Choices) -> dict[str, Any]:
    """The JSON schema of an answer: a short reasoning first, then every question with its allowed answers."""
    questions = {key: {"type": "string", "enum": list(answers)} for key, answers in choices.items()}
    properties = {_REASONING: {"type": "string"}, **questions}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def read_choices(text: str, choices: Choices) -> dict[str, str]:
    """The answer to every question. Raises `JudgeOutputError` if a question has no answer, or one that is not
    allowed."""
    answer = find_object(text)
    answers = {}
    for key, allowed in choices.items():
        value = answer.get(key)
        choice = value.strip().lower() if isinstance(value, str) else None
        if choice not in allowed:
            description = "missing" if value is None else quote(value, 60)
            raise JudgeOutputError(f"The judge's {key} is {description}, none of {'; '.join(allowed)}: {quote(text)}")
        answers[key] = choice
    return answers


def can_be_read(text: str, choices: Choices) -> bool:
    """Whether a reply answers every question."""
    try:
        read_choices(text, choices)
    except JudgeOutputError:
        return False
    return True


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

    def source_of(self, label: str) -> str | None:
        """Who reads a label: `rules`, or the data set whose labels trained its move classifier; None if nobody does."""
        if self._readers is not None and label in self._readers.trust:
            return self._readers.trust[label].data
        return RULES_JUDGE if label in RULES else None

    def reads(self, label: str, about: Exchange) -> bool:
        """Whether the label holds for the message."""
        if self._readers is not None and label in self._readers.trust:
            return self._readers.reads(label, about)
        return RULES[label](about)


def agreement_as_json(
    labels: Sequence[bool], predicted: Sequence[bool], dialogues: Sequence[str]
) -> dict[str, Any] | None:
    """A yes-or-no agreement for metrics.json; None without replies."""
    return asdict(agreement(labels, predicted, dialogues)) if len(labels) else None
