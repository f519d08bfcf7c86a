"""Supervisor models: behind an OpenAI-compatible API, or on an engine of this server.

Rules review each message first. The model reviews only the messages that the rules do not find invalid, so the others
cost nothing. A correction by the model must pass the same rules.

The model names the category of a fault and never gives a number. The penalty of each category is set in
`generation.supervisor.penalties`.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from classroom_rl.config.base import SupervisionConfig
from classroom_rl.config.models import SupervisorModelConfig
from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.engines.api.chat_api import ChatRequest
from classroom_rl.errors import ConfigError, JudgeOutputError
from classroom_rl.judges.json_answer import find_object, quote
from classroom_rl.judges.model_judge import EngineReplies, KeptReplies, wanted_schema
from classroom_rl.judges.verdicts import STOPS
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.reviews import MessageToReview, Review, no_verdict
from classroom_rl.rollout.text import has_surrogates, without_surrogates
from classroom_rl.supervision.embedded import Rules, review_by_rules
from classroom_rl.supervision.faults import special_token

NO_CATEGORY = "none"
"""The category of a valid message in a model's answer."""

_KEYS = {"critique": str, "category": str, "valid": bool, "correction": str}


def review_messages(path: str, request: MessageToReview) -> list[dict[str, str]]:
    """The chat messages that request a review from a model; raises as `render` does. The prompt template may use
    `conversation`, `message`, `problem` and `answer`; the `facts` are not shown to the model."""
    text = render(
        path, conversation=request.conversation, message=request.message, problem=request.problem, answer=request.answer
    )
    return [{"role": "user", "content": text}]


def review_schema(categories: Iterable[str]) -> dict[str, Any]:
    """The JSON schema of a model's answer, with the categories that have a penalty. The critique comes first, so that
    the model reasons before it decides."""
    properties = {
        "critique": {"type": "string"},
        "category": {"type": "string", "enum": [*categories, NO_CATEGORY]},
        "valid": {"type": "boolean"},
        "correction": {"type": "string", "description": "empty if there is none"},
    }
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def parse_review(text: str, categories: Iterable[str]) -> Review:
    """Parse the review in a model's answer, without checking its correction. A null or empty `correction` means none.

    Raises:
        JudgeOutputError: if the text does not contain exactly one JSON object, if one of its keys is missing or has the
            wrong type, if the category is unknown, or if `valid` contradicts the category.
    """
    answer = find_object(text)
    for key, kind in _KEYS.items():
        if key not in answer:
            raise JudgeOutputError(f"The supervisor's answer has no {key}: {quote(text)}")
        if not isinstance(answer[key], kind) and not (key == "correction" and answer[key] is None):
            raise JudgeOutputError(f"{key} is {quote(answer[key])}, not a {kind.__name__}: {quote(text)}")
    valid, category = answer["valid"], answer["category"]
    known_categories = list(categories)
    if category not in (*known_categories, NO_CATEGORY):
        names = ", ".join((*known_categories, NO_CATEGORY))
        raise JudgeOutputError(f"The category is {quote(category)}, not one of {names}: {quote(text)}")
    if valid != (category == NO_CATEGORY):
        contradiction = f"valid is {valid}, but the category is {category}"
        raise JudgeOutputError(f"The supervisor's answer contradicts itself, {contradiction}: {quote(text)}")
    correction = without_surrogates(answer["correction"] or "").strip()
    return Review(
        valid=valid,
        category="" if valid else category,
        critique=without_surrogates(answer["critique"]).strip(),
        correction=None if valid or not correction else correction,
        source="model",
        raw=without_surrogates(text),
    )


MOST_CHARACTERS = 1200
"""A longer correction is refused. A good message of a tutor has at most 80 words, or about 500 characters."""


