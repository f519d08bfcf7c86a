"""Judge models behind an OpenAI-compatible API or on a local vLLM engine, and students and teachers behind an API."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from classroom_rl.config.models import ApiModelConfig, JudgeModelConfig
from classroom_rl.config.rubric import Rubric, load_rubric
from classroom_rl.config.values import SCORING_RULES
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.engines.api.chat_api import ChatApi, ChatRequest
from classroom_rl.engines.api.responses import Answer
from classroom_rl.errors import ContentRefused, ContextOverflow, JudgeOutputError, RequestRefused, RequestTooLong
from classroom_rl.judges.json_answer import quote
from classroom_rl.judges.rubric_scores import rubric_variables
from classroom_rl.judges.verdicts import answer_schema, group_schema, parse_group, parse_verdict
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import ChatEngine, Completion, Sampling
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.tokens import approximate_tokens

_NEUTRAL_TEXT = "Hello! Please go on. "
"""Replaces the tutor's messages in a control request; see `answer_or_blame`."""

Dialogue = Sequence[dict[str, str]]


def render_rule(path: str, conversation: Sequence[dict[str, str]], problem: str, **more: Any) -> list[dict[str, str]]:
    """The chat messages that request a verdict from a judge model; `path` is the prompt template of the rule, and
    `more` are further variables of it."""
    return [{"role": "user", "content": render(path, conversation=conversation, problem=problem, **more)}]


def render_group(path: str, conversations: Sequence[Dialogue], problem: str) -> list[dict[str, str]]:
    """The chat messages that request a ranking and scores of several conversations on one problem."""
    return [{"role": "user", "content": render(path, conversations=conversations, problem=problem)}]


