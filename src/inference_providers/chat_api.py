"""Asks models behind an OpenAI-compatible API: within limits of speed and money, and again by kind of failure.

Requests fail one by one and are repeated one by one, each with growing pauses. What is known of a model is shared: a
Retry-After holds every request to it, and after `_DOWN_AFTER` failures in a row single requests look whether it is
back, ever more rarely but once a minute, while the fallback models take over, or everybody waits. What no waiting mends
stops the run.
"""

import asyncio
import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from config.base import ApiModelConfig
from src.errors import ConfigError, ContentRefused, ProviderFailure, RequestRefused, RequestTooLong, SpendingCapReached
from src.inference_providers.call_ledger import LOST, UNUSABLE, USABLE, CallLedger, Figures
from src.inference_providers.rate_limit import Pace, Turn
from src.inference_providers.responses import Answer, Failure, Remedy, of_exception, read_body
from src.rollout.engines import Sampling

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

OPENROUTER_URL = "https://openrouter.ai/api/v1"
GEMINI_URL = "https://generativelanguage.googleapis.com/v1beta/openai/"

_FIRST_PAUSE_S, _FIRST_REST_S, _LONGEST_S = 1.0, 5.0, 60.0
_DOWN_AFTER = 8
_LOOK_AGAIN_S = 1.0
_HEARTBEAT_S = 30.0
_CONNECT_TIMEOUT_S = 10.0
_LAND_WITHIN_S = 10.0


@dataclass(frozen=True)
class ChatRequest:
    """What is asked of a model. `asking` tells apart askings of the same, whose answers are to differ."""

    messages: Sequence[dict[str, str]]
    sampling: Sampling
    schema: dict[str, Any] | None = None
    asking: tuple[str | int | None, ...] = ()

    def key(self, model: str) -> str:
        """A digest of the request's content and the model it goes to."""
        sampling = (self.sampling.temperature, self.sampling.top_p, self.sampling.max_tokens, self.sampling.seed)
        content = [model, list(self.messages), sampling, self.schema, self.asking]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def most_prompt_tokens(self) -> int:
        """More tokens than the prompt can have: no tokenizer makes more of them than there are bytes; the rest is for
        what frames a message."""
        texts = [message["content"] for message in self.messages]
        if self.schema is not None:
            texts.append(json.dumps(self.schema))
        return sum(len(text.encode()) + 32 for text in texts) + 32


@dataclass
class _Model:
    """What is known of a model. One that is down rests until a time, and was looked after in vain so many times."""

    name: str
    in_text: bool
    unknown: bool = False
    failures_in_a_row: int = 0
    looked_after: int = 0
    rests_until: float = 0.0

    @property
    def rest_s(self) -> float:
        """How long it is left alone now."""
        return _growing(_FIRST_REST_S, self.looked_after) if self.failures_in_a_row >= _DOWN_AFTER else 0.0


def _growing(first_s: float, times: int) -> float:
    return min(_LONGEST_S, first_s * 2 ** min(times, 10))


