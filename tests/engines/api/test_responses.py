"""The replies of providers, and how each is classified."""

import json

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.engines.api.call_ledger import CallUsage
from classroom_rl.engines.api.responses import (
    Answer,
    Failure,
    Remedy,
    of_exception,
    of_status,
    read_body,
    retry_after_s,
)

WAIT, TEXT, OTHER_MODEL, NONE, STOP = Remedy.WAIT, Remedy.TEXT, Remedy.OTHER_MODEL, Remedy.NONE, Remedy.STOP
CONTENT, SHORTER = Remedy.CONTENT, Remedy.SHORTER
USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107, "cost": 0.00021}
GEMINI_KEY = [{"error": {"code": 400, "message": "API key not valid.", "status": "INVALID_ARGUMENT"}}]
BEHIND = {"message": "Provider returned error", "code": 400, "metadata": {"raw": '{"error": "response_schema is bad"}'}}


def body(**changes) -> str:
    message = {"role": "assistant", "content": "hello"}
    reply = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": USAGE}
    return json.dumps(reply | changes)


def choice(content, finish_reason="stop") -> list:
    return [{"message": {"content": content}, "finish_reason": finish_reason}]


def test_an_answer_with_its_figures():
    assert read_body(body(), True) == Answer("hello", False, CallUsage(100, 7, 0.00021))
    without_cost = {name: value for name, value in USAGE.items() if name != "cost"}
    assert read_body(body(usage=without_cost), True).usage == CallUsage(100, 7, None)


@pytest.mark.parametrize("content", ["half a", "", None])
def test_a_cut_answer_is_an_answer_because_asking_again_would_cost_the_same(content):
    answer = read_body(body(choices=choice(content, "length")), True)
    assert (answer.text, answer.cut) == (content or "", True)


@pytest.mark.parametrize(
    "usage",
    [
        *(None, {}, "much", {"prompt_tokens": -1}, {"prompt_tokens": "9"}, {"prompt_tokens": 1, "cost": float("inf")}),
        *(USAGE | {"prompt_tokens": count} for count in (2**63, 1e300, float("nan"), 1.5, True, 10**9 + 1)),
        *(USAGE | {"completion_tokens": count} for count in (2**63, 1e300, -1, "7", None, [7])),
        *(USAGE | {"cost": cost} for cost in (1e300, float("nan"), -0.1, "free", 10_001)),
    ],
)
def test_figures_that_cannot_be_are_none_and_the_answer_counts(usage):
    answer = read_body(body(usage=usage), True)
    assert (answer.text, answer.usage) == ("hello", None)


@pytest.mark.parametrize(
    ("text", "kind", "unseen"),
    [
        ("<html>Bad gateway</html>", "garbled", True),
        (body()[:-10], "garbled", True),
        ("[]", "garbled", True),
        ('{"a":' * 100_000, "garbled", True),
        ('{"error": ' + '{"a":' * 400 + "1" + "}" * 401, "garbled", True),
        ('{"error": {"code": ' + "9" * 5000 + "}}", "garbled", True),
        (body(error={"code": "9" * 5000, "message": "x"}), "error in 200", False),
        (body(error={"code": [500], "message": "x"}), "error in 200", False),
        (body(choices=[]), "no choices", False),
        (body(choices=None), "no choices", False),
        (json.dumps({"id": "x"}), "no choices", True),
        (body(choices=choice("")), "empty", False),
        (body(choices=choice(" \n")), "empty", False),
        (body(choices=choice(None), usage=None), "empty", True),
        (body(choices=[{"message": "?"}]), "empty", False),
        (body(error={"code": 502, "message": "upstream"}), "error in 200", False),
        (body(error={"message": "upstream"}, usage=None), "error in 200", True),
        (body(error={"code": 429, "message": "slow down"}, usage=None), "error in 200", False),
        (body(choices=[{"error": {"code": 503, "message": "x"}, "finish_reason": "error"}]), "error in 200", False),
    ],
)
def test_a_200_that_is_no_answer_is_waited_out(text, kind, unseen):
    failure = read_body(text, True)
    assert (failure.kind, failure.remedy, failure.billed_unseen) == (kind, WAIT, unseen)


