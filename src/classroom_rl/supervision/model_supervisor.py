"""Supervisors that are models: behind an OpenAI-compatible API, or on an engine of this server.

Rules review each message first. A message that they find invalid costs nothing; a model is asked about the others. A
model's correction has to pass the same rules.

The model names what is wrong; it never gives a number. Prices stand in `generation.supervisor.penalties`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from classroom_rl.config.base import SupervisionConfig, SupervisorModelConfig
from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.engines.api.chat_api import ChatApi, ChatRequest
from classroom_rl.engines.api.responses import Answer
from classroom_rl.errors import (
    ConfigError,
    ContextOverflow,
    EngineFailure,
    JudgeOutputError,
    ProviderFailure,
    StorageError,
)
from classroom_rl.judges.json_answer import find_object, quote
from classroom_rl.judges.model_judge import KeptReplies, wanted_schema
from classroom_rl.rollout.engine import ChatEngine, Sampling
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.reviews import MessageToReview, Review, no_verdict
from classroom_rl.rollout.text import has_surrogates, without_surrogates
from classroom_rl.supervision.embedded import Rules, review_by_rules
from classroom_rl.supervision.faults import special_token

NO_CATEGORY = "none"
"""The category of a valid message in a model's answer."""

_KEYS = {"critique": str, "category": str, "valid": bool, "correction": str}


def review_messages(path: str, about: MessageToReview) -> list[dict[str, str]]:
    """The chat messages that ask a model for a review; `path` is the prompt template. It may use `conversation`,
    `message`, `problem` and `answer`. The facts that the program knows are not shown.

    Raises:
        DataError: as `render`.
    """
    text = render(
        path, conversation=about.conversation, message=about.message, problem=about.problem, answer=about.answer
    )
    return [{"role": "user", "content": text}]


def review_schema(categories: Iterable[str]) -> dict[str, Any]:
    """The JSON schema of a model's answer. The critique comes first, so that the model thinks before it decides.

    Args:
        categories: the categories that have a price.
    """
    properties = {
        "critique": {"type": "string"},
        "category": {"type": "string", "enum": [*categories, NO_CATEGORY]},
        "valid": {"type": "boolean"},
        "correction": {"type": "string", "description": "empty if there is none"},
    }
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def parse_review(text: str, categories: Iterable[str]) -> Review:
    """The review in a model's answer, its correction unchecked. A `correction` that is null or empty is none.

    Raises:
        JudgeOutputError: if the text holds no single JSON object with exactly what was asked for: a key is missing, has
            another type or names an unknown category, or `valid` contradicts the category.
    """
    answer = find_object(text)
    for key, kind in _KEYS.items():
        if key not in answer:
            raise JudgeOutputError(f"The supervisor's answer has no {key}: {quote(text)}")
        if not isinstance(answer[key], kind) and not (key == "correction" and answer[key] is None):
            raise JudgeOutputError(f"{key} is {quote(answer[key])}, not a {kind.__name__}: {quote(text)}")
    valid, category = answer["valid"], answer["category"]
    known = list(categories)
    if category not in (*known, NO_CATEGORY):
        names = ", ".join((*known, NO_CATEGORY))
        raise JudgeOutputError(f"The category is {quote(category)}, not one of {names}: {quote(text)}")
    if valid != (category == NO_CATEGORY):
        said = f"valid is {valid}, but the category is {category}"
        raise JudgeOutputError(f"The supervisor's answer contradicts itself, {said}: {quote(text)}")
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
"""A longer correction is refused. A good message of a tutor has at most 80 words, about 500 characters."""


def check_correction(correction: str, about: MessageToReview, rules: Rules = review_by_rules) -> str:
    """Why a correction of the message is refused; "" if it is accepted.

    The rules see it in place of the message, with the same facts. If no rules apply to the problem, only its form is
    checked.

    Args:
        rules: the environment's rules.
    """
    if not correction.replace(END_OF_CONVERSATION, "").strip():
        return "it is empty"
    if len(correction) > MOST_CHARACTERS:
        return f"it has {len(correction)} characters; at most {MOST_CHARACTERS} are accepted"
    if " ".join(correction.split()) == " ".join(about.message.split()):
        return "it is the message itself"
    if token := special_token(correction):
        return f"it holds {token!r}, which belongs to no message"
    if has_surrogates(correction) or "\x00" in correction:
        return "it holds characters that cannot be stored"
    if END_OF_CONVERSATION in correction.strip().removesuffix(END_OF_CONVERSATION):
        return f"{END_OF_CONVERSATION} is not at its end"
    found = rules(replace(about, message=correction, cut=False))
    return f"{found.category}: {found.critique}" if found.valid is False else ""


def checked(review: Review, about: MessageToReview, rules: Rules = review_by_rules) -> Review:
    """The review, without its correction if that is refused; then it says why. A review of a valid message, or without
    a verdict, has no correction."""
    if review.correction is None:
        return review
    if review.valid is not False:
        return replace(review, correction=None)
    reason = check_correction(review.correction, about, rules)
    return replace(review, correction=None, refused_correction=reason) if reason else review


