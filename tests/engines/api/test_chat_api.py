"""Requests to a model over real HTTP that misbehaves: what is repeated, when, to which model, and at what cost.

The client's clock is turned (tests/support/turned_clock.py); no test depends on how long anything takes.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest

from classroom_rl.config.models import ApiModelConfig
from classroom_rl.engines.api.call_ledger import LOST, CallLedger
from classroom_rl.engines.api.chat_api import GEMINI_URL, OPENROUTER_URL, ChatApi, ChatRequest
from classroom_rl.errors import ConfigError, ProviderFailure, RequestRefused, StorageError
from classroom_rl.rollout.engine import Sampling
from tests.support.chat_client import LONG, PRICES, Client, in_turn, question
from tests.support.judge_endpoint import (
    Behaviour,
    Exchange,
    JudgeEndpoint,
    Script,
    cut_off,
    drips,
    drips_for_ever,
    empty,
    error_inside,
    fails,
    hangs,
    judge_endpoint,
    no_choices,
    resets,
    says,
)

GENEROUS_S = 60


def by_model(**behaviours: Behaviour) -> Script:
    return lambda body, nth: behaviours[body["model"]]


def waits_for(here: threading.Event, left: threading.Event, then: Behaviour) -> Behaviour:
    """A behaviour that sets the first event and waits for the second."""

    def act(exchange: Exchange) -> None:
        here.set()
        assert left.wait(GENEROUS_S)
        then(exchange)

    return act


# What is sent -------------------------------------------------------------------------------------------------------


def test_a_request_says_what_it_should_and_the_reply_is_taken_down(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret-key")
    with judge_endpoint(in_turn(says("because"))) as endpoint:
        client = Client(endpoint, tmp_path, api_key_env="MY_KEY")
        client.config.vllm.chat_template_kwargs = {"enable_thinking": False}
        assert client.ask(question(schema={"type": "object"})) == "because"
    (call,) = endpoint.calls
    assert call.body.pop("chat_template_kwargs") == {"enable_thinking": False}
    assert call.key == "secret-key"
    schema = call.body.pop("response_format")
    assert schema["type"] == "json_schema" and schema["json_schema"]["schema"] == {"type": "object"}
    assert call.body == {
        "model": "first",
        "messages": [{"role": "user", "content": "why?"}],
        "temperature": 0.6,
        "top_p": 0.9,
        "max_tokens": 50,
    }
    assert client.ledger.spent_usd == pytest.approx(endpoint.billed_usd) and client.ledger.reserved_usd == 0
    key = question(schema={"type": "object"}).key("first", {"enable_thinking": False})
    assert client.ledger.find_reply(key)[0] == "because"
    assert b"secret-key" not in (tmp_path / "calls.sqlite").read_bytes()


def test_requests_differ_in_the_ledger_by_all_that_can_change_the_answer():
    base = question()
    others = [
        question("what?"),
        question(schema={}),
        question(max_tokens=51),
        question(draw=1),
        ChatRequest(base.messages, Sampling(0.7, 0.9, max_tokens=50), None, (0,)),
        ChatRequest([{"role": "system", "content": "why?"}], base.sampling, None, (0,)),
    ]
    assert len({request.key("m") for request in (base, *others)}) == 7
    quiet = {"enable_thinking": False}
    assert base.key("m", {}) == base.key("m") != base.key("m", quiet) != base.key("m", {"enable_thinking": True})
    assert base.key("m") == question().key("m") != base.key("n")


@pytest.mark.parametrize(
    ("options", "url", "variable"),
    [
        ({"use_openrouter": True}, OPENROUTER_URL, "OPENROUTER_API_KEY"),
        ({"use_gemini": True}, GEMINI_URL, "GEMINI_API_KEY"),
        ({"use_openrouter": True, "base_url": "http://127.0.0.1:9/v1"}, "http://127.0.0.1:9/v1", "OPENROUTER_API_KEY"),
        ({"base_url": "http://127.0.0.1:9/v1", "api_key_env": "MY_KEY"}, "http://127.0.0.1:9/v1", "MY_KEY"),
    ],
)
def test_addresses_and_keys(options, url, variable, tmp_path, monkeypatch):
    monkeypatch.delenv(variable, raising=False)
    ledger = CallLedger(tmp_path / "calls.sqlite")
    with pytest.raises(ConfigError, match=f"set the environment variable {variable}"):
        ChatApi(ApiModelConfig(**options), ledger, "judge")
    monkeypatch.setenv(variable, "k")
    api = ChatApi(ApiModelConfig(**options), ledger, "judge")
    assert str(api._client.base_url).rstrip("/") == url.rstrip("/") and api._client.api_key == "k"


def test_a_bare_address_is_asked_without_anybodys_key_and_next_door_without_a_proxy(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "for another house")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with judge_endpoint(in_turn(says("yes"))) as endpoint:
        assert Client(endpoint, tmp_path).ask() == "yes"
    assert endpoint.calls[0].key == "none"


# What is asked again ------------------------------------------------------------------------------------------------

MENDED_BY_WAITING = {
    "429": fails(429),
    "500": fails(500),
    "502": fails(502),
    "503": fails(503),
    "408": fails(408),
    "reset": resets(),
    "hang": hangs(),
    "slow drip": drips_for_ever(LONG),
    "error in 200": error_inside(),
    "no choices": no_choices(),
    "empty": empty(),
    "429 in 200": error_inside(429),
}


@pytest.mark.parametrize("name", MENDED_BY_WAITING)
def test_is_asked_again(name, tmp_path):
    with judge_endpoint(in_turn(MENDED_BY_WAITING[name], MENDED_BY_WAITING[name], says("yes"))) as endpoint:
        client = Client(endpoint, tmp_path, **PRICES)
        assert client.ask() == "yes"
    assert len(endpoint.calls) == 3 and sum(client.ledger.outcomes.values()) == 3
    unseen = [call for call in endpoint.calls if call.billed_usd and not call.stated or call.behaviour == "slow drip"]
    stated = [call for call in endpoint.calls if call not in unseen]
    assert client.ledger.spent_usd == pytest.approx(sum(call.billed_usd for call in stated))
    assert client.ledger.reserved_usd >= sum(call.billed_usd for call in unseen)
    assert bool(client.ledger.reserved_usd) == (name in ("reset", "hang", "slow drip", "408"))


def test_a_reply_that_comes_slowly_but_in_time_counts(tmp_path):
    with judge_endpoint(in_turn(drips(LONG, 0.4))) as endpoint:
        assert Client(endpoint, tmp_path).ask() == LONG
    assert len(endpoint.calls) == 1


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_holds_every_request_to_the_model(form, tmp_path):
    """Six requests fail at once; none is repeated before the time that the provider asked for."""
    after = "1000" if form == "seconds" else formatdate(time.time() + 1600, usegmt=True)  # ten minutes until it is read
    with judge_endpoint(in_turn(fails(429, retry_after=after), says("yes"))) as endpoint:
        assert Client(endpoint, tmp_path).ask_all(6) == ["yes"] * 6
    first = max(call.sent for call in endpoint.of("429 with Retry-After"))
    retried = min(call.sent for call in endpoint.of("says"))
    assert len(endpoint.calls) == 12 and retried - first >= 1000


def test_pauses_grow(tmp_path):
    with judge_endpoint(in_turn(*[fails(500)] * 5, says("yes"))) as endpoint:
        assert Client(endpoint, tmp_path).ask() == "yes"
    times = [call.sent for call in endpoint.calls]
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert all(gap >= 0.5 * 2**i for i, gap in enumerate(gaps)), gaps


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (fails(401, "No auth credentials found"), "No auth credentials found.*No key was sent.*api_key_env"),
        (fails(402, "Insufficient credits"), "Insufficient credits"),
        (fails(403, 'Key has no {"access"}'), 'Key has no {"access"}'),
        (fails(429, {"code": "insufficient_quota", "message": "quota used up"}), "quota used up"),
        (fails(400, "API key not valid"), "API key not valid"),
        (fails(404, "The model `first` does not exist"), "does not exist.*model_name_or_path"),
        (fails(400, "first is not a valid model ID"), "not a valid model ID.*model_name_or_path"),
        (error_inside(402), "402: upstream failed"),
    ],
)
def test_what_no_waiting_mends_stops_at_once_with_the_providers_words(behaviour, words, tmp_path):
    with judge_endpoint(in_turn(behaviour)) as endpoint:
        client = Client(endpoint, tmp_path)
        with pytest.raises(ProviderFailure, match=f"(?s)The judge first .*{words}"):
            client.ask()
    assert len(endpoint.calls) == 1


def test_a_request_that_is_refused_hurts_no_other(tmp_path):
    def script(body: dict, nth: int) -> Behaviour:
        refused = "question 1" in body["messages"][0]["content"]
        return fails(400, "the context is too long") if refused else says("yes")

    with judge_endpoint(script) as endpoint:
        outcomes = Client(endpoint, tmp_path).ask_all(3)
    assert outcomes[0] == outcomes[2] == "yes" and len(endpoint.calls) == 3
    assert isinstance(outcomes[1], RequestRefused) and "the context is too long" in str(outcomes[1])


# Response formats ---------------------------------------------------------------------------------------------------


def takes_no_schema(body: dict, nth: int) -> Behaviour:
    return fails(400, "This response_format type is unavailable now") if "response_format" in body else says("yes")


def test_a_model_that_takes_no_schema_is_asked_in_plain_text_from_then_on(tmp_path, caplog):
    with judge_endpoint(takes_no_schema) as endpoint:
        client = Client(endpoint, tmp_path, max_concurrent_requests=1)
        assert client.ask_all(4, schema={"type": "object"}) == ["yes"] * 4
    assert ["response_format" in call.body for call in endpoint.calls] == [True] + [False] * 4
    assert sum("takes no JSON schema" in record.message for record in caplog.records) == 1


def test_a_schema_that_must_be_taken_stops_where_it_is_not(tmp_path):
    with judge_endpoint(takes_no_schema) as endpoint:
        client = Client(endpoint, tmp_path, response_format="json_schema")
        with pytest.raises(ProviderFailure, match="Set judge_model.response_format=text"):
            client.ask(question(schema={"type": "object"}))


def test_text_sends_no_schema(tmp_path):
    with judge_endpoint(takes_no_schema) as endpoint:
        Client(endpoint, tmp_path, response_format="text").ask(question(schema={"type": "object"}))
    assert len(endpoint.calls) == 1


# Fallback models ----------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_exist_is_replaced_by_the_next(tmp_path, caplog):
    with judge_endpoint(by_model(first=fails(404), second=fails(404), third=says("third"))) as endpoint:
        client = Client(endpoint, tmp_path, fallback_models=["second", "third"], max_concurrent_requests=1)
        assert client.ask_all(3) == ["third"] * 3
    assert [call.body["model"] for call in endpoint.calls] == ["first", "second", "third", "third", "third"]
    assert "The judge first " in caplog.text and "is not there" in caplog.text


def test_when_no_model_exists_the_run_stops(tmp_path):
    with (
        judge_endpoint(by_model(first=fails(404), second=fails(404))) as endpoint,
        pytest.raises(ProviderFailure, match="The judge second .* is not there"),
    ):
        Client(endpoint, tmp_path, fallback_models=["second"]).ask()
    assert len(endpoint.calls) == 2


def test_a_model_that_was_put_there_after_a_stop_is_found(tmp_path):
    async def stop_and_go_on(api: ChatApi) -> str:
        with pytest.raises(ProviderFailure, match="is not there"):
            await api.ask(question())
        return (await api.ask(question())).text

    with judge_endpoint(in_turn(fails(404), says("pulled"))) as endpoint:
        assert Client(endpoint, tmp_path).run(stop_and_go_on) == "pulled"


def test_a_model_that_was_missed_by_a_request_that_nobody_waits_for_is_looked_for_again(tmp_path):
    """As after a stop: the requests beside the one that raised it are left alone, and land afterwards."""
    arrived, left = threading.Event(), threading.Event()

    async def leave_and_come_back(api: ChatApi) -> str:
        asking = asyncio.create_task(api.ask(question()))
        assert await asyncio.to_thread(arrived.wait, GENEROUS_S)
        asking.cancel()
        await asyncio.sleep(0)
        left.set()
        await api.drain()
        return (await api.ask(question())).text

    with judge_endpoint(in_turn(waits_for(arrived, left, fails(404)), says("pulled"))) as endpoint:
        assert Client(endpoint, tmp_path, deadline_s=60.0).run(leave_and_come_back) == "pulled"


def test_a_model_that_is_down_is_replaced_and_looked_after_now_and_then(tmp_path):
    with judge_endpoint(by_model(first=fails(503), second=says("second"))) as endpoint:
        client = Client(endpoint, tmp_path, fallback_models=["second"], max_concurrent_requests=4)
        assert client.ask_all(40) == ["second"] * 40
    seconds = endpoint.calls[-1].sent - endpoint.calls[0].sent
    requests = sum(call.body["model"] == "first" for call in endpoint.calls)
    probes = 4 + seconds / 60  # after 5, 10, 20 and 40 seconds, then once a minute
    assert 8 <= requests <= 8 + 4 + probes, "eight failures in a row, those on their way, and now and then one"


def test_a_model_that_is_back_is_asked_again(tmp_path):
    down = {"first": True}

    def script(body: dict, nth: int) -> Behaviour:
        return fails(503) if down[body["model"]] else says("back")

    async def outage(api: ChatApi) -> list:
        answers = asyncio.gather(*(api.ask(question(f"question {i}")) for i in range(12)))
        await asyncio.sleep(10)
        down["first"] = False
        return await answers

    with judge_endpoint(script) as endpoint:
        assert [answer.text for answer in Client(endpoint, tmp_path).run(outage)] == ["back"] * 12
    assert len(endpoint.of("503")) <= 16, "while it is down only single requests look whether it is back"


# Deadlines ----------------------------------------------------------------------------------------------------------


def test_a_provider_that_stays_down_is_waited_for_and_then_the_run_stops(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    with judge_endpoint(in_turn(fails(503, "maintenance"))) as endpoint:
        client = Client(endpoint, tmp_path, deadline_s=100.0)
        outcomes = client.ask_all(20)
    assert all(isinstance(outcome, ProviderFailure) for outcome in outcomes)
    assert "deadline_s = 100 s; the last failure: 503: maintenance" in str(outcomes[0])
    assert endpoint.calls[-1].sent - endpoint.calls[0].sent >= 50
    beats = [record for record in caplog.records if "waiting for the judge first: no answer for" in record.message]
    assert 1 <= len(beats) <= 4, "one line in thirty seconds, not one for each request"
    assert len(endpoint.calls) < 2 * 20 and client.ledger.reserved_usd == 0, "one asks for all until it is back"


def test_while_a_provider_is_down_its_client_says_for_how_long_and_why(tmp_path):
    """By a clock that only the test turns: each pause takes a minute."""
    now, troubles = [0.0], []

    async def outage() -> None:
        async def pause(_: float) -> None:
            troubles.append(api.trouble)
            now[0] += 60.0

        api = ChatApi(config, ledger, "judge", clock=lambda: now[0], sleep=pause)
        assert api.trouble is None, "nobody waits"
        with pytest.raises(ProviderFailure):
            await api.ask(question())
        assert api.trouble is None, "nobody waits any more"
        await api._client.close()

    with judge_endpoint(in_turn(says("?"))) as endpoint:
        config = ApiModelConfig("first", base_url=endpoint.url, deadline_s=150.0)
    ledger = CallLedger(tmp_path / "calls.sqlite")
    asyncio.run(outage())
    ledger.close()
    first, second, *_ = troubles
    assert first is None, "it has only just failed"
    assert second.startswith("no answer for 60 s, given up after 150 s; the last failure: no connection: ConnectError(")


def test_a_provider_that_cannot_be_reached_holds_no_money(tmp_path):
    with judge_endpoint(in_turn(says("?"))) as endpoint:
        pass
    client = Client(endpoint, tmp_path, deadline_s=30.0, max_cost_usd=0.001, **PRICES)
    with pytest.raises(ProviderFailure, match="no connection"):
        client.ask()
    assert client.ledger.reserved_usd == 0


@pytest.mark.parametrize("others", [5, 40], ids=["others are soon done", "others go on"])
def test_one_request_that_never_succeeds_fails_alone(others, tmp_path):
    def script(body: dict, nth: int) -> Behaviour:
        return fails(500) if body["messages"][0]["content"] == "poison" else says("yes")

    async def with_others(api: ChatApi) -> None:
        poisoned = asyncio.create_task(api.ask(question("poison")))
        for i in range(others):
            await api.ask(question(f"question {i}"))
            await asyncio.sleep(3)
        with pytest.raises(RequestRefused, match="Other requests were answered meanwhile"):
            await poisoned

    with judge_endpoint(script) as endpoint:
        Client(endpoint, tmp_path, deadline_s=100.0).run(with_others)


# Stopping -----------------------------------------------------------------------------------------------------------


@contextmanager
def left_early(folder: Path) -> Iterator[tuple[Client, Callable[[ChatApi], Awaitable[None]], JudgeEndpoint]]:
    """A client, and work of it that leaves a request before it is answered."""
    arrived, left = threading.Event(), threading.Event()

    async def leave(api: ChatApi) -> None:
        asking = asyncio.create_task(api.ask(question()))
        assert await asyncio.to_thread(arrived.wait, GENEROUS_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        left.set()
        await api.drain()

    with judge_endpoint(in_turn(waits_for(arrived, left, says("yes")))) as endpoint:
        yield Client(endpoint, folder), leave, endpoint


def test_a_reply_that_nobody_waits_for_any_more_is_still_taken_down(tmp_path):
    with left_early(tmp_path) as (client, leave, endpoint):
        client.run(leave)
        assert client.ledger.find_reply(question().key("first"))[0] == "yes"
        assert client.ledger.spent_usd == pytest.approx(endpoint.billed_usd)


def test_an_error_that_nobody_waits_for_any_more_is_logged(tmp_path, monkeypatch, caplog):
    def full(*_args, **_named) -> None:
        raise StorageError("the disk is full")

    with left_early(tmp_path) as (client, leave, _endpoint):
        monkeypatch.setattr(client.ledger, "settle", full)
        client.run(leave)
    assert "the disk is full" in caplog.text


def test_a_program_that_ends_keeps_what_was_on_its_way_held(tmp_path):
    arrived = threading.Event()

    async def end(api: ChatApi) -> None:
        asyncio.create_task(api.ask(question()))  # noqa: RUF006
        assert await asyncio.to_thread(arrived.wait, GENEROUS_S)
        api._in_flight.copy().pop().cancel()

    def hang(exchange: Exchange) -> None:
        exchange.bill()
        arrived.set()
        hangs()(exchange)

    with judge_endpoint(in_turn(hang)) as endpoint:
        client = Client(endpoint, tmp_path, **PRICES)
        client.run(end)
    assert client.ledger.outcomes == {("first", LOST): 1} and client.ledger.reserved_usd >= endpoint.billed_usd > 0


def test_cut_answers_and_prose_are_answers_here(tmp_path):
    with judge_endpoint(in_turn(cut_off(json.dumps({"a": LONG})))) as endpoint:
        assert Client(endpoint, tmp_path).ask().startswith('{"a"')
    assert len(endpoint.calls) == 1
