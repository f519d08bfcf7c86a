"""An engine behind any OpenAI-compatible API: messages in, text out, no tokens to train on.

For notebooks and the command line. The classroom's roles behind an API count costs and keep replies
(engines/api/); this engine does neither.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from classroom_rl.errors import ConfigError, ContentRefused, ContextOverflow, EngineFailure, ProviderFailure
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.text import without_surrogates
from classroom_rl.rollout.tokens import approximate_tokens

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAIError
    from openai.types.chat import ChatCompletion

_OF_ALL_REQUESTS = (401, 402, 403, 404)
"""Status codes with which every other request would be answered, too."""
_CONTEXT_WORDS = (
    "context_length_exceeded",
    "maximum context length",
    "context length",
    "context window",
    "too many tokens",
)
_REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Where servers put thoughts that they took out of the message."""


class ApiEngine:
    """A model behind an OpenAI-compatible API: a `ChatEngine`.

    Args:
        model: its name at the provider.
        base_url: the API's address, such as http://127.0.0.1:8000/v1; None takes OpenAI's.
        api_key_env: the environment variable that holds the key; None sends no key, for servers without one.
        timeout_s: how long a request may take, in seconds.
        max_retries: how often a request is repeated after a failure that may pass, with growing pauses.
        concurrency: the most requests in flight.
        send_seed: whether seeds are sent; set it to False where a provider refuses them.
        opens_thought: whether the model's template begins each message with `<think>`, so that its text begins as a
            thought.

    Attributes:
        policy, weights: no version; the model's name and address.

    Raises:
        ConfigError: if the variable of the key is not set.
    """

    policy = None

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key_env: str | None = "OPENAI_API_KEY",
        *,
        timeout_s: float = 120.0,
        max_retries: int = 5,
        concurrency: int = 64,
        send_seed: bool = True,
        opens_thought: bool = False,
    ):
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ConfigError(
                f"The environment variable {api_key_env} holds no key for {model}: set it, name another one with "
                "api_key_env, or give api_key_env=None for a server that asks for none."
            )
        self.model_name = model
        self.weights = f"those of {model} at {base_url or 'OpenAI'}"
        self.opens_thought = opens_thought
        self._base_url, self._api_key_env = base_url, api_key_env
        self._timeout_s, self._max_retries = timeout_s, max_retries
        self._concurrency, self._send_seed = concurrency, send_seed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: AsyncOpenAI | None = None
        self._slots: asyncio.Semaphore | None = None

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The assistant message that follows `messages`. A thought that the server took out of the message stands in
        its text again, between tags.

        Raises:
            ContextOverflow: if the messages do not fit into the model's context.
            ContentRefused: if the provider's filter refuses them or the reply.
            ProviderFailure: if every request would fail: a wrong key, model or address, no credit.
            EngineFailure: if this request failed, also after retries.
        """
        import openai

        self._open()
        async with self._slots:
            try:
                reply = await self._client.chat.completions.create(
                    model=self.model_name, messages=list(messages), **self._options(sampling)
                )
            except openai.OpenAIError as error:
                raise self._sorted(error) from error
        return self._completion(reply)

    def check_alive(self) -> None:
        """Nothing to check: each request says for itself whether the API answers."""

    def shutdown(self) -> None:
        """Forget the client."""
        self._client = self._loop = None

    def _open(self) -> None:
        """Open a client for the running event loop: connections cannot move to another one."""
        import openai

        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            key = "none" if self._api_key_env is None else os.environ[self._api_key_env]
            self._client = openai.AsyncOpenAI(
                api_key=key,
                base_url=self._base_url,
                timeout=self._timeout_s,
                max_retries=self._max_retries,
                http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
            )
            self._loop, self._slots = loop, asyncio.Semaphore(self._concurrency)

    def _options(self, sampling: Sampling) -> dict[str, Any]:
        options: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        if self._send_seed and sampling.seed is not None:
            options["seed"] = sampling.seed
        if sampling.top_k > 0:
            options["extra_body"] = {"top_k": sampling.top_k}
        return options

    def _sorted(self, error: "OpenAIError") -> Exception:
        """The error of this project that an error of the client stands for."""
        import openai

        name = f"{self.model_name} at {self._base_url or 'OpenAI'}"
        if isinstance(error, openai.APITimeoutError):
            return EngineFailure(f"{name} did not answer within {self._timeout_s:g} s.")
        if isinstance(error, openai.APIConnectionError):
            return ProviderFailure(f"{name} cannot be reached: {error.__cause__ or error}.")
        if not isinstance(error, openai.APIStatusError):
            return EngineFailure(f"{name} gave no readable answer: {error}.")
        said = f"{name} answered with status {error.status_code}: {str(error)[:500]}"
        if error.status_code in _OF_ALL_REQUESTS:
            return ProviderFailure(said)
        if error.status_code == 400 and any(words in str(error).lower() for words in _CONTEXT_WORDS):
            return ContextOverflow(said)
        return EngineFailure(said)

    def _completion(self, reply: "ChatCompletion") -> Completion:
        if not getattr(reply, "choices", None):
            raise EngineFailure(f"{self.model_name} answered without a message: {str(reply)[:300]}")
        choice = reply.choices[0]
        refusal = getattr(choice.message, "refusal", None)
        if choice.finish_reason == "content_filter" or refusal:
            raise ContentRefused(f"{self.model_name} refused to answer: {refusal or 'its content filter'}.")
        text = without_surrogates(_text_of(choice.message))
        counted = reply.usage.completion_tokens if reply.usage is not None else 0
        ended = choice.finish_reason != "length"
        return Completion((), (), text, ended, None, counted or approximate_tokens(text), self.weights)


def _text_of(message: Any) -> str:
    """A message with its thought in front, which stays open if nothing follows it."""
    said = message.content or ""
    thought = next((found for name in _REASONING_FIELDS if (found := getattr(message, name, None))), None)
    if not isinstance(thought, str) or "</think>" in said:
        return said
    return f"<think>{thought}</think>{said}" if said else f"<think>{thought}"
