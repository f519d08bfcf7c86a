"""Classifies a provider's response as an answer, or as a failure with a way to handle it."""

import email.utils
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from classroom_rl.engines.api.call_ledger import LARGEST_COST_USD, LARGEST_COUNT, CallUsage
from classroom_rl.rollout.text import nests_deeper, without_surrogates

if TYPE_CHECKING:
    from openai import APIError


class Remedy(StrEnum):
    """How to handle a failure."""

    WAIT = "wait"  # send the same request again later
    TEXT = "text"  # send it without a response format
    OTHER_MODEL = "other model"  # the provider does not know this model
    NONE = "none"  # only this request is refused
    SHORTER = "shorter"  # the request does not fit into the model's context
    CONTENT = "content"  # the content is refused, and would be refused again
    STOP = "stop"  # every request will be refused


@dataclass(frozen=True)
class Answer:
    """A model's answer. `cut` says whether it was cut off at `max_tokens`; `usage` is None if none was reported."""

    text: str
    cut: bool
    usage: CallUsage | None


@dataclass(frozen=True)
class Failure:
    """A failed request.

    Attributes:
        kind: the kind of failure, for the statistics.
        message: the provider's message.
        retry_after_s: the seconds that the provider asks to wait.
        billed_unseen: whether the request may have been billed although the provider reported no usage.
    """

    kind: str
    message: str
    remedy: Remedy
    retry_after_s: float = 0.0
    billed_unseen: bool = False
    usage: CallUsage | None = None


_WAIT_STATUSES = (408, 409, 425, 429)
_GATEWAY_TIMEOUTS = (408, 504, 524)  # a gateway gave up; the model may have continued
_KEY = re.compile(r"api[ _-]?key", re.IGNORECASE)
_NO_CREDIT = re.compile(r"insufficient[ _](?:quota|credits?|balance|funds)|credit balance", re.IGNORECASE)
_FORMAT = re.compile(r"response[ _]?(?:format|schema)|json[ _]schema|structured[ _]output", re.IGNORECASE)
_UNKNOWN_MODEL = re.compile(
    r"not a valid model|model_not_found|unknown model|no such model|model\b.{0,200}?\b(?:not (?:found|exist)|does not "
    r"exist|is not available)",
    re.IGNORECASE | re.DOTALL,
)
_CONTENT_FILTER_STATUSES = (400, 403, 422, 451)
_CONTENT_FILTER = re.compile(
    r"flagged|moderation|content[ _-]?filter|content[ _-](?:management[ _-])?policy|responsibleaipolicy|"
    r"data_inspection_failed|prohibited_content|blocked by safety|safety system",
    re.IGNORECASE,
)
_ACCOUNT = re.compile(r"\b(?:accounts?|projects?|organi[sz]ations?)\b", re.IGNORECASE)
_TOO_LONG = re.compile(
    r"context[ _](?:length|window|size)|maximum context|(?:prompt|input) is too long|too many (?:input )?tokens",
    re.IGNORECASE,
)
_ERROR_CODE = re.compile(r"[45][0-9]{2}")
_LONGEST_RETRY_AFTER_S = 3600.0
_MAX_NESTING = 50


