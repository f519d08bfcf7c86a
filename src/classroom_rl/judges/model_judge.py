"""Students, teachers and judges behind an OpenAI-compatible API, and judges on a local vLLM engine."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from classroom_rl.config.base import ApiModelConfig, JudgeModelConfig
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.engines.api.chat_api import ChatApi, ChatRequest
from classroom_rl.engines.api.responses import Answer
from classroom_rl.errors import ContentRefused, ContextOverflow, JudgeOutputError, RequestRefused, RequestTooLong
from classroom_rl.judges.json_answer import quote
from classroom_rl.judges.verdicts import answer_schema, group_schema, parse_group, parse_verdict
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import ChatEngine, Completion, Sampling
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.tokens import approximate_tokens

_PLAIN_WORDS = "Hello! Please go on. "

Dialogue = Sequence[dict[str, str]]


def render_rule(path: str, conversation: Sequence[dict[str, str]], problem: str) -> list[dict[str, str]]:
    """The chat messages that ask a judge model for its verdict; `path` is the rule's prompt template."""
    return [{"role": "user", "content": render(path, conversation=conversation, problem=problem)}]


def render_group(path: str, conversations: Sequence[Dialogue], problem: str) -> list[dict[str, str]]:
    """The chat messages that ask a judge model to rank and score conversations on one problem."""
    return [{"role": "user", "content": render(path, conversations=conversations, problem=problem)}]


def wanted_schema(config: ApiModelConfig, schema: dict[str, Any]) -> dict[str, Any] | None:
    """The schema that a model is to answer by; None if it is asked for text."""
    return None if config.response_format == "text" else schema


class KeptReplies:
    """Replies from the ledger, or else from the API. A configured model's reply to an equal request is reused, also if
    equal requests run concurrently.

    Args:
        api: answers the requests that the ledger cannot; None sends none.
    """

    def __init__(self, config: ApiModelConfig, ledger: CallLedger, api: ChatApi | None):
        self._models = (config.model_name_or_path, *config.fallback_models)
        self._ledger = ledger
        self._api = api
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def get(self, request: ChatRequest, is_usable: Callable[[str], bool] = bool) -> tuple[Answer, bool]:
        """The reply, and whether a request was sent for it.

        Raises:
            ProviderFailure, RequestRefused: as `ChatApi.ask`.
            JudgeOutputError: if the ledger has no reply, and there is no API.
        """
        async with self._asking.setdefault(request.key(self._models[0]), asyncio.Lock()):
            answer = self._known(request)
            if answer is not None:
                return answer, False
            if self._api is None:
                raise JudgeOutputError(f"{self._ledger.path} holds no verdict on this, and no judge is asked now.")
            return await self._api.ask(request, is_usable), True

    def _known(self, request: ChatRequest) -> Answer | None:
        for found in map(self._ledger.find_reply, map(request.key, self._models)):
            if found is not None:
                text, usage, cut = found
                if cut is None:  # the row is older than this column
                    cut = usage.completion_tokens >= request.sampling.max_tokens
                return Answer(text, cut, usage)
        return None