STOPS = (EngineFailure, ProviderFailure, StorageError)
"""Errors that stop all reviews until a user fixes their cause."""

Reply = Callable[[int], Awaitable[Answer]]
"""Requests one reply by its number, from 0."""


class ApiSupervisor:
    """A supervisor model behind an OpenAI-compatible API. It never pays twice for the same request: equal messages in
    equal conversations get the same replies, also after a restart.

    Args:
        api: answers the requests that the ledger cannot; None sends none.
        timeout_s: the time after which a review counts as failed; None leaves that to the API's own limits.
        rules: the environment's rules, which review each message first.

    Raises:
        ConfigError: without a prompt template.
    """

    def __init__(
        self,
        config: SupervisorModelConfig,
        supervision: SupervisionConfig,
        ledger: CallLedger,
        api: ChatApi | None,
        timeout_s: float | None = None,
        rules: Rules = review_by_rules,
    ):
        self._path = _prompt_path(supervision)
        self._replies_per_review = config.replies_per_review
        self._categories = tuple(supervision.penalties)
        self._schema = wanted_schema(config, review_schema(self._categories))
        self._sampling = Sampling(config.vllm.temperature, config.vllm.top_p, max_tokens=supervision.max_tokens)
        self._replies = KeptReplies(config, ledger, api)
        self._timeout_s = timeout_s
        self._rules = rules

    async def review(self, about: MessageToReview) -> Review:
        """As `Supervisor.review`.

        Raises:
            ProviderFailure: as `ChatApi.ask`.
            StorageError: if the ledger cannot be used.
        """

        async def reply(number: int) -> Answer:
            messages = review_messages(self._path, about)
            request = ChatRequest(messages, self._sampling, self._schema, ("review", number))
            answer, _ = await self._replies.get(request, lambda text: _can_be_read(text, self._categories))
            return answer

        return await review_by_model(
            about, reply, self._replies_per_review, self._categories, self._timeout_s, self._rules
        )


class EngineSupervisor:
    """A supervisor model on an engine of this server.

    Args:
        timeout_s: the time after which a review counts as failed; None leaves that to the engine's own limits.
        rules: the environment's rules, which review each message first.

    Raises:
        ConfigError: without a prompt template.
    """

    def __init__(
        self,
        config: SupervisorModelConfig,
        supervision: SupervisionConfig,
        engine: ChatEngine,
        sampling: Sampling,
        timeout_s: float | None = None,
        rules: Rules = review_by_rules,
    ):
        self._path = _prompt_path(supervision)
        self._replies_per_review = config.replies_per_review
        self._categories = tuple(supervision.penalties)
        self._engine = engine
        schema = wanted_schema(config, review_schema(self._categories))
        self._sampling = replace(sampling, max_tokens=supervision.max_tokens, schema=schema)
        self._timeout_s = timeout_s
        self._rules = rules

    async def review(self, about: MessageToReview) -> Review:
        """As `Supervisor.review`.

        Raises:
            EngineFailure: if the engine died.
        """

        async def reply(number: int) -> Answer:
            messages = review_messages(self._path, about)
            found = await self._engine.chat(messages, replace(self._sampling, draw=("review", number)))
            was_short = not found.ended and found.tokens < self._sampling.max_tokens
            if was_short and not _can_be_read(found.text, self._categories):
                raise ContextOverflow(f"The supervisor's context had room for {found.tokens} tokens of an answer only.")
            return Answer(found.text, not found.ended, None)

        return await review_by_model(
            about, reply, self._replies_per_review, self._categories, self._timeout_s, self._rules
        )


async def review_by_model(
    about: MessageToReview,
    reply: Reply,
    replies: int,
    categories: tuple[str, ...],
    timeout_s: float | None,
    rules: Rules,
) -> Review:
    """The rules' review if they find the message invalid, otherwise the first of up to `replies` replies that can be
    read. A failure that concerns this message alone becomes a review without a verdict, which holds the error.

    Raises:
        EngineFailure, ProviderFailure, StorageError: as `reply`.
    """
    text = ""
    try:
        found = rules(about)
        if found.valid is False:
            return found
        async with asyncio.timeout(timeout_s):
            for number in range(replies):
                answer = await reply(number)
                text = answer.text
                if not answer.cut and _can_be_read(text, categories):
                    break
        if answer.cut:
            what = "was cut off at generation.supervisor.max_tokens, so it holds no review"
            raise JudgeOutputError(f"The supervisor's answer {what}: {quote(text)}")
        return checked(parse_review(text, categories), about, rules)
    except STOPS:
        raise
    except Exception as error:  # whatever it is, it says nothing about the message
        return no_verdict(error, "model", text)


def _can_be_read(text: str, categories: tuple[str, ...]) -> bool:
    try:
        parse_review(text, categories)
    except JudgeOutputError:
        return False
    return True


def _prompt_path(supervision: SupervisionConfig) -> str:
    if supervision.prompt_path is None:
        raise ConfigError(
            "A supervisor that is a model needs generation.supervisor.prompt_path, such as "
            "prompt_templates/supervisors/language_tutor.txt."
        )
    return supervision.prompt_path