def check_correction(correction: str, request: MessageToReview, rules: Rules = review_by_rules) -> str:
    """Why a correction of the message is refused; "" if it is accepted.

    The rules review the correction in place of the message, with the same facts. If no rules apply to the problem, only
    its form is checked.
    """
    if not correction.replace(END_OF_CONVERSATION, "").strip():
        return "it is empty"
    if len(correction) > MOST_CHARACTERS:
        return f"it has {len(correction)} characters; at most {MOST_CHARACTERS} are accepted"
    if " ".join(correction.split()) == " ".join(request.message.split()):
        return "it is the message itself"
    if token := special_token(correction):
        return f"it holds {token!r}, which belongs to no message"
    if has_surrogates(correction) or "\x00" in correction:
        return "it holds characters that cannot be stored"
    if END_OF_CONVERSATION in correction.strip().removesuffix(END_OF_CONVERSATION):
        return f"{END_OF_CONVERSATION} is not at its end"
    review = rules(replace(request, message=correction, cut=False))
    return f"{review.category}: {review.critique}" if review.valid is False else ""


def checked(review: Review, request: MessageToReview, rules: Rules = review_by_rules) -> Review:
    """The review with its correction checked. A refused correction (see `check_correction`) is removed, and the reason
    is stored in `refused_correction`. A review of a valid message, or without a verdict, keeps no correction."""
    if review.correction is None:
        return review
    if review.valid is not False:
        return replace(review, correction=None)
    reason = check_correction(review.correction, request, rules)
    return replace(review, correction=None, refused_correction=reason) if reason else review


class ModelSupervisor:
    """A supervisor model. Behind an API, equal messages in equal conversations get the same replies, also after a
    restart.

    Args:
        config: the model.
        supervision: the prompt template, the penalties and the limit on tokens.
        replies: where the replies come from: an API, so that none is paid for twice, or an engine.
        timeout_s: the time in seconds after which a review counts as failed; None for no limit of its own.
        rules: the rules of the environment, which review each message first.

    Raises:
        ConfigError: if there is no prompt template.
    """

    def __init__(
        self,
        config: SupervisorModelConfig,
        supervision: SupervisionConfig,
        replies: KeptReplies | EngineReplies,
        timeout_s: float | None = None,
        rules: Rules = review_by_rules,
    ):
        if supervision.prompt_path is None:
            raise ConfigError(
                "A supervisor that is a model needs generation.supervisor.prompt_path, such as "
                "prompt_templates/supervisors/language_tutor.txt."
            )
        self._path = supervision.prompt_path
        self._replies_per_review = config.replies_per_review
        self._categories = tuple(supervision.penalties)
        self._schema = wanted_schema(config, review_schema(self._categories))
        self._sampling = Sampling.of(config.vllm, supervision.max_tokens)
        self._replies = replies
        self._timeout_s = timeout_s
        self._rules = rules

    async def review(self, request: MessageToReview) -> Review:
        """The rules' review if they find the message invalid; otherwise the review in the first usable reply of the
        model. A failure that concerns this message alone becomes a review without a verdict that contains the error.

        Raises:
            EngineFailure: if the engine died.
            ProviderFailure: as `ChatApi.ask`.
            StorageError: if the ledger cannot be used.
        """
        text = ""
        try:
            rule_review = self._rules(request)
            if rule_review.valid is False:
                return rule_review
            async with asyncio.timeout(self._timeout_s):
                for number in range(self._replies_per_review):
                    messages = review_messages(self._path, request)
                    chat_request = ChatRequest(messages, self._sampling, self._schema, ("review", number))
                    answer, _ = await self._replies.get(chat_request, self._holds_review)
                    text = answer.text
                    if not answer.cut and self._holds_review(text):
                        break
            if answer.cut:
                problem = "was cut off at generation.supervisor.max_tokens, so it holds no review"
                raise JudgeOutputError(f"The supervisor's answer {problem}: {quote(text)}")
            return checked(parse_review(text, self._categories), request, self._rules)
        except STOPS:
            raise
        except Exception as error:  # any other error says nothing about the message
            return no_verdict(error, "model", text)

    def _holds_review(self, text: str) -> bool:
        try:
            parse_review(text, self._categories)
        except JudgeOutputError:
            return False
        return True