class ChatApi:
    """One API, its models in order of preference, and the ledger that every request to them is entered in.

    Args:
        role: who speaks through it, for messages: "judge", "student", "teacher".
        clock, sleep: for tests.

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
        self._client = _connect(config)
        names = [config.model_name_or_path, *config.fallback_models]
        self._models = [_Model(name, in_text=config.response_format == "text") for name in names]
        self._slots = asyncio.Semaphore(config.max_concurrent_requests)
        self._pace = Pace(config.requests_per_minute, config.tokens_per_minute, clock, sleep)
        self._flights: set[asyncio.Task] = set()
        self._jitter = random.Random()
        self._waiting: dict[object, float] = {}  # since when, for each request that has met a failure
        self._last_answer = -1.0
        self._last_failure: Failure | None = None
        self._last_heartbeat = -_HEARTBEAT_S

    @property
    def model(self) -> str:
        """The model that is asked first."""
        return self._models[0].name

    @property
    def url(self) -> str:
        """The API's address."""
        return str(self._client.base_url)

    async def ask(self, request: ChatRequest, is_usable: Callable[[str], bool] = bool) -> Answer:
        """The answer of the first model that gives one. `is_usable` tells the ledger whether it is any good.

        Raises:
            ProviderFailure: if every request would fare like this one: no key, no credit, no such model, no answer
                to any request until the deadline.
            SpendingCapReached: if the cap leaves no room for another request.
            RequestRefused: if this request alone is refused or gets no answer.
        """
        failures, ticket = 0, object()
        if all(each.unknown for each in self._models):  # that was found out by a request that nobody waited for
            self._look_again_soon()
        try:
            while True:
                pause_s = _LOOK_AGAIN_S
                if self._available() is not None and (tried := await self._try(request, is_usable)) is not None:
                    model, outcome = tried
                    if isinstance(outcome, Answer):
                        return outcome
                    if self._may_repeat_at_once(model, outcome):
                        continue
                    failures += 1
                    pause_s = self._backoff_s(failures)
                left_s = self._check_deadline(self._waiting.setdefault(ticket, self._clock()))
                await self._sleep(min(pause_s, max(left_s, _LOOK_AGAIN_S)))
        finally:
            self._waiting.pop(ticket, None)

    async def drain(self) -> None:
        """Give the replies that are on their way, and that nobody waits for any more, a moment to come."""
        if self._flights:
            await asyncio.wait(self._flights, timeout=_LAND_WITHIN_S)

    # Which model, and what its failure means --------------------------------------------------------------------

    def _available(self) -> _Model | None:
        """The first model that may be asked now; None if all of them rest."""
        now = self._clock()
        return next((model for model in self._models if not model.unknown and model.rests_until <= now), None)

    def _note(self, model: _Model, outcome: Answer | Failure) -> None:
        """Remember what an outcome tells about the model, for the requests that come after it."""
        if isinstance(outcome, Answer) or outcome.remedy is not Remedy.WAIT:  # it is there, if only to say no
            model.failures_in_a_row, model.looked_after, model.rests_until = 0, 0, 0.0
        if isinstance(outcome, Answer):
            self._last_answer = self._clock()
            return
        self._last_failure = outcome
        if outcome.remedy is Remedy.WAIT:
            model.failures_in_a_row += 1
            model.rests_until = max(model.rests_until, self._clock() + max(outcome.retry_after_s, model.rest_s))
        elif outcome.remedy is Remedy.TEXT and not model.in_text:
            model.in_text = True
            logger.warning("%s takes no JSON schema; it is asked without: %s", self._name(model), outcome.message)
        elif outcome.remedy is Remedy.OTHER_MODEL and not model.unknown:
            model.unknown = True
            logger.warning("%s is not there: %s", self._name(model), outcome.message)

    def _may_repeat_at_once(self, model: _Model, failure: Failure) -> bool:
        """Whether a failed request may be sent again at once, because it will be another one, or only after a pause.

        Raises:
            ProviderFailure, RequestRefused: if it may not be sent again at all.
        """
        who, why = self._name(model), failure.message
        match failure.remedy:
            case Remedy.WAIT:
                return False
            case Remedy.STOP:
                raise ProviderFailure(f"{who} refuses every request: {why}. {self._key_hint()}")
            case Remedy.CONTENT:
                raise ContentRefused(f"{who} refuses what this request is about: {why}")
            case Remedy.SHORTER:
                raise RequestTooLong(f"{who} refused this request: {why}")
            case Remedy.NONE:
                raise RequestRefused(f"{who} refused this request: {why}")
            case Remedy.TEXT if self._config.response_format == "json_schema":
                raise ProviderFailure(
                    f"{who} takes no JSON schema: {why}. Set {self._role}_model.response_format=text."
                )
            case Remedy.OTHER_MODEL if all(each.unknown for each in self._models):
                self._look_again_soon()
                hint = f"Correct {self._role}_model.model_name_or_path, or the API's address."
                raise ProviderFailure(f"{who} is not there: {why}. {hint}")
        return True

    def _look_again_soon(self) -> None:
        """Whoever asks some time after a stop may find that a model is there now."""
        for each in self._models:
            each.unknown, each.rests_until = False, self._clock() + _FIRST_REST_S

    def _name(self, model: _Model) -> str:
        return f"The {self._role} {model.name} ({self.url})"

    def _key_hint(self) -> str:
        variable = key_variable(self._config)
        if variable is None:
            return f"No key was sent; {self._role}_model.api_key_env names the variable that holds one."
        return f"The key is that in the environment variable {variable}."

    def _backoff_s(self, failures: int) -> float:
        return self._jitter.uniform(0.5, 1.0) * _growing(_FIRST_PAUSE_S, failures - 1)

    def _check_deadline(self, waiting_since: float) -> float:
        """Seconds that are left for a request that waits.

        Raises:
            ProviderFailure: if no request at all was answered for `deadline_s`.
            RequestRefused: if others were answered, and this one alone, or long before the last of them, was not.
        """
        now, deadline_s = self._clock(), self._config.deadline_s
        self._tell(now, waiting_since)
        last = self._last_failure.message if self._last_failure is not None else "none"
        message = (
            f"The {self._role} {' and '.join(model.name for model in self._models)} ({self.url}) did not "
            f"answer within {self._role}_model.deadline_s = {deadline_s:g} s; the last failure: {last}"
        )
        late = now >= waiting_since + deadline_s
        others_were_answered = self._last_answer >= waiting_since
        if late and others_were_answered and (len(self._waiting) == 1 or now < self._last_answer + deadline_s / 2):
            raise RequestRefused(f"{message}. Other requests were answered meanwhile.")
        if now >= max(waiting_since, self._last_answer) + deadline_s:
            raise ProviderFailure(f"{message}. When it is back, start again: what was answered so far is kept.")
        return waiting_since + deadline_s - now

    def _tell(self, now: float, waiting_since: float) -> None:
        """A heartbeat in the log while nothing is answered."""
        if self._last_answer >= waiting_since or now - max(waiting_since, self._last_heartbeat) < _HEARTBEAT_S:
            return
        self._last_heartbeat = now
        logger.warning(
            "waiting for the %s %s: no answer for %.0f s, given up after %.0f s; the last failure: %s",
            *(self._role, self._models[0].name, now - waiting_since, self._config.deadline_s),
            self._last_failure.message if self._last_failure is not None else "none",
        )

    # One request -------------------------------------------------------------------------------------------------

    async def _try(
        self, request: ChatRequest, is_usable: Callable[[str], bool]
    ) -> tuple[_Model, Answer | Failure] | None:
        """Send one request; None if no model was left to send it to when its turn came. Once it is on its way nothing
        calls it back: should nobody wait for it any more, its reply is still taken down, because it is paid for."""
        await self._slots.acquire()
        flight = None
        try:
            admitted = await self._admit(request)
            if admitted is None:
                return None
            call, turn, model = admitted
            flight = asyncio.create_task(self._fly(call, turn, model, request, is_usable))
            self._flights.add(flight)
            flight.add_done_callback(self._landed)
            return model, await asyncio.shield(flight)
        finally:
            if flight is None:
                self._slots.release()

    def _landed(self, flight: asyncio.Task) -> None:
        self._flights.discard(flight)
        self._slots.release()
        if not flight.cancelled():
            flight.exception()  # seen, in case nobody waits for it any more

    async def _admit(self, request: ChatRequest) -> tuple[int, Turn, _Model] | None:
        """Wait until speed and money allow the request, choose the model, and enter the request in the ledger; None
        if all models rest by then.

        Raises:
            SpendingCapReached: if it may cost more than is left when all others have been settled.
        """
        tokens = request.most_prompt_tokens + request.sampling.max_tokens
        worst_usd = self._price(request.most_prompt_tokens, request.sampling.max_tokens)
        while True:
            turn = await self._pace.turn(tokens)
            model = self._available()
            call = model and self.ledger.enter(request.key(model.name), model.name, worst_usd)
            if call is not None:
                if model.rest_s > 0:  # this request looks whether the model is back; the others need not
                    model.looked_after += 1
                    model.rests_until = self._clock() + model.rest_s
                return call, turn, model
            turn.tokens = 0
            if model is None:
                return None
            if not self._flights:
                raise SpendingCapReached(self._describe_cap(worst_usd))
            await asyncio.wait(self._flights, return_when=asyncio.FIRST_COMPLETED)

    def _describe_cap(self, worst_usd: float) -> str:
        ledger = self.ledger
        return (
            f"{self._role}_model.max_cost_usd = {ledger.cap_usd:g} is reached: ${ledger.spent_usd:.6f} are spent, "
            f"${ledger.reserved_usd:.6f} are held for requests that may have been billed unseen, and the next one may "
            f"cost ${worst_usd:.6f}. Raise it and start again; what was answered so far is kept."
        )

    async def _fly(
        self, call: int, turn: Turn, model: _Model, request: ChatRequest, is_usable: Callable[[str], bool]
    ) -> Answer | Failure:
        try:
            outcome = await self._send(model, request)
            what = _what_came(outcome, is_usable)
        except BaseException:  # the program ends, or cannot go on; what was asked may have been billed
            self.ledger.settle(call, LOST, "", None, keep_reserved=True)
            raise
        self._note(model, outcome)
        figures = self._priced(outcome.figures)
        if figures is not None:
            turn.tokens = figures.prompt_tokens + figures.completion_tokens
        if isinstance(outcome, Failure):
            self.ledger.settle(call, what, outcome.message, figures, outcome.billed_unseen)
            return outcome
        self.ledger.settle(call, what, outcome.text, figures, keep_reserved=figures is None, cut=outcome.cut)
        return self._overcharge(request, figures) or outcome

    async def _send(self, model: _Model, request: ChatRequest) -> Answer | Failure:
        from openai import APIError

        arguments: dict[str, Any] = {
            "model": model.name,
            "messages": list(request.messages),
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "max_tokens": request.sampling.max_tokens,
        }
        if request.sampling.seed is not None:
            arguments["seed"] = request.sampling.seed
        schema_sent = request.schema is not None and not model.in_text
        if schema_sent:
            named = {"name": "answer", "strict": True, "schema": request.schema}
            arguments["response_format"] = {"type": "json_schema", "json_schema": named}
        try:
            async with asyncio.timeout(self._config.request_timeout_s):  # also ends a reply that comes drop by drop
                reply = await self._client.chat.completions.with_raw_response.create(**arguments)
        except (APIError, TimeoutError) as error:
            return of_exception(error, schema_sent)
        return read_body(reply.text, schema_sent)

    def _price(self, prompt_tokens: int, completion_tokens: int) -> float:
        config = self._config
        prompt_usd = prompt_tokens * config.usd_per_million_prompt_tokens
        return (prompt_usd + completion_tokens * config.usd_per_million_completion_tokens) / 1e6

    def _priced(self, figures: Figures | None) -> Figures | None:
        if figures is None or figures.cost_usd is not None:
            return figures
        cost_usd = self._price(figures.prompt_tokens, figures.completion_tokens)
        return Figures(figures.prompt_tokens, figures.completion_tokens, cost_usd)

    def _overcharge(self, request: ChatRequest, figures: Figures | None) -> Failure | None:
        """A cap cannot be kept with prices that are too low."""
        worst_usd = self._price(request.most_prompt_tokens, request.sampling.max_tokens)
        if self.ledger.cap_usd is None or figures is None or figures.cost_usd <= worst_usd:
            return None
        message = (
            f"it billed ${figures.cost_usd:.6f} for a request that by {self._role}_model.usd_per_million_prompt_tokens "
            f"and usd_per_million_completion_tokens costs at most ${worst_usd:.6f}: correct the prices, or the cap "
            "cannot be kept"
        )
        return Failure("overcharged", message, Remedy.STOP)


