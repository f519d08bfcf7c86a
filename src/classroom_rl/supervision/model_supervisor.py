"""Supervisors that are models: behind an OpenAI-compatible API, or on an engine of this server.

Rules review each message first. A message that they find invalid costs nothing; a model is asked about the others. A
model's correction has to pass the same rules.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from classroom_rl.config.base import SupervisionConfig, SupervisorModelConfig
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
from classroom_rl.judges.json_answer import quote
from classroom_rl.judges.model_judge import KeptReplies, wanted_schema
from classroom_rl.rollout.engine import ChatEngine, Sampling
from classroom_rl.rollout.reviews import MessageToReview, Review, no_verdict
from classroom_rl.supervision.correction_check import checked
from classroom_rl.supervision.prompted_review import parse_review, review_messages, review_schema
from classroom_rl.supervision.rules_supervisor import Rules, review_by_rules

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
