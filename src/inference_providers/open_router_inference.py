"""Judges that are language models: behind any OpenAI-compatible URL, or on a local vLLM engine."""

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

from config.base import JudgeModelConfig
from src.errors import JudgeOutputError
from src.inference_providers.base import ChatEngine, Sampling
from src.inference_providers.call_ledger import CallLedger
from src.inference_providers.chat_api import ChatApi, ChatRequest
from src.judging import answer_schema, parse_verdict
from src.prompts import render


def render_rule(path: str, conversation: list[dict[str, str]], problem: str) -> list[dict[str, str]]:
    """The messages that ask a model for its verdict."""
    return [{"role": "user", "content": render(path, conversation=conversation, problem=problem)}]


class OpenAICompatibleJudge:
    """Asks a model behind an OpenAI-compatible API, and never twice for the same.

    An attempt takes up to `replies_per_attempt` replies until one holds a verdict; each is paid for and kept. What was
    asked before of a model that is still configured is answered from the ledger; an attempt that brought no verdict
    then, and is made again, takes new replies.

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
        self._ledger = ledger
        self._api = api
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

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
            key = request.key(self._config.model_name_or_path)
            async with self._asking.setdefault(key, asyncio.Lock()):  # equal conversations may be judged side by side
                text = self._known(request)
                if text is None:
                    text, asked = await self._ask(request, is_usable), True
            replies += 1
            if is_usable(text) or asked and replies % self._config.replies_per_attempt == 0:
                return text

    def _known(self, request: ChatRequest) -> str | None:
        models = (self._config.model_name_or_path, *self._config.fallback_models)
        return next((text for text in map(self._ledger.find, map(request.key, models)) if text is not None), None)

    async def _ask(self, request: ChatRequest, is_usable: Callable[[str], bool]) -> str:
        if self._api is None:
            raise JudgeOutputError(f"{self._ledger.path} holds no verdict on this, and no judge is asked now.")
        return (await self._api.ask(request, is_usable)).text


class ChatEngineJudge:
    """Asks a model on an engine of this server."""

    def __init__(self, engine: ChatEngine, sampling: Sampling, rules: dict[str, str]):
        self._engine = engine
        self._sampling = sampling
        self._rules = rules

    async def judge(self, rule: str, conversation: list[dict[str, str]], problem: str, attempt: int) -> str:
        messages = render_rule(self._rules[rule], conversation, problem)
        return (await self._engine.chat(messages, self._sampling)).text