@pytest.mark.parametrize(
    "said",
    [
        {"finish_reason": "content_filter", "message": {"content": None}},
        {"finish_reason": "content_filter", "message": {"content": '{"decision": "OK"'}},
        {"finish_reason": "content_filter: SAFETY", "message": {"content": ""}},
        {"finish_reason": "stop", "message": {"content": None, "refusal": "I can't help with that."}},
        {"finish_reason": "stop", "message": {"content": None, "refusal": "I can't help with \ud800."}},
        {"finish_reason": "content_filter \udfff", "message": {"content": None}},
    ],
)
def test_a_200_that_refuses_the_content(said):
    failure = read_body(body(choices=[said]), True)
    assert (failure.kind, failure.remedy, failure.billed_unseen) == ("filtered", CONTENT, False)
    assert failure.message.encode(), "it can be kept"


def test_an_answer_of_completions_may_be_empty_where_a_stop_text_may_come_first():
    assert read_body(body(choices=[{"text": " Yes.", "finish_reason": "stop"}]), False).text == " Yes."
    empty = body(choices=[{"text": "", "finish_reason": "stop"}])
    assert read_body(empty, False, may_be_empty=True).text == "" and read_body(empty, False).kind == "empty"


def test_an_answer_beside_an_empty_refusal_is_an_answer():
    api_choice = {"finish_reason": "stop", "message": {"content": "Yes.", "refusal": None}}
    assert read_body(body(choices=[api_choice]), True).text == "Yes."


def test_an_error_inside_a_200_that_no_waiting_mends():
    failure = read_body(json.dumps({"error": {"code": 402, "message": "Insufficient credits"}}), True)
    assert (failure.remedy, failure.message) == (STOP, "402: Insufficient credits")


@pytest.mark.parametrize(
    ("status", "error", "remedy"),
    [
        *((status, "later", WAIT) for status in (408, 409, 425, 429, 500, 502, 503, 504, 524, 529)),
        (429, {"code": "insufficient_quota", "message": "You exceeded your current quota"}, STOP),
        (401, "No auth credentials found", STOP),
        (402, "Insufficient credits", STOP),
        (403, "Forbidden", STOP),
        (403, {"message": "Input was flagged", "metadata": {"reasons": ["violence"]}}, CONTENT),
        (400, {"code": "content_filter", "message": "The response was filtered by the content policy"}, CONTENT),
        (400, {"code": "content_policy_violation", "message": "?"}, CONTENT),
        (400, {"code": "data_inspection_failed", "message": "Input data may contain inappropriate content."}, CONTENT),
        (400, "blocked: PROHIBITED_CONTENT", CONTENT),
        (503, "the moderation service is down", WAIT),
        (401, "flagged", STOP),
        (400, GEMINI_KEY, STOP),
        (404, "The model `x` does not exist.", OTHER_MODEL),
        (404, 'model "x" not found, try pulling it first', OTHER_MODEL),
        (404, "No endpoints found for x/y", OTHER_MODEL),
        (400, "x/y is not a valid model ID", OTHER_MODEL),
        (400, {"code": "model_not_found", "message": "?"}, OTHER_MODEL),
        (400, "This response_format type is unavailable now", TEXT),
        (400, BEHIND, TEXT),
        (422, {"detail": [{"loc": ["body", "response_format"], "msg": "unexpected"}]}, TEXT),
        (405, "json_object response format is not supported for model: m", TEXT),
        (400, "This model's maximum context length is 8192 tokens. However, you requested 9000.", SHORTER),
        (400, {"code": "context_length_exceeded", "message": "?"}, SHORTER),
        (403, "Project `proj_1` does not have access to moderation models", STOP),
        (403, {"message": "Your account has been flagged for a review", "code": "account_flagged"}, STOP),
        (403, "Your organisation was flagged", STOP),
        (403, {"message": "Input was flagged", "metadata": {"flagged_input": "my account"}}, CONTENT),
        (413, "too large", NONE),
    ],
)
def test_what_a_status_means(status, error, remedy):
    wrapped = error if isinstance(error, list) else {"error": error}
    failure = of_status(status, wrapped, {}, schema_sent=True)
    assert (failure.kind, failure.remedy) == (str(status), remedy)
    assert failure.message.startswith(f"{status}: ") and failure.billed_unseen == (status in (408, 504, 524))


def test_a_refused_format_that_was_not_sent_is_a_refusal():
    assert of_status(400, {"error": "response_format?"}, {}, schema_sent=False).remedy is NONE


