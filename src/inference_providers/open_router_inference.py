"""Models behind any OpenAI-compatible URL in a seat: student, teacher, judge; and judges on a local vLLM engine."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

from config.base import ApiModelConfig, JudgeModelConfig
from src.chat_template import Message
from src.errors import JudgeOutputError
from src.inference_providers.base import ChatEngine, Completion, Sampling
from src.inference_providers.call_ledger import CallLedger
from src.inference_providers.chat_api import ChatApi, ChatRequest
from src.inference_providers.replies import Answer
from src.judging import answer_schema, parse_verdict
from src.prompts import render
from src.turns import PolicyVersion, approximate_tokens


def render_rule(path: str, conversation: list[dict[str, str]], problem: str) -> list[dict[str, str]]:
    """The messages that ask a model for its verdict."""
    return [{"role": "user", "content": render(path, conversation=conversation, problem=problem)}]


class KeptReplies:
    """An API's replies, each asked for once: what was asked before of a model that is still configured is answered from
    the ledger, also when equal requests come side by side.

    Args:
        api: who is asked for what the ledger does not hold; None asks nobody.
    """

    def __init__(self, config: ApiModelConfig, ledger: CallLedger, api: ChatApi | None):
        self._models = (config.model_name_or_path, *config.fallback_models)
        self._ledger = ledger
        self._api = api
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def get(self, request: ChatRequest, is_usable: Callable[[str], bool] = bool) -> tuple[Answer, bool]:
        """The reply, and whether it had to be asked for.

        Raises:
            ProviderFailure, RequestRefused: as `ChatApi.ask`.
            JudgeOutputError: if there is none, and nobody to ask.
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
                text, figures = found
                return Answer(text, figures.completion_tokens >= request.sampling.max_tokens, figures)
        return None


class ApiChatEngine:
    """A student or a teacher behind an OpenAI-compatible API. It gives text, no token ids and no log-probs.

    Each answer is paid for once: a conversation that is taken up again after a stop finds those that it had. A seed is
    not sent (few providers keep to one, and some refuse it), but it names the draw: equal messages with the equal seed
    are the same request, and get the same reply.

    Attributes:
        policy: no weights are ever published to it.
        weights: the model and where it is.
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
        request = ChatRequest(messages, replace(sampling, seed=None), asking=draw)
        answer, _ = await self._replies.get(request)
        counted = answer.figures.completion_tokens if answer.figures is not None else 0
        counted = counted or approximate_tokens(answer.text)
        return Completion((), (), answer.text, not answer.cut, self.policy, counted)


class OpenAICompatibleJudge:
    """Asks a model behind an OpenAI-compatible API, and never twice for the same.

    An attempt takes up to `replies_per_attempt` replies until one holds a verdict; each is paid for and kept. An
    attempt that brought no verdict, and is made again, takes new replies.

    Args:
        rules: prompt template of each rule.
        api: who is asked for what the ledger does not hold; None asks nobody.
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
        """
        messages = render_rule(self._rules[rule], conversation, problem)
        schema = None if self._config.response_format == "text" else answer_schema(rule)

        def is_usable(text: str) -> bool:
            try:
                return parse_verdict(rule, attempt, text).valid
            except JudgeOutputError:
                return False

        replies, asked = 0, False
        while True:
            request = ChatRequest(messages, self._sampling, schema, (attempt, replies))
            answer, now = await self._replies.get(request, is_usable)
            replies, asked = replies + 1, asked or now
            if is_usable(answer.text) or asked and replies % self._config.replies_per_attempt == 0:
                return answer.text


class ChatEngineJudge:
    """Asks a model on an engine of this server."""

    def __init__(self, engine: ChatEngine, sampling: Sampling, rules: dict[str, str]):
        self._engine = engine
        self._sampling = sampling
        self._rules = rules

    async def judge(self, rule: str, conversation: list[dict[str, str]], problem: str, attempt: int) -> str:
        messages = render_rule(self._rules[rule], conversation, problem)
        return (await self._engine.chat(messages, self._sampling)).text