def wanted_schema(config: ApiModelConfig, schema: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON schema to constrain a model's answer with; None if its `response_format` is text."""
    return None if config.response_format == "text" else schema


class KeptReplies:
    """A cache in front of a model API: replies come from the call ledger, or else from the API.

    A reply of any configured model (the model or one of its fallbacks) to an equal request is reused. Of equal requests
    that run concurrently, only one is sent.

    Args:
        config: the model and its fallbacks.
        ledger: the stored calls.
        api: the API for requests that the ledger cannot answer; None to send no requests.
    """

    def __init__(self, config: ApiModelConfig, ledger: CallLedger, api: ChatApi | None):
        self._models = (config.model_name_or_path, *config.fallback_models)
        self._template = config.vllm.chat_template_kwargs
        self._ledger = ledger
        self._api = api
        # One lock per request in progress; an entry disappears when its last user releases the lock.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def get(self, request: ChatRequest, is_usable: Callable[[str], bool] = bool) -> tuple[Answer, bool]:
        """The reply, and whether a request was sent for it; `is_usable` is passed to `ChatApi.ask`.

        Raises:
            ProviderFailure, RequestRefused: as `ChatApi.ask`.
            JudgeOutputError: if the ledger has no reply, and there is no API.
        """
        async with self._locks.setdefault(request.key(self._models[0], self._template), asyncio.Lock()):
            answer = self._find(request)
            if answer is not None:
                return answer, False
            if self._api is None:
                raise JudgeOutputError(f"{self._ledger.path} holds no verdict on this, and no judge is asked now.")
            return await self._api.ask(request, is_usable), True

    def _find(self, request: ChatRequest) -> Answer | None:
        for model in self._models:
            row = self._ledger.find_reply(request.key(model, self._template))
            if row is not None:
                text, usage, cut = row
                if cut is None:  # the row is older than this column
                    cut = usage.completion_tokens >= request.sampling.max_tokens
                return Answer(text, cut, usage)
        return None


class EngineReplies:
    """An engine of this server, asked as `KeptReplies` asks an API. It keeps no replies, so each one is sampled anew.

    Args:
        role: the engine's role, for messages.
    """

    def __init__(self, engine: ChatEngine, role: str):
        self._engine = engine
        self._role = role

    async def get(self, request: ChatRequest, is_usable: Callable[[str], bool] = bool) -> tuple[Answer, bool]:
        """A reply, and True.

        Raises:
            ContextOverflow: if the context leaves no room for the request, or for a usable reply to it.
            EngineFailure: if the engine died.
        """
        sampling = replace(request.sampling, schema=request.schema, draw=request.draw)
        completion = await self._engine.chat(request.messages, sampling)
        # A completion that stopped below its own limit was truncated by the context length.
        hit_context = not completion.ended and completion.tokens < sampling.max_tokens
        if hit_context and not is_usable(completion.text):
            tokens = completion.tokens
            raise ContextOverflow(f"The {self._role}'s context had room for {tokens} tokens of an answer only.")
        return Answer(completion.text, not completion.ended, None), True


class ApiChatEngine:
    """A student or a teacher behind an OpenAI-compatible API. It returns text without token ids and log-probabilities.

    Each answer is paid for once: a conversation that resumes after an interruption gets its earlier answers from the
    ledger. The seed is not sent (few providers respect it, and some refuse it), but it is part of the key under which
    the ledger stores the reply: equal messages with equal seeds get the same reply.

    Attributes:
        policy: the initial version, since no weights are published to an API.
        weights: the model's name and address.
    """

    def __init__(self, config: ApiModelConfig, api: ChatApi):
        self._replies = KeptReplies(config, api.ledger, api)
        self.policy = PolicyVersion()
        self.weights = f"those of {api.model} at {api.url}"

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The assistant message that follows `messages`.

        Raises:
            ProviderFailure, RequestRefused: as `ChatApi.ask`.
        """
        return await self._ask(messages, sampling, completes=False)

    async def complete(self, prompt: str, sampling: Sampling) -> Completion:
        """The text that follows `prompt`, without a chat template; raises as `chat`."""
        return await self._ask([{"role": "user", "content": prompt}], sampling, completes=True)

    async def _ask(self, messages: Sequence[Message], sampling: Sampling, completes: bool) -> Completion:
        draw = sampling.draw if sampling.seed is None else (sampling.seed,)
        request = ChatRequest(messages, replace(sampling, seed=None), draw=draw, completes=completes)
        answer, _ = await self._replies.get(request)
        tokens = answer.usage.completion_tokens if answer.usage is not None else 0
        tokens = tokens or approximate_tokens(answer.text)  # not every provider reports its usage
        return Completion((), (), answer.text, not answer.cut, self.policy, tokens)


async def first_usable(
    reply: Callable[[int], Awaitable[tuple[Answer, bool]]], holds: Callable[[str], bool], replies_per_attempt: int
) -> str:
    """The first usable reply, or the last one of an attempt.

    An attempt does not end with stored replies alone: if it is repeated, it passes over the replies in the ledger that
    are not usable and requests new ones, up to the next multiple of `replies_per_attempt`. A truncated reply is never
    usable: what looks like a complete JSON object in it may be something that it quotes.

    Args:
        reply: gets the reply with a number, from 0, and whether a request was sent for it.
        holds: whether the text of a reply is usable.
        replies_per_attempt: the most replies of one attempt.

    Raises:
        JudgeOutputError: if the last reply was truncated.
    """
    count, any_sent = 0, False
    while True:
        answer, sent = await reply(count)
        count, any_sent = count + 1, any_sent or sent
        usable = not answer.cut and holds(answer.text)
        if usable or (any_sent and count % replies_per_attempt == 0):
            return _complete_text(answer)


def _complete_text(answer: Answer) -> str:
    """The text of an answer; raises `JudgeOutputError` if it was truncated."""
    if answer.cut:
        problem = "was cut off at its most tokens (generation.max_tokens_per_judge_attempt)"
        message = f"The judge's answer {problem}, so it holds no verdict: {quote(answer.text)}"
        raise JudgeOutputError(message, answer.text)
    return answer.text


class ModelJudge:
    """A judge model. One attempt gets up to `replies_per_attempt` replies until one holds a verdict, constrained by the
    JSON schema of the answer unless `response_format` is text. An attempt without a verdict that is repeated gets new
    replies.

    Args:
        config: the model, and `replies_per_attempt`.
        rules: the path of the prompt template of each rule.
        max_tokens: the limit on the tokens of an answer on one conversation.
        replies: where the replies come from: an API, so that none is paid for twice, or an engine.

    Attributes:
        rubric: the criteria that a scoring rule scores by, if the configuration names a file of them; else None.

    Raises:
        ConfigError: if that file cannot be read.
    """

    def __init__(
        self, config: JudgeModelConfig, rules: dict[str, str], max_tokens: int, replies: KeptReplies | EngineReplies
    ):
        self._config = config
        self._rules = rules
        self._sampling = Sampling.of(config.vllm, max_tokens)
        self._replies = replies
        self.rubric = None if config.rubric is None else load_rubric(config.rubric)

    def _render(self, rule: str, dialogue: Dialogue, problem: str) -> list[dict[str, str]]:
        if self.rubric is None or rule not in SCORING_RULES:
            return render_rule(self._rules[rule], dialogue, problem)
        return render_rule(self._config.rubric_prompt_path, dialogue, problem, criteria=rubric_variables(self.rubric))

    async def judge(self, rule: str, conversation: list[dict[str, str]], problem: str, attempt: int) -> str:
        """The first reply with a verdict, or the last one without.

        Raises:
            ContentRefused: if there is no verdict because of the tutor's messages; see `answer_or_blame`.
            ProviderFailure, RequestRefused: behind an API, as `ChatApi.ask`.
            ContextOverflow: on an engine, if the conversation leaves no room for an answer, but not because of the
                tutor's messages.
            JudgeOutputError: if the last reply was truncated.
        """
        schema = wanted_schema(self._config, answer_schema(rule, self.rubric))
        holds = partial(_holds_verdict, rule, self.rubric)

        async def reply(dialogue: Dialogue, number: int) -> tuple[Answer, bool]:
            messages = self._render(rule, dialogue, problem)
            return await self._replies.get(ChatRequest(messages, self._sampling, schema, (attempt, number)), holds)

        async def control(dialogue: Dialogue) -> str:
            answer, _ = await reply(dialogue, 0)
            return _complete_text(answer)

        async def answer() -> str:
            return await first_usable(partial(reply, conversation), holds, self._config.replies_per_attempt)

        return await answer_or_blame(holds, conversation, answer, control)

    async def judge_group(self, rule: str, conversations: Sequence[Dialogue], problem: str, attempt: int) -> str:
        """The first reply that ranks and scores all conversations, or the last one that does not. Its token limit is
        `max_tokens` times the number of conversations.

        Raises:
            ProviderFailure, RequestRefused, ContextOverflow, JudgeOutputError: as `judge`.
        """
        size = len(conversations)
        messages = render_group(self._config.group_prompts_paths[rule], conversations, problem)
        schema = wanted_schema(self._config, group_schema(size))
        sampling = replace(self._sampling, max_tokens=self._sampling.max_tokens * size)
        holds = partial(_holds_group, rule, size)

        async def reply(number: int) -> tuple[Answer, bool]:
            return await self._replies.get(ChatRequest(messages, sampling, schema, (attempt, number)), holds)

        return await first_usable(reply, holds, self._config.replies_per_attempt)


async def answer_or_blame(
    holds: Callable[[str], bool],
    conversation: Dialogue,
    answer: Callable[[], Awaitable[str]],
    control: Callable[[Dialogue], Awaitable[str]],
) -> str:
    """A judge's answer; if there is none, finds out whether the tutor's messages are the cause.

    If a content filter refuses the request, or if the context is full, the judge gets a control request: the same
    conversation with neutral text in place of the tutor's messages (of about the same length after a refusal, short if
    the context was full). If the judge gives a verdict on it, the tutor's messages caused the failure. Otherwise the
    failure says nothing about the tutor. A malformed answer never counts against the tutor, whatever the tutor wrote.

    Args:
        holds: whether the text of a reply is a verdict.
        answer: requests the answer on `conversation`.
        control: requests one reply on another conversation.

    Raises:
        ContentRefused: if the tutor's messages are the cause.
        RequestRefused, ContextOverflow, RequestTooLong: the failure of `answer`, if they are not.
        JudgeOutputError: if the answer was truncated.
    """
    try:
        return await answer()
    except (ContextOverflow, RequestTooLong) as error:
        refusal, same_length, reason = error, False, f"There is no room in the judge's context: {error}"
    except ContentRefused as error:
        refusal, same_length, reason = (
            RequestRefused(f"{error} So it does with other words of the tutor."),
            True,
            str(error),
        )
    try:
        has_verdict = holds(await control(in_plain_words(conversation, same_length)))
    except (RequestRefused, ContextOverflow, JudgeOutputError):
        has_verdict = False
    if has_verdict:
        raise ContentRefused(f"{reason} It gave a verdict on the same lesson with other words of the tutor.")
    raise refusal


def in_plain_words(conversation: Dialogue, same_length: bool) -> list[dict[str, str]]:
    """The conversation with neutral text in place of the tutor's messages: of about the same length as each message if
    `same_length`, otherwise short."""

    def neutral(text: str) -> str:
        repeats = max(1, round(len(text) / len(_NEUTRAL_TEXT))) if same_length else 1
        return (_NEUTRAL_TEXT * repeats).strip()

    return [
        {**message, "content": neutral(message["content"])} if message["role"] == "teacher" else message
        for message in conversation
    ]


def _holds_group(rule: str, size: int, text: str) -> bool:
    try:
        return bool(parse_group(rule, 0, text, size))
    except JudgeOutputError:
        return False


def _holds_verdict(rule: str, rubric: Rubric | None, text: str) -> bool:
    try:
        return parse_verdict(rule, 0, text, rubric).valid
    except JudgeOutputError:
        return False
