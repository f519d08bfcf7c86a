"""Sends requests to models behind an OpenAI-compatible API, with rate limits, a spending cap, retries and fallbacks.

Each request is retried on its own, with exponential backoff. All requests share the state of a model: a Retry-After
header pauses all requests to it. After `_DOWN_AFTER` failures in a row, a model counts as down: only single requests
probe it, at growing intervals of up to a minute; the others go to the fallback models or wait. A failure that waiting
cannot fix stops the run.
"""

import asyncio
import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from classroom_rl.config.models import ApiModelConfig
from classroom_rl.engines.api.call_ledger import LOST, UNUSABLE, USABLE, CallLedger, CallUsage
from classroom_rl.engines.api.http_client import RateLimiter, Reservation
from classroom_rl.engines.api.responses import Answer, Failure, Remedy, of_exception, read_body
from classroom_rl.errors import (
    ConfigError,
    ContentRefused,
    ProviderFailure,
    RequestRefused,
    RequestTooLong,
    SpendingCapReached,
)
from classroom_rl.rollout.engine import Sampling
from classroom_rl.system.keys import without_keys

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

OPENROUTER_URL = "https://openrouter.ai/api/v1"
GEMINI_URL = "https://generativelanguage.googleapis.com/v1beta/openai/"

# The first pause of a request after a failure, the first pause of a model that is down, and the longest of both.
_FIRST_PAUSE_S, _FIRST_MODEL_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 5.0, 60.0
_DOWN_AFTER = 8
_POLL_S = 1.0
_HEARTBEAT_S = 30.0
_SILENT_S = 10.0
_CONNECT_TIMEOUT_S = 10.0
_DRAIN_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ChatRequest:
    """A request to a model. `draw` distinguishes requests with equal content that must get different replies. With
    `completes`, the text of the only message is continued as it is, by the API's `/completions`."""

    messages: Sequence[dict[str, str]]
    sampling: Sampling
    schema: dict[str, Any] | None = None
    draw: tuple[str | int | None, ...] = ()
    completes: bool = False

    def key(self, model: str, template: Mapping[str, Any] | None = None) -> str:
        """A hash of the request's content, the model's name, and the variables set in its chat template."""
        sampling = (self.sampling.temperature, self.sampling.top_p, self.sampling.max_tokens, self.sampling.seed)
        content = [model, list(self.messages), sampling, self.schema, self.draw]
        # Other requests keep the keys of earlier versions.
        content += [self.completes, self.sampling.stop] if self.completes or self.sampling.stop else []
        content += [template] if template else []
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def max_prompt_tokens(self) -> int:
        """An upper bound on the prompt's tokens: one per byte, and 32 per message for the chat template around it."""
        texts = [message["content"] for message in self.messages]
        if self.schema is not None:
            texts.append(json.dumps(self.schema))
        return sum(len(text.encode()) + 32 for text in texts) + 32


@dataclass
class _ModelState:
    """The state of a model, shared by all requests.

    Attributes:
        without_schema: whether requests are sent without a JSON schema.
        unknown: whether the provider does not know the model.
        probes: the number of requests that were sent to it since it went down.
        paused_until: no request is sent before this time.
    """

    name: str
    without_schema: bool
    unknown: bool = False
    failures_in_a_row: int = 0
    probes: int = 0
    paused_until: float = 0.0

    @property
    def pause_s(self) -> float:
        """Seconds between probes, if the model is down; otherwise 0."""
        return _doubled_pause(_FIRST_MODEL_PAUSE_S, self.probes) if self.failures_in_a_row >= _DOWN_AFTER else 0.0


def _doubled_pause(first_s: float, times: int) -> float:
    """A pause that doubles with each time, up to `_LONGEST_PAUSE_S`."""
    return min(_LONGEST_PAUSE_S, first_s * 2 ** min(times, 10))