def _what_came(outcome: Answer | Failure, is_usable: Callable[[str], bool]) -> str:
    """The outcome as the ledger names it."""
    if isinstance(outcome, Failure):
        return outcome.kind
    return USABLE if is_usable(outcome.text) else UNUSABLE


def key_variable(config: ApiModelConfig) -> str | None:
    """The environment variable that holds the API's key; None for an API that is asked without one."""
    if config.api_key_env is not None:
        return config.api_key_env
    if config.use_openrouter:
        return "OPENROUTER_API_KEY"
    return "GEMINI_API_KEY" if config.use_gemini else None


def _connect(config: ApiModelConfig) -> "AsyncOpenAI":
    import httpx2
    from openai import AsyncOpenAI

    from src.inference_providers.http_client import BoundedClient

    url = config.base_url or (OPENROUTER_URL if config.use_openrouter else GEMINI_URL)
    next_door = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    variable = key_variable(config)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # else a line for each request
    key = "none" if variable is None else os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"{config.model_name_or_path} is behind an API that needs a key: set the environment variable {variable} "
            "(any text will do for a local server)."
        )
    timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    client = BoundedClient(timeout=timeout, trust_env=not next_door)  # a proxy is for the internet
    return AsyncOpenAI(api_key=key, base_url=url, timeout=timeout, max_retries=0, http_client=client)
