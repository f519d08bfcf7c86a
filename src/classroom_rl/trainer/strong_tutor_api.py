"""A strong tutor on another machine: a vLLM server that gives the log-probs of a prompt's tokens. The policy's episodes
are sent as token ids, so no text is tokenized again, and no weights of the strong tutor are loaded here.
"""

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from torch import Tensor

from classroom_rl.config.train_rl import DistillationConfig
from classroom_rl.errors import ConfigError, ProviderFailure

logger = logging.getLogger(__name__)

CONCURRENT_REQUESTS, REQUEST_TIMEOUT_S = 64, 600.0
DEADLINE_S, PAUSE_S = 1800.0, 10.0
"""How long it may answer nothing until the training stops, and the time between two attempts, in seconds."""

_LEAST_OTHERS = 1e-7
"""The least probability of all tokens but the most likely ones: it is a difference of sums of float32 numbers."""

_MAY_PASS = (408, 409, 425, 429)
"""HTTP statuses after which a server may answer later, beside those from 500 on."""


@dataclass(frozen=True)
class TokenRequest:
    """An episode up to its last wanted token.

    Attributes:
        ids: its tokens.
        wanted: the indices of the wanted tokens, in their order; none is the first one.
    """

    ids: list[int]
    wanted: list[int]


class StrongTutorApi:
    """The client of the strong tutor at `train.distillation.base_url`.

    Args:
        options: names the model, its address and the variable with its key.
        vocabulary: how many tokens the policy has.

    Raises:
        ConfigError: if the variable that should hold the key is empty.
    """

    def __init__(self, options: DistillationConfig, vocabulary: int):
        self._model, self._url, self._vocabulary = options.model, options.base_url, vocabulary
        self._key = "none" if options.api_key_env is None else os.environ.get(options.api_key_env, "")
        self._name = f"the strong tutor {options.model} at {options.base_url}"
        self._answered = 0.0  # when it last answered
        if not self._key:
            raise ConfigError(f"{self._name} needs a key: set the environment variable {options.api_key_env}.")

    def log_probs(self, requests: Sequence[TokenRequest]) -> Tensor:
        """The log-prob of every wanted token, of shape (N), in the order of the requests.

        Raises:
            ConfigError: if the server refuses the requests, or gives no log-probs of a prompt.
            ProviderFailure: if it does not answer for `DEADLINE_S`.
        """
        return torch.tensor([entry[token] for token, entry in self._entries(requests, 0)])

    def most_likely(self, requests: Sequence[TokenRequest], count: int) -> tuple[Tensor, Tensor]:
        """The `count` most likely tokens before every wanted token, and the log-probs of these and of all others
        together, of shape (N, count) and (N, count + 1). Raises as `log_probs`."""
        ids, logps = [], []
        for _, entry in self._entries(requests, count):
            in_vocabulary = [item for item in entry.items() if item[0] < self._vocabulary]
            likely = sorted(in_vocabulary, key=lambda item: -item[1])[:count]
            if len(likely) < count:
                raise ConfigError(
                    f"{self._name} was asked for {count} tokens with ids below {self._vocabulary}, and gave "
                    f"{sorted(entry)}: it is another model, or train.distillation.top_k is too large."
                )
            ids.append([token for token, _ in likely])
            logps.append([logp for _, logp in likely])
        of_likely = torch.tensor(logps, dtype=torch.float64).reshape(-1, count)
        others = (1 - of_likely.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_OTHERS).log()
        return torch.tensor(ids, dtype=torch.long).reshape(-1, count), torch.cat([of_likely, others], dim=-1).float()

    def _entries(self, requests: Sequence[TokenRequest], count: int) -> list[tuple[int, dict[int, float]]]:
        """Every wanted token, and the log-probs of it and of the `count` most likely ones in its place, by their
        ids."""
        answers = asyncio.run(self._ask_all(requests, count))
        return [
            (request.ids[index], self._read(answer, index, request.ids[index]))
            for request, answer in zip(requests, answers, strict=True)
            for index in request.wanted
        ]

    async def _ask_all(self, requests: Sequence[TokenRequest], count: int) -> list[list[dict[str, Any] | None]]:
        semaphore, self._answered = asyncio.Semaphore(CONCURRENT_REQUESTS), time.monotonic()
        is_local = urlsplit(self._url).hostname in ("localhost", "127.0.0.1", "::1")
        http = DefaultAsyncHttpxClient(trust_env=not is_local, follow_redirects=False)  # no proxy for local servers
        options = {"timeout": REQUEST_TIMEOUT_S, "max_retries": 0, "http_client": http}
        async with AsyncOpenAI(api_key=self._key, base_url=self._url, **options) as client:

            async def answer(request: TokenRequest) -> list[dict[str, Any] | None]:
                async with semaphore:
                    return await self._answer(client, request, count)

            return await asyncio.gather(*map(answer, requests))

    async def _answer(self, client: AsyncOpenAI, request: TokenRequest, count: int) -> list[dict[str, Any] | None]:
        """The log-probs of each token of a request. A server that cannot be reached or is full is asked again."""
        while True:
            try:
                # One token is sampled, because no fewer can be asked for everywhere.
                answer = await client.completions.create(
                    model=self._model, prompt=request.ids, max_tokens=1, extra_body={"prompt_logprobs": count}
                )
                break
            except APIStatusError as error:
                if error.status_code < 500 and error.status_code not in _MAY_PASS:
                    raise ConfigError(f"{self._name} refuses a request: {error}{_advice(str(error))}") from error
                reason = str(error)
            except APIConnectionError as error:  # also after REQUEST_TIMEOUT_S
                reason = f"{error} {error.__cause__ or ''}".strip()
            if time.monotonic() - self._answered > DEADLINE_S:
                raise ProviderFailure(f"{self._name} has answered nothing for {DEADLINE_S:g} s: {reason}")
            logger.warning("%s does not answer, and is asked again in %g s: %s", self._name, PAUSE_S, reason)
            await asyncio.sleep(PAUSE_S)
        self._answered = time.monotonic()
        choices = getattr(answer, "choices", None)  # what is no JSON comes as a text
        prompt_logprobs = getattr(choices[0], "prompt_logprobs", None) if choices else None
        if not isinstance(prompt_logprobs, list) or len(prompt_logprobs) != len(request.ids):
            raise ConfigError(
                f"{self._name} gives no log-probs of a prompt's tokens (prompt_logprobs), which vLLM's server does: "
                "set train.distillation.base_url to the /v1 of such a server."
            )
        return prompt_logprobs

    def _read(self, answer: list[dict[str, Any] | None], index: int, token: int) -> dict[int, float]:
        try:
            entry = {int(key): float(value["logprob"]) for key, value in (answer[index] or {}).items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{self._name} gave log-probs that cannot be read: {answer[index]!r:.200}") from error
        if token not in entry:
            raise ConfigError(f"{self._name} was sent the token {token} and gave log-probs of {sorted(entry)} alone.")
        return entry


def _advice(refusal: str) -> str:
    if "logprobs" in refusal:
        return " Start the server with a larger --max-logprobs, or make train.distillation.top_k smaller."
    if "context length" in refusal or "max_model_len" in refusal:
        return " It needs room for a whole conversation and one token more: raise its --max-model-len."
    return ""