def read_body(text: str, schema_sent: bool, may_be_empty: bool = False) -> Answer | Failure:
    """The answer or failure in the body of a response with status 200, without surrogate characters.

    Args:
        schema_sent: as for `of_status`.
        may_be_empty: whether an answer without text that the model ended is one: its first token may be a stop text.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or nests_deeper(body, _MAX_NESTING):
        return _garbled(f"a reply that is not JSON: {text[:300]!r}")
    usage = _read_usage(body.get("usage"))
    choice = _first_choice(body)
    error = body.get("error") or choice.get("error")
    if error:
        status = _status_of(error)
        # With other statuses the request was refused before the model began to answer.
        may_have_begun = status == 408 or status >= 500
        failure = of_status(status, error, {}, schema_sent)
        return replace(failure, kind="error in 200", billed_unseen=may_have_begun and usage is None, usage=usage)
    message = choice.get("message")
    content = message.get("content") if isinstance(message, dict) else choice.get("text")
    refusal = _refusal(choice)
    if refusal is not None:
        return Failure("filtered", refusal, Remedy.CONTENT, billed_unseen=usage is None, usage=usage)
    cut = choice.get("finish_reason") == "length"
    if isinstance(content, str) and (content.strip() or cut):
        return Answer(without_surrogates(content), cut, usage)
    # Thinking used up all tokens, and a retry would cost as much and fail in the same way; or a stop text came first.
    if cut or (may_be_empty and choice.get("finish_reason") == "stop"):
        return Answer("", cut, usage)
    kind = "empty" if choice else "no choices"
    excerpt = without_surrogates(text[:300])
    return Failure(kind, f"{kind}: {excerpt}", Remedy.WAIT, billed_unseen=usage is None, usage=usage)


def of_status(status: int, body: Any, headers: Mapping[str, str], schema_sent: bool) -> Failure:
    """The failure for an HTTP status other than 200, or for the code of an error object inside a 200.

    Args:
        body: the response's body: a provider's error object, or text.
        schema_sent: whether the request had a response format, which the provider may refuse.
    """
    if nests_deeper(body, _MAX_NESTING):
        body = "an error that nests too deep to be read"
    text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    kind, message = str(status), f"{status}: {without_surrogates(_message(body)[:1000])}"
    if status in _WAIT_STATUSES or status >= 500:
        if status == 429 and _NO_CREDIT.search(text):
            return Failure(kind, message, Remedy.STOP)
        wait_s = retry_after_s(headers.get("retry-after"), time.time())
        return Failure(kind, message, Remedy.WAIT, wait_s, billed_unseen=status in _GATEWAY_TIMEOUTS)
    if status in _CONTENT_FILTER_STATUSES and _CONTENT_FILTER.search(text):
        account_refused = status == 403 and _ACCOUNT.search(message)  # not the content of this request
        return Failure(kind, message, Remedy.STOP if account_refused else Remedy.CONTENT)
    if status in (401, 402, 403) or _KEY.search(text):
        return Failure(kind, message, Remedy.STOP)
    if schema_sent and _FORMAT.search(text):
        return Failure(kind, message, Remedy.TEXT)
    if status == 404 or _UNKNOWN_MODEL.search(text):
        return Failure(kind, message, Remedy.OTHER_MODEL)
    if status in (400, 413, 422) and _TOO_LONG.search(text):
        return Failure(kind, message, Remedy.SHORTER)
    return Failure(kind, message, Remedy.NONE)


def of_exception(error: "APIError | TimeoutError", schema_sent: bool) -> Failure:
    """The failure behind an error of the `openai` client or behind this program's own timeout."""
    import httpx2
    from openai import APIStatusError, APITimeoutError

    from classroom_rl.engines.api.http_client import RedirectRefused, ReplyTooLarge

    if isinstance(error.__cause__, RedirectRefused):
        return Failure("redirect", str(error.__cause__), Remedy.STOP)
    if isinstance(error.__cause__, (httpx2.DecodingError, ReplyTooLarge)):
        return _garbled(f"a reply that cannot be read: {error.__cause__}")
    if isinstance(error, APIStatusError):
        body = error.response.text if error.body is None else error.body
        return of_status(error.status_code, body, error.response.headers, schema_sent)
    if isinstance(error.__cause__, (httpx2.ConnectError, httpx2.ConnectTimeout)):
        return Failure("no connection", f"no connection: {error.__cause__!r}", Remedy.WAIT)
    if isinstance(error, (TimeoutError, APITimeoutError)):
        return Failure("timeout", "no whole reply within request_timeout_s", Remedy.WAIT, billed_unseen=True)
    return Failure("connection broke", f"the connection broke: {error.__cause__!r}", Remedy.WAIT, billed_unseen=True)


def retry_after_s(header: str | None, now: float) -> float:
    """The seconds that a Retry-After header (a number of seconds or a date) asks to wait, at most an hour; 0 if the
    header is missing or unreadable."""
    if header is None:
        return 0.0
    if header.strip().isdecimal():
        return min(float(header), _LONGEST_RETRY_AFTER_S)
    try:
        until = email.utils.parsedate_to_datetime(header).timestamp()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(0.0, until - now), _LONGEST_RETRY_AFTER_S)


def _garbled(message: str) -> Failure:
    """The failure for an unreadable reply, which may have been billed."""
    return Failure("garbled", message, Remedy.WAIT, billed_unseen=True)


def _first_choice(body: dict[str, Any]) -> dict[str, Any]:
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    return first if isinstance(first, dict) else {}


def _refusal(choice: dict[str, Any]) -> str | None:
    """The reason if a content filter or the model itself refused to answer; None for any other reply."""
    reason, message = choice.get("finish_reason"), choice.get("message")
    if isinstance(reason, str) and reason.startswith("content_filter"):
        return f"finish_reason {without_surrogates(reason[:100])}"
    if not isinstance(message, dict):
        return None
    refusal = message.get("refusal")
    if not isinstance(refusal, str) or not refusal.strip() or message.get("content"):
        return None
    return f"a refusal: {without_surrogates(refusal[:300])}"


def _read_usage(usage: Any) -> CallUsage | None:
    """The usage that the provider reports; None if it reports none, or impossible numbers."""
    if not isinstance(usage, dict):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens", 0)
    cost = usage.get("cost")
    if not _is_count(prompt) or not _is_count(completion) or not (cost is None or _is_amount(cost, LARGEST_COST_USD)):
        return None
    return CallUsage(int(prompt), int(completion), None if cost is None else float(cost))


def _is_count(value: Any) -> bool:
    return _is_amount(value, LARGEST_COUNT) and value == int(value)


def _is_amount(value: Any, largest: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= largest


def _status_of(error: Any) -> int:
    """The code of an error object inside a 200; 500 if it has none."""
    code = error.get("code") if isinstance(error, dict) else None
    is_status = isinstance(code, (int, str)) and _ERROR_CODE.fullmatch(str(code))
    return int(code) if is_status else 500


def _message(body: Any) -> str:
    """The provider's error message, followed by that of the upstream provider, if a router passes it on."""
    if isinstance(body, list) and body:  # Gemini wraps its errors in a list
        body = body[0]
    if isinstance(body, dict) and isinstance(body.get("error"), (dict, str)):
        body = body["error"]
    if not isinstance(body, dict):
        return body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    metadata = body.get("metadata")
    upstream = metadata.get("raw") if isinstance(metadata, dict) else None
    return " – ".join(str(part) for part in (body.get("message", body), upstream) if part)
