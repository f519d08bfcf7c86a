"""Judges that are language models: behind any OpenAI-compatible URL, or on a local vLLM engine."""

import os
from typing import TYPE_CHECKING

from config.base import JudgeModelConfig
from src.errors import ConfigError, JudgeOutputError
from src.inference_providers.base import ChatEngine, Sampling
from src.prompts import render

if TYPE_CHECKING:
    from openai import AsyncOpenAI

OPENROUTER_URL = "https://openrouter.ai/api/v1"


def render_rule(path: str, conversation: list[dict[str, str]], problem: str) -> list[dict[str, str]]:
    """The messages that ask a model for its verdict."""
    return [{"role": "user", "content": render(path, conversation=conversation, problem=problem)}]


class OpenAICompatibleJudge:
    """Asks a model behind an OpenAI-compatible API.

    The `openai` client retries rate limits, server errors and broken connections with growing pauses; what still
    fails is raised to the panel, which records it as an attempt without a verdict.

    Raises:
        ConfigError: if the API key's environment variable is not set.
    """

    def __init__(self, config: JudgeModelConfig, rules: dict[str, str], max_tokens: int):
        self._config = config
        self._rules = rules
        self._max_tokens = max_tokens
        self._client = self._connect()

    def _connect(self) -> "AsyncOpenAI":
        import httpx
        from openai import AsyncOpenAI

        key = os.environ.get(self._config.api_key_env)
        if not key:
            raise ConfigError(
                f"The judge {self._config.model_name_or_path} needs an API key: set {self._config.api_key_env} "
                "(any text will do for a local server), or name another variable in judge_model.api_key_env."
            )
        limits = httpx.Limits(max_connections=self._config.max_concurrent_requests)
        return AsyncOpenAI(
            api_key=key,
            base_url=self._config.base_url or OPENROUTER_URL,
            timeout=self._config.request_timeout_s,
            max_retries=5,
            http_client=httpx.AsyncClient(
                limits=limits, timeout=httpx.Timeout(self._config.request_timeout_s, pool=None)
            ),
        )

    async def judge(self, rule: str, conversation: list[dict[str, str]], problem: str, attempt: int) -> str:
        options = self._config.vllm
        response = await self._client.chat.completions.create(
            model=self._config.model_name_or_path,
            messages=render_rule(self._rules[rule], conversation, problem),
            temperature=options.temperature,
            top_p=options.top_p,
            max_tokens=self._max_tokens,
        )
        if not response.choices or not response.choices[0].message.content:
            raise JudgeOutputError(f"The judge {self._config.model_name_or_path} answered with nothing: {response!r}")
        return response.choices[0].message.content


class ChatEngineJudge:
    """Asks a model on an engine of this server."""

    def __init__(self, engine: ChatEngine, sampling: Sampling, rules: dict[str, str]):
        self._engine = engine
        self._sampling = sampling
        self._rules = rules

    async def judge(self, rule: str, conversation: list[dict[str, str]], problem: str, attempt: int) -> str:
        messages = render_rule(self._rules[rule], conversation, problem)
        return (await self._engine.chat(messages, self._sampling)).text
