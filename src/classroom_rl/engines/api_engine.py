"""An engine behind any OpenAI-compatible API: it takes messages and returns text, without tokens to train on.

It is for notebooks and the command line. The classroom's roles use engines/api/ instead, which also tracks costs and
stores replies.
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

_FATAL_STATUSES = (401, 402, 403, 404)
"""Status codes that every other request would get, too."""
_CONTEXT_PHRASES = (
    "context_length_exceeded",
    "maximum context length",
    "context length",
    "context window",
    "too many tokens",
)
_REASONING_FIELDS = ("reasoning_content", "reasoning")
"""The fields in which servers return reasoning that they removed from the message's content."""


class ApiEngine:
    """A model behind an OpenAI-compatible API: a `ChatEngine`.

    Args:
        model: the model's name at the provider.
        base_url: the API's address, such as http://127.0.0.1:8000/v1; None for OpenAI's.
        api_key_env: the environment variable that holds the key; None for servers without a key.
        timeout_s: how long a request may take, in seconds.
        max_retries: how often a request is retried after a failure that may be temporary, with exponential backoff.
        concurrency: the maximum number of requests in flight.
        send_seed: whether seeds are sent; set it to False if the provider refuses them.
        opens_thought: whether the model's chat template begins each assistant message with `<think>`, so that the
            generated text begins inside a thought.

    Attributes:
        policy: None, because the weights have no version.
        weights: the model's name and address.

    Raises:
        ConfigError: if the environment variable of the key is not set.
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
        """Sample the assistant message that follows `messages`. Reasoning that the server returns in a separate field
        is put back in front of the text, between `<think>` tags.

        Raises:
            ContextOverflow: if the messages do not fit into the model's context.
            ContentRefused: if the provider's filter refuses them or the reply.
            ProviderFailure: if every request would fail: a wrong key, model or address, no credit.
            EngineFailure: if this request failed and its retries, too.
        """
        import openai

        client, slots = self._open()
        async with slots:
            chat_messages: list[Any] = list(messages)  # openai has types of its own for them
            try:
                reply = await client.chat.completions.create(
                    model=self.model_name, messages=chat_messages, **self._options(sampling)
                )
            except openai.OpenAIError as error:
                raise self._translate(error) from error
        return self._completion(reply)

    def check_alive(self) -> None:
        """Does nothing: only a request can show whether the API answers."""

    def shutdown(self) -> None:
        """Drop the client."""
        self._client = self._loop = None

    def _open(self) -> "tuple[AsyncOpenAI, asyncio.Semaphore]":
        """The client and the slots of the running event loop; new ones for each loop, because connections cannot move
        to another loop."""
        import openai

        loop = asyncio.get_running_loop()
        if self._client is None or self._slots is None or self._loop is not loop:
            key = "none" if self._api_key_env is None else os.environ[self._api_key_env]
            self._client = openai.AsyncOpenAI(
                api_key=key,
                base_url=self._base_url,
                timeout=self._timeout_s,
                max_retries=self._max_retries,
                http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
            )
            self._loop, self._slots = loop, asyncio.Semaphore(self._concurrency)
        return self._client, self._slots

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

    def _translate(self, error: "OpenAIError") -> Exception:
        """This project's error for an error of the `openai` client."""
        import openai

        name = f"{self.model_name} at {self._base_url or 'OpenAI'}"
        if isinstance(error, openai.APITimeoutError):
            return EngineFailure(f"{name} did not answer within {self._timeout_s:g} s.")
        if isinstance(error, openai.APIConnectionError):
            return ProviderFailure(f"{name} cannot be reached: {error.__cause__ or error}.")
        if not isinstance(error, openai.APIStatusError):
            return EngineFailure(f"{name} gave no readable answer: {error}.")
        message = f"{name} answered with status {error.status_code}: {str(error)[:500]}"
        if error.status_code in _FATAL_STATUSES:
            return ProviderFailure(message)
        if error.status_code == 400 and any(phrase in str(error).lower() for phrase in _CONTEXT_PHRASES):
            return ContextOverflow(message)
        return EngineFailure(message)

    def _completion(self, reply: "ChatCompletion") -> Completion:
        if not getattr(reply, "choices", None):
            raise EngineFailure(f"{self.model_name} answered without a message: {str(reply)[:300]}")
        choice = reply.choices[0]
        refusal = getattr(choice.message, "refusal", None)
        if choice.finish_reason == "content_filter" or refusal:
            raise ContentRefused(f"{self.model_name} refused to answer: {refusal or 'its content filter'}.")
        text = without_surrogates(_text_with_thought(choice.message))
        tokens = reply.usage.completion_tokens if reply.usage is not None else 0
        ended = choice.finish_reason != "length"
        return Completion((), (), text, ended, None, tokens or approximate_tokens(text), self.weights)


def _text_with_thought(message: Any) -> str:
    """The message's content after its thought. The thought's tag stays open if no content follows."""
    content = message.content or ""
    thought = next((value for name in _REASONING_FIELDS if (value := getattr(message, name, None))), None)
    if not isinstance(thought, str) or "</think>" in content:
        return content
    return f"<think>{thought}</think>{content}" if content else f"<think>{thought}"