class ApiChatEngine:
    """A student or a teacher behind an OpenAI-compatible API. It returns text, no token ids and no log-probs.

    Each answer is paid for once: a conversation that resumes after a stop gets its earlier answers from the ledger. The
    seed is not sent (few providers respect it, and some refuse it), but it is part of the request's key: equal messages
    with equal seeds get the same reply.

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
        draw = sampling.draw if sampling.seed is None else (sampling.seed,)
        request = ChatRequest(messages, replace(sampling, seed=None), draw=draw)
        answer, _ = await self._replies.get(request)
        counted = answer.usage.completion_tokens if answer.usage is not None else 0
        counted = counted or approximate_tokens(answer.text)
        return Completion((), (), answer.text, not answer.cut, self.policy, counted)


async def first_usable(
    reply: Callable[[int], Awaitable[tuple[Answer, bool]]], holds: Callable[[str], bool], replies_per_attempt: int
) -> str:
    """The first reply that can be used, or the last of an attempt; replies from the ledger are no part of it. One that
    was cut off cannot be used: what looks like a whole object in it may be something that it quotes.

    Args:
        reply: gets the reply of this number, and whether a request was sent for it.
        holds: whether a reply can be used.

    Raises:
        JudgeOutputError: if the last one was cut off.
    """
    replies, asked = 0, False
    while True:
        found, now = await reply(replies)
        replies, asked = replies + 1, asked or now
        usable = not found.cut and holds(found.text)
        if usable or (asked and replies % replies_per_attempt == 0):
            return _whole(found.text, found.cut)


def _whole(text: str, cut: bool) -> str:
    if cut:
        what = "was cut off at its most tokens (generation.max_tokens_per_judge_attempt)"
        raise JudgeOutputError(f"The judge's answer {what}, so it holds no verdict: {quote(text)}", text)
    return text


class OpenAICompatibleJudge:
    """A judge model behind an OpenAI-compatible API. It never pays twice for the same request.

    One attempt requests up to `replies_per_attempt` replies until one holds a verdict; the ledger keeps each of them.
    If an attempt without a verdict is repeated, it requests new replies.

    Args:
        rules: the path of each rule's prompt template.
        api: answers the requests that the ledger cannot; None sends none.
    """

    def __init__(
        self,
        config: JudgeModelConfig,
        rules: dict[str, str],
        max_tokens: int,
        ledger: CallLedger,
        api: ChatApi | None,
    ):
        self._config = config
        self._rules = rules
        self._sampling = Sampling(config.vllm.temperature, config.vllm.top_p, max_tokens=max_tokens)
        self._replies = KeptReplies(config, ledger, api)

    async def judge(self, rule: str, conversation: list[dict[str, str]], problem: str, attempt: int) -> str:
        """The first reply with a verdict, or the last one without.

        Raises:
            ProviderFailure, RequestRefused: as `ChatApi.ask`.
            ContentRefused: if the tutor's words are the reason why there is no verdict; see `answer_or_blame`.
        """
        schema = wanted_schema(self._config, answer_schema(rule))

        def holds(text: str) -> bool:
            return _holds_verdict(rule, text)

        async def reply(dialogue: Dialogue, number: int) -> tuple[Answer, bool]:
            messages = render_rule(self._rules[rule], dialogue, problem)
            return await self._replies.get(ChatRequest(messages, self._sampling, schema, (attempt, number)), holds)

        async def control(dialogue: Dialogue) -> str:
            answer, _ = await reply(dialogue, 0)
            return _whole(answer.text, answer.cut)

        async def answer() -> str:
            return await first_usable(partial(reply, conversation), holds, self._config.replies_per_attempt)

        return await answer_or_blame(rule, conversation, answer, control)

    async def judge_group(self, rule: str, conversations: Sequence[Dialogue], problem: str, attempt: int) -> str:
        """The first reply that ranks and scores all conversations, or the last one that does not. It may have as many
        tokens as single answers on each of them would.

        Raises:
            ProviderFailure, RequestRefused: as `ChatApi.ask`.
        """
        size = len(conversations)
        messages = render_group(self._config.group_prompts_paths[rule], conversations, problem)
        schema = wanted_schema(self._config, group_schema(size))
        sampling = replace(self._sampling, max_tokens=self._sampling.max_tokens * size)

        def holds(text: str) -> bool:
            return _holds_group(rule, text, size)

        async def reply(number: int) -> tuple[Answer, bool]:
            return await self._replies.get(ChatRequest(messages, sampling, schema, (attempt, number)), holds)

        return await first_usable(reply, holds, self._config.replies_per_attempt)


class ChatEngineJudge:
    """A judge model on an engine of this server. One attempt samples up to `replies_per_attempt` replies, under the
    JSON schema of the answer unless `response_format` is text."""

    def __init__(self, config: JudgeModelConfig, rules: dict[str, str], max_tokens: int, engine: ChatEngine):
        self._config = config
        self._engine = engine
        self._sampling = Sampling.of(config.vllm, max_tokens)
        self._rules = rules
        self._group_rules = config.group_prompts_paths
        self._replies_per_attempt = config.replies_per_attempt

    async def judge(self, rule: str, conversation: list[dict[str, str]], problem: str, attempt: int) -> str:
        """As `OpenAICompatibleJudge.judge`.

        Raises:
            ContentRefused: as `OpenAICompatibleJudge.judge`.
            ContextOverflow: if the conversation leaves no room for an answer, and the tutor's words are not the reason.
            JudgeOutputError: if the last reply was cut off.
        """
        sampling = replace(self._sampling, schema=wanted_schema(self._config, answer_schema(rule)))

        def holds(text: str) -> bool:
            return _holds_verdict(rule, text)

        async def reply(dialogue: Dialogue, number: int) -> Answer:
            messages = render_rule(self._rules[rule], dialogue, problem)
            return await self._reply(messages, replace(sampling, draw=(attempt, number)), holds)

        async def control(dialogue: Dialogue) -> str:
            answer = await reply(dialogue, 0)
            return _whole(answer.text, answer.cut)

        return await answer_or_blame(
            rule, conversation, lambda: self._first_usable(partial(reply, conversation), holds), control
        )

    async def judge_group(self, rule: str, conversations: Sequence[Dialogue], problem: str, attempt: int) -> str:
        """As `OpenAICompatibleJudge.judge_group`.

        Raises:
            ContextOverflow: if the conversations leave no room for an answer.
            JudgeOutputError: if the last reply was cut off.
        """
        size = len(conversations)
        messages = render_group(self._group_rules[rule], conversations, problem)
        schema = wanted_schema(self._config, group_schema(size))
        sampling = replace(self._sampling, max_tokens=self._sampling.max_tokens * size, schema=schema)

        def holds(text: str) -> bool:
            return _holds_group(rule, text, size)

        async def reply(number: int) -> Answer:
            return await self._reply(messages, replace(sampling, draw=(attempt, number)), holds)

        return await self._first_usable(reply, holds)

    async def _reply(self, messages: Sequence[Message], sampling: Sampling, holds: Callable[[str], bool]) -> Answer:
        found = await self._engine.chat(messages, sampling)
        if not found.ended and found.tokens < sampling.max_tokens and not holds(found.text):
            raise ContextOverflow(f"The judge's context had room for {found.tokens} tokens of an answer only.")
        return Answer(found.text, not found.ended, None)

    async def _first_usable(self, reply: Callable[[int], Awaitable[Answer]], holds: Callable[[str], bool]) -> str:
        async def sent(number: int) -> tuple[Answer, bool]:
            return await reply(number), True

        return await first_usable(sent, holds, self._replies_per_attempt)


async def answer_or_blame(
    rule: str,
    conversation: Dialogue,
    answer: Callable[[], Awaitable[str]],
    control: Callable[[Dialogue], Awaitable[str]],
) -> str:
    """A judge's answer, with a check of why a judge was not let or able to answer.

    If a filter refuses the request, or the context is full, the judge gets a control request: the same conversation
    with plain words in place of the tutor's (as many of them, or a few if the context was full). If it gives a verdict
    on that, the tutor's words are the reason. Otherwise the judge's failure says nothing about the tutor. Neither does
    an answer in a bad form, whatever the tutor wrote.

    Args:
        answer: requests the answer.
        control: requests one reply on another conversation.

    Raises:
        ContentRefused: if the tutor's words are the reason.
        RequestRefused, ContextOverflow: the error of `answer`, if they are not.
        JudgeOutputError: if the answer was cut off.
    """
    try:
        return await answer()
    except (ContextOverflow, RequestTooLong) as error:
        refusal, same_length, why = error, False, f"There is no room in the judge's context: {error}"
    except ContentRefused as error:
        refusal, same_length, why = (
            RequestRefused(f"{error} So it does with other words of the tutor."),
            True,
            str(error),
        )
    try:
        has_verdict = _holds_verdict(rule, await control(in_plain_words(conversation, same_length)))
    except (RequestRefused, ContextOverflow, JudgeOutputError):
        has_verdict = False
    if has_verdict:
        raise ContentRefused(f"{why} It gave a verdict on the same lesson with other words of the tutor.")
    raise refusal


def in_plain_words(conversation: Dialogue, same_length: bool) -> list[dict[str, str]]:
    """The conversation with fixed words in place of the tutor's: about as many in each message if `same_length`, else a
    few."""

    def plain(text: str) -> str:
        times = max(1, round(len(text) / len(_PLAIN_WORDS))) if same_length else 1
        return (_PLAIN_WORDS * times).strip()

    return [{**each, "content": plain(each["content"])} if each["role"] == "teacher" else each for each in conversation]


def _holds_group(rule: str, text: str, size: int) -> bool:
    try:
        return bool(parse_group(rule, 0, text, size))
    except JudgeOutputError:
        return False


def _holds_verdict(rule: str, text: str) -> bool:
    try:
        return parse_verdict(rule, 0, text).valid
    except JudgeOutputError:
        return False