class ChatApi:
    """One API, its models in order of preference, and the ledger that records every request.

    Args:
        role: the role that uses the API, for messages: "judge", "student" or "teacher".
        clock, sleep: replaced in tests.

    Attributes:
        model: the preferred model.
        url: the API's address.

    Raises:
        ConfigError: if the API key's environment variable is not set.
    """

    def __init__(
        self,
        config: ApiModelConfig,
        ledger: CallLedger,
        role: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._config = config
        self.ledger = ledger
        self._role = role
        self._clock, self._sleep = clock, sleep
        self._client = connect(config)
        self.model, self.url = config.model_name_or_path, str(self._client.base_url)
        names = [config.model_name_or_path, *config.fallback_models]
        self._models = [_ModelState(name, without_schema=config.response_format == "text") for name in names]
        self._slots = asyncio.Semaphore(config.max_concurrent_requests)
        self._limiter = RateLimiter(config.requests_per_minute, config.tokens_per_minute, clock, sleep)
        self._in_flight: set[asyncio.Task] = set()
        self._jitter = random.Random()
        self._waiting: dict[object, float] = {}  # for each request that has failed, the time of its first failure
        self._last_answer = -1.0
        self._last_failure: Failure | None = None
        self._last_heartbeat = -_HEARTBEAT_S

    @property
    def trouble(self) -> str | None:
        """A message if requests have been waiting without any answer for `_SILENT_S` seconds: for how long, and the
        last failure. Otherwise None."""
        since = min(self._waiting.values(), default=None)
        if since is None or (silent_s := self._clock() - max(since, self._last_answer)) < _SILENT_S:
            return None
        return self._describe_silence(silent_s)

    async def ask(self, request: ChatRequest, is_usable: Callable[[str], bool] = bool) -> Answer:
        """Send a request, with retries, and return the first answer of any model.

        Args:
            is_usable: decides whether the ledger records the reply as usable.

        Raises:
            ProviderFailure: if every request would fail: no key, no credit, no such model, or no answer to any request
                until the deadline.
            SpendingCapReached: if the request could exceed the cap.
            RequestRefused: if only this request is refused or gets no answer.
        """
        failures, ticket = 0, object()
        # An earlier request may have found this out, and its caller was cancelled before it could reset the models.
        if all(model.unknown for model in self._models):
            self._retry_unknown_models()
        try:
            while True:
                pause_s = _POLL_S
                if self._available() is not None and (attempt := await self._try(request, is_usable)) is not None:
                    model, outcome = attempt
                    if isinstance(outcome, Answer):
                        return outcome
                    if self._may_repeat_at_once(model, outcome):
                        continue
                    failures += 1
                    pause_s = self._backoff_s(failures)
                left_s = self._check_deadline(self._waiting.setdefault(ticket, self._clock()))
                await self._sleep(min(pause_s, max(left_s, _POLL_S)))
        finally:
            self._waiting.pop(ticket, None)

    async def drain(self) -> None:
        """Wait up to `_DRAIN_TIMEOUT_S` seconds for the replies to requests in flight, so that the ledger gets them."""
        if self._in_flight:
            await asyncio.wait(self._in_flight, timeout=_DRAIN_TIMEOUT_S)

    # Which model, and what its failure means --------------------------------------------------------------------

    def _available(self) -> _ModelState | None:
        """The first model that may be asked now; None if all of them are paused or unknown."""
        now = self._clock()
        return next((model for model in self._models if not model.unknown and model.paused_until <= now), None)

    def _update_model(self, model: _ModelState, outcome: Answer | Failure) -> None:
        """Update the state of a model with the outcome of a request."""
        if isinstance(outcome, Answer) or outcome.remedy is not Remedy.WAIT:  # a refusal also shows that it is up
            model.failures_in_a_row, model.probes, model.paused_until = 0, 0, 0.0
        if isinstance(outcome, Answer):
            self._last_answer = self._clock()
            return
        self._last_failure = outcome
        if outcome.remedy is Remedy.WAIT:
            model.failures_in_a_row += 1
            model.paused_until = max(model.paused_until, self._clock() + max(outcome.retry_after_s, model.pause_s))
        elif outcome.remedy is Remedy.TEXT and not model.without_schema:
            model.without_schema = True
            logger.warning("%s takes no JSON schema; it is asked without: %s", self._label(model), outcome.message)
        elif outcome.remedy is Remedy.OTHER_MODEL and not model.unknown:
            model.unknown = True
            logger.warning("%s is not there: %s", self._label(model), outcome.message)

    def _may_repeat_at_once(self, model: _ModelState, failure: Failure) -> bool:
        """Whether a failed request may be sent again immediately (to another model, or without a schema). False if it
        must wait first. Raises `ProviderFailure` or `RequestRefused` if it must not be sent again."""
        label, reason = self._label(model), failure.message
        match failure.remedy:
            case Remedy.WAIT:
                return False
            case Remedy.STOP:
                raise ProviderFailure(f"{label} refuses every request: {reason}. {self._key_hint()}")
            case Remedy.CONTENT:
                raise ContentRefused(f"{label} refuses what this request is about: {reason}")
            case Remedy.SHORTER:
                raise RequestTooLong(f"{label} refused this request: {reason}")
            case Remedy.NONE:
                raise RequestRefused(f"{label} refused this request: {reason}")
            case Remedy.TEXT if self._config.response_format == "json_schema":
                raise ProviderFailure(
                    f"{label} takes no JSON schema: {reason}. Set {self._role}_model.response_format=text."
                )
            case Remedy.OTHER_MODEL if all(state.unknown for state in self._models):
                self._retry_unknown_models()
                hint = f"Correct {self._role}_model.model_name_or_path, or the API's address."
                raise ProviderFailure(f"{label} is not there: {reason}. {hint}")
        return True

    def _retry_unknown_models(self) -> None:
        """Let later requests try all models again after a pause: a model may exist by then."""
        for model in self._models:
            model.unknown, model.paused_until = False, self._clock() + _FIRST_MODEL_PAUSE_S

    def _label(self, model: _ModelState) -> str:
        return f"The {self._role} {model.name} ({self.url})"

    def _key_hint(self) -> str:
        variable = key_variable(self._config)
        if variable is None:
            return f"No key was sent; {self._role}_model.api_key_env names the variable that holds one."
        return f"The key is that in the environment variable {variable}."

    def _backoff_s(self, failures: int) -> float:
        # With jitter, so that requests that failed together do not all come back together.
        return self._jitter.uniform(0.5, 1.0) * _doubled_pause(_FIRST_PAUSE_S, failures - 1)

    def _check_deadline(self, waiting_since: float) -> float:
        """Seconds until the deadline of a request that has failed at least once.

        Raises:
            ProviderFailure: if no request was answered for `deadline_s` seconds.
            RequestRefused: if this request is past its deadline while others were answered, and either it is the only
                waiting one, or an answer came in the last `deadline_s` / 2 seconds.
        """
        now, deadline_s = self._clock(), self._config.deadline_s
        self._log_heartbeat(now, waiting_since)
        failure = self._last_failure.message if self._last_failure is not None else "none"
        message = (
            f"The {self._role} {' and '.join(model.name for model in self._models)} ({self.url}) did not "
            f"answer within {self._role}_model.deadline_s = {deadline_s:g} s; the last failure: {failure}"
        )
        late = now >= waiting_since + deadline_s
        others_were_answered = self._last_answer >= waiting_since
        if late and others_were_answered and (len(self._waiting) == 1 or now < self._last_answer + deadline_s / 2):
            raise RequestRefused(f"{message}. Other requests were answered meanwhile.")
        if now >= max(waiting_since, self._last_answer) + deadline_s:
            raise ProviderFailure(f"{message}. When it is back, start again: what was answered so far is kept.")
        return waiting_since + deadline_s - now

    def _log_heartbeat(self, now: float, waiting_since: float) -> None:
        """Log a warning every `_HEARTBEAT_S` seconds while no request is answered."""
        if self._last_answer >= waiting_since or now - max(waiting_since, self._last_heartbeat) < _HEARTBEAT_S:
            return
        self._last_heartbeat = now
        reason = self._describe_silence(now - waiting_since)
        logger.warning("waiting for the %s %s: %s", self._role, self.model, reason)

    def _describe_silence(self, seconds: float) -> str:
        failure = self._last_failure.message if self._last_failure is not None else "none"
        deadline_s = self._config.deadline_s
        return f"no answer for {seconds:.0f} s, given up after {deadline_s:.0f} s; the last failure: {failure}"

    # One request -------------------------------------------------------------------------------------------------

    async def _try(
        self, request: ChatRequest, is_usable: Callable[[str], bool]
    ) -> tuple[_ModelState, Answer | Failure] | None:
        """Send one request to the first available model. None if no model is available when the request could be sent.

        A sent request is not cancelled with its caller: its reply is paid for, so the ledger still records it.
        """
        await self._slots.acquire()
        task = None
        try:
            admitted = await self._admit(request)
            if admitted is None:
                return None
            call, reservation, model = admitted
            task = asyncio.create_task(self._send_and_settle(call, reservation, model, request, is_usable))
            self._in_flight.add(task)
            task.add_done_callback(self._finish)
            try:
                return model, await asyncio.shield(task)
            except asyncio.CancelledError:
                task.add_done_callback(_log_error)  # nothing else awaits the task any more
                raise
        finally:
            if task is None:  # otherwise `_finish` releases the slot
                self._slots.release()

    def _finish(self, task: asyncio.Task) -> None:
        self._in_flight.discard(task)
        self._slots.release()

    async def _admit(self, request: ChatRequest) -> tuple[int, Reservation, _ModelState] | None:
        """Wait until the rate limits and the cap allow the request, choose a model, and enter the request in the
        ledger. None if no model is available by then. Raises a `SpendingCapReached` if its highest possible cost
        exceeds the cap while no other request is in flight."""
        tokens = request.max_prompt_tokens + request.sampling.max_tokens
        worst_usd = self._price(request.max_prompt_tokens, request.sampling.max_tokens)
        template = self._config.vllm.chat_template_kwargs
        while True:
            reservation = await self._limiter.reserve(tokens)
            model = self._available()
            call = model and self.ledger.enter(request.key(model.name, template), model.name, worst_usd)
            if call is not None:
                if model.pause_s > 0:  # the model is down, and this request is the probe
                    model.probes += 1
                    model.paused_until = self._clock() + model.pause_s
                return call, reservation, model
            reservation.tokens = 0  # nothing is sent now
            if model is None:
                return None
            # Requests in flight hold reservations above their real cost: each one that ends may make room for this.
            if not self._in_flight:
                raise SpendingCapReached(self._describe_cap(worst_usd))
            await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)

    def _describe_cap(self, worst_usd: float) -> str:
        ledger = self.ledger
        return (
            f"{self._role}_model.max_cost_usd = {ledger.cap_usd:g} is reached: ${ledger.spent_usd:.6f} are spent, "
            f"${ledger.reserved_usd:.6f} are held for requests that may have been billed unseen, and the next one may "
            f"cost ${worst_usd:.6f}. Raise it and start again; what was answered so far is kept."
        )

    async def _send_and_settle(
        self,
        call: int,
        reservation: Reservation,
        model: _ModelState,
        request: ChatRequest,
        is_usable: Callable[[str], bool],
    ) -> Answer | Failure:
        try:
            outcome = await self._send(model, request)
            outcome_name = _outcome_name(outcome, is_usable)
        except BaseException:  # cancelled, or an unexpected error: the request may have been billed
            self.ledger.settle(call, LOST, "", None, keep_reserved=True)
            raise
        self._update_model(model, outcome)
        usage = self._with_cost(outcome.usage)
        if usage is not None:
            reservation.tokens = usage.prompt_tokens + usage.completion_tokens
        if isinstance(outcome, Failure):
            self.ledger.settle(call, outcome_name, outcome.message, usage, outcome.billed_unseen)
            return outcome
        self.ledger.settle(call, outcome_name, outcome.text, usage, keep_reserved=usage is None, cut=outcome.cut)
        return self._overcharge(request, usage) or outcome

    async def _send(self, model: _ModelState, request: ChatRequest) -> Answer | Failure:
        """Send one request and return its outcome without API keys. Providers and proxies may repeat a key in their
        errors; it must not get into the ledger or into a message."""
        outcome, variable = await self._receive(model, request), key_variable(self._config)
        if isinstance(outcome, Answer):
            return replace(outcome, text=without_keys(outcome.text, variable))
        return replace(outcome, message=without_keys(outcome.message, variable))

    async def _receive(self, model: _ModelState, request: ChatRequest) -> Answer | Failure:
        from openai import APIError

        chat, text = self._client.chat.completions, self._client.completions
        arguments: dict[str, Any] = {
            **({"prompt": request.messages[0]["content"]} if request.completes else {"messages": [*request.messages]}),
            "model": model.name,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "max_tokens": request.sampling.max_tokens,
        }
        if request.sampling.seed is not None:
            arguments["seed"] = request.sampling.seed
        if self._config.vllm.chat_template_kwargs and not request.completes:
            arguments["extra_body"] = {"chat_template_kwargs": self._config.vllm.chat_template_kwargs}
        if request.sampling.stop:
            arguments["stop"] = list(request.sampling.stop)
        schema_sent = request.schema is not None and not model.without_schema
        if schema_sent:
            json_schema = {"name": "answer", "strict": True, "schema": request.schema}
            arguments["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        try:
            async with asyncio.timeout(self._config.request_timeout_s):  # also limits a reply that arrives slowly
                reply = await (text if request.completes else chat).with_raw_response.create(**arguments)
        except (APIError, TimeoutError) as error:
            return of_exception(error, schema_sent)
        return read_body(reply.text, schema_sent, may_be_empty=bool(request.sampling.stop))

    def _price(self, prompt_tokens: int, completion_tokens: int) -> float:
        config = self._config
        prompt_usd = prompt_tokens * config.usd_per_million_prompt_tokens
        return (prompt_usd + completion_tokens * config.usd_per_million_completion_tokens) / 1e6

    def _with_cost(self, usage: CallUsage | None) -> CallUsage | None:
        """The usage with its cost at the configured prices, if the provider reported no cost."""
        if usage is None or usage.cost_usd is not None:
            return usage
        cost_usd = self._price(usage.prompt_tokens, usage.completion_tokens)
        return CallUsage(usage.prompt_tokens, usage.completion_tokens, cost_usd)

    def _overcharge(self, request: ChatRequest, usage: CallUsage | None) -> Failure | None:
        """A failure if the provider billed more than the configured prices allow, because then the cap could not be
        kept."""
        worst_usd = self._price(request.max_prompt_tokens, request.sampling.max_tokens)
        if self.ledger.cap_usd is None or usage is None or usage.cost_usd <= worst_usd:
            return None
        message = (
            f"it billed ${usage.cost_usd:.6f} for a request that by {self._role}_model.usd_per_million_prompt_tokens "
            f"and usd_per_million_completion_tokens costs at most ${worst_usd:.6f}: correct the prices, or the cap "
            "cannot be kept"
        )
        return Failure("overcharged", message, Remedy.STOP)


def _log_error(task: asyncio.Task) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a request whose caller was cancelled failed: %r", error)


def _outcome_name(outcome: Answer | Failure, is_usable: Callable[[str], bool]) -> str:
    """The outcome's name in the ledger."""
    if isinstance(outcome, Failure):
        return outcome.kind
    return USABLE if is_usable(outcome.text) else UNUSABLE


def key_variable(config: ApiModelConfig) -> str | None:
    """The environment variable that holds the API's key; None for an API without a key."""
    if config.api_key_env is not None:
        return config.api_key_env
    if config.use_openrouter:
        return "OPENROUTER_API_KEY"
    return "GEMINI_API_KEY" if config.use_gemini else None


def connect(config: ApiModelConfig) -> "AsyncOpenAI":
    """A client of a model's API, without retries. A missing key is a ConfigError."""
    import httpx2
    from openai import AsyncOpenAI

    from classroom_rl.engines.api.http_client import BoundedClient

    url = config.base_url or (OPENROUTER_URL if config.use_openrouter else GEMINI_URL)
    is_local = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    variable = key_variable(config)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # at level INFO it logs a line for each request
    key = "none" if variable is None else os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"{config.model_name_or_path} is behind an API that needs a key: set the environment variable {variable} "
            "(any text will do for a local server)."
        )
    timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)  # `_receive` limits the time of the whole request
    client = BoundedClient(timeout=timeout, trust_env=not is_local)  # no proxy for local servers
    return AsyncOpenAI(api_key=key, base_url=url, timeout=timeout, max_retries=0, http_client=client)