def test_the_words_of_the_provider_behind_the_provider_are_told():
    assert of_status(400, {"error": BEHIND}, {}, True).message == (
        '400: Provider returned error – {"error": "response_schema is bad"}'
    )


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0),
        ("7", 7),
        (" 120 ", 120),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40),
        ("Thu, 01 Jan 1970 00:00:30 GMT", 0),
        ("soon", 0),
        ("", 0),
        ("-5", 0),
        ("nan", 0),
        ("9" * 5000, 3600),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 3600),
        ("Jan 99999999999999999999 : 23:59:59 99999999999999999999 Jan 0", 0),
    ],
)
def test_retry_after_is_seconds_or_a_date(header, seconds):
    assert retry_after_s(header, now=60.0) == seconds


def test_retry_after_counts_on_a_429_and_on_a_503():
    assert of_status(429, "x", {"retry-after": "9"}, True).retry_after_s == 9
    assert of_status(503, "x", {"retry-after": "9"}, True).retry_after_s == 9


def raised(error: openai.APIError, cause: Exception | None = None) -> Failure:
    error.__cause__ = cause
    return of_exception(error, schema_sent=True)


def test_a_connection_that_never_was_costs_nothing_and_one_that_broke_may():
    request = httpx2.Request("POST", "http://x")
    never = raised(openai.APIConnectionError(request=request), httpx2.ConnectError("refused"))
    too_slow = raised(openai.APITimeoutError(request=request), httpx2.ConnectTimeout("no route"))
    broke = raised(openai.APIConnectionError(request=request), httpx2.ReadError("reset"))
    hung = of_exception(TimeoutError(), schema_sent=True)
    assert [failure.kind for failure in (never, too_slow, broke, hung)] == [
        *("no connection", "no connection", "connection broke", "timeout")
    ]
    assert [failure.billed_unseen for failure in (never, too_slow, broke, hung)] == [False, False, True, True]
    assert {failure.remedy for failure in (never, too_slow, broke, hung)} == {WAIT}


HALVES = st.text(st.characters(categories=["Cs", "Ll"]), max_size=5)
TEXT = st.text(max_size=5) | HALVES
DEEP = st.integers(1, 900).map(lambda depth: json.loads("[" * depth + "]" * depth))
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.integers(2**62) | TEXT | DEEP,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)
COUNT = st.sampled_from([2**63, 1e300, float("nan"), -1, "9", 7, 10**4299])
USAGES = st.fixed_dictionaries({"prompt_tokens": COUNT}, optional={"completion_tokens": COUNT, "cost": COUNT | JSON})
ERROR = st.fixed_dictionaries(
    {"code": JSON | COUNT | st.just("4" * 5000)}, optional={"message": JSON, "metadata": JSON}
)
MESSAGE = st.fixed_dictionaries({"content": JSON | TEXT})
CHOICE = st.fixed_dictionaries(
    {}, optional={"message": MESSAGE | JSON, "finish_reason": JSON | st.just("length"), "error": ERROR | JSON}
)
BODY = st.fixed_dictionaries(
    {}, optional={"choices": st.lists(CHOICE | JSON) | JSON, "usage": USAGES | JSON, "error": ERROR | JSON}
)
REPLIES = st.text() | (BODY | JSON).map(json.dumps)


def check_that_it_can_be_kept(outcome: Answer | Failure) -> None:
    """In UTF-8, and in SQLite's 64-bit integers."""
    assert (outcome.text if isinstance(outcome, Answer) else outcome.kind + outcome.message).encode() is not None
    if outcome.usage is not None:
        tokens = (outcome.usage.prompt_tokens, outcome.usage.completion_tokens)
        assert all(type(count) is int and 0 <= count <= 10**9 for count in tokens)
        assert outcome.usage.cost_usd is None or 0 <= outcome.usage.cost_usd <= 10_000


@given(REPLIES, st.booleans())
def test_any_body_is_an_answer_or_a_failure_that_can_be_kept(text, schema_sent):
    outcome = read_body(text, schema_sent)
    assert isinstance(outcome, (Answer, Failure))
    check_that_it_can_be_kept(outcome)


@given(st.integers(300, 599), st.text() | JSON | ERROR, st.booleans())
def test_any_status_and_body_is_a_failure_with_a_message(status, error, schema_sent):
    failure = of_status(status, error, {}, schema_sent)
    assert failure.message.startswith(str(status))
    check_that_it_can_be_kept(failure)


@given(st.text() | st.datetimes().map(lambda at: at.strftime("%a, %d %b %Y %H:%M:%S -9999")))
def test_any_retry_after_is_an_hour_at_most(header):
    assert 0 <= retry_after_s(header, now=60.0) <= 3600
