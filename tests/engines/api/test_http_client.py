"""The rate limits and the spending cap of a chat API's client, with a fake clock and over real HTTP.

No test depends on how long anything takes.
"""

import asyncio
import threading
from collections.abc import Callable

import pytest

from classroom_rl.engines.api.http_client import RateLimiter
from classroom_rl.errors import ProviderFailure, SpendingCapReached
from tests.support.chat_client import LONG, PRICES, Client, in_turn, question
from tests.support.judge_endpoint import Behaviour, Call, Exchange, fails, hangs, judge_endpoint, says

# Speed --------------------------------------------------------------------------------------------------------------


def test_no_more_requests_at_once_than_allowed(tmp_path):
    three = threading.Barrier(3)

    def together(behaviour: Behaviour) -> Behaviour:
        def act(exchange: Exchange) -> None:
            three.wait(60)
            behaviour(exchange)

        return act

    with judge_endpoint(in_turn(together(fails(500)), says("yes"))) as endpoint:
        assert Client(endpoint, tmp_path, max_concurrent_requests=3).ask_all(6) == ["yes"] * 6
    assert endpoint.most_running == 3


class FakeTime:
    def __init__(self):
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def leave(requests_per_minute: int | None, tokens_per_minute: int | None, sizes: list[int], real: int | None = None):
    """When requests of these sizes leave, in seconds after the first, if they all want to at once."""
    fake = FakeTime()
    limiter = RateLimiter(requests_per_minute, tokens_per_minute, fake.clock, fake.sleep)

    async def go() -> list[float]:
        times = []
        for size in sizes:
            reservation = await limiter.reserve(size)
            if real is not None:
                reservation.tokens = real
            times.append(reservation.time - 1000.0)
        return times

    return asyncio.run(go())


def test_requests_are_spread_over_the_minute():
    assert leave(30, None, [1] * 4) == [0, 2, 4, 6]
    assert leave(None, None, [10**9] * 4) == [0, 0, 0, 0]


def test_tokens_of_any_minute_stay_within_the_limit():
    assert leave(None, 100, [60, 40, 60, 40]) == [0, 0, 60, 60]
    assert leave(None, 100, [70, 20, 20]) == [0, 0, 60]
    assert leave(None, 100, [500, 1, 500]) == [0, 60, 120], "a request larger than a minute goes alone"


def test_tokens_that_were_not_used_are_given_back():
    assert leave(None, 100, [60] * 5, real=10) == [0, 0, 0, 0, 0]


def most_in_a_minute(calls: list[Call], size: Callable[[Call], int]) -> int:
    """The most that left in any minute of the client's clock."""
    windows = ([call for call in calls if 0 <= call.sent - first.sent < 60 - 1e-6] for first in calls)
    return max(sum(map(size, window)) for window in windows)


def test_requests_per_minute_hold_over_http_with_repeats_counted(tmp_path):
    def script(body: dict, nth: int) -> Behaviour:
        return fails(500) if nth == 0 and body["messages"][0]["content"].endswith("0") else says("yes")

    with judge_endpoint(script) as endpoint:
        assert Client(endpoint, tmp_path, requests_per_minute=40).ask_all(60) == ["yes"] * 60
    most = most_in_a_minute(endpoint.calls, lambda call: 1)
    print(f"{len(endpoint.calls)} requests, at most {most} in a minute")
    assert len(endpoint.calls) == 66 and 36 < most <= 40


def test_tokens_per_minute_hold_over_http(tmp_path):
    with judge_endpoint(in_turn(says(LONG))) as endpoint:
        assert Client(endpoint, tmp_path, tokens_per_minute=1000).ask_all(40, max_tokens=60) == [LONG] * 40
    most = most_in_a_minute(endpoint.calls, lambda call: call.prompt_tokens + call.completion_tokens)
    print(f"{len(endpoint.calls)} requests, at most {most} tokens in a minute")
    assert 500 < most <= 1000, "without a limit it would be 2200"


# Money --------------------------------------------------------------------------------------------------------------


def test_the_cap_is_never_passed_and_the_run_stops_cleanly_there(tmp_path):
    cap = 0.01
    with judge_endpoint(in_turn(fails(500), says(LONG))) as endpoint:
        client = Client(endpoint, tmp_path, max_cost_usd=cap, **PRICES)
        outcomes = client.ask_all(150, max_tokens=60)
        answered = [outcome for outcome in outcomes if outcome == LONG]
        stopped = [outcome for outcome in outcomes if isinstance(outcome, SpendingCapReached)]
        print(f"cap ${cap}: spent ${client.ledger.spent_usd:.6f}, {len(answered)} of 150 answered")
        assert len(answered) + len(stopped) == 150 and answered and stopped
        assert endpoint.billed_usd == pytest.approx(client.ledger.spent_usd)
        assert client.ledger.reserved_usd == pytest.approx(0)
        assert 0.9 * cap < client.ledger.spent_usd <= cap
        assert "max_cost_usd = 0.01 is reached" in str(stopped[0]) and "Raise it" in str(stopped[0])
        calls = len(endpoint.calls)
        client.ledger.close()
        resumed = Client(endpoint, tmp_path, max_cost_usd=10 * cap, **PRICES)
        assert resumed.ledger.spent_usd == pytest.approx(endpoint.billed_usd)
        assert resumed.ask(question("one more", max_tokens=60)) == LONG
        assert len(endpoint.calls) == calls + 2


def test_what_may_have_been_billed_unseen_counts_against_the_cap(tmp_path):
    with judge_endpoint(in_turn(hangs())) as endpoint:
        client = Client(endpoint, tmp_path, max_cost_usd=0.0012, **PRICES)
        with pytest.raises(SpendingCapReached, match="held for requests that may have been billed unseen"):
            client.ask(question(max_tokens=100))
    reserved = client.ledger.reserved_usd
    assert client.ledger.spent_usd == 0 and endpoint.billed_usd <= reserved <= 0.0012
    assert reserved == pytest.approx(len(endpoint.calls) * (100 * 2.5 + question().max_prompt_tokens * 0.3) / 1e6)


def test_prices_count_where_the_provider_states_no_cost(tmp_path):
    def silent(exchange):
        exchange.bill("yes")
        usage = {"prompt_tokens": 1000, "completion_tokens": 100}
        exchange.send(200, {"choices": [{"message": {"content": "yes"}}], "usage": usage})

    with judge_endpoint(in_turn(silent)) as endpoint:
        client = Client(endpoint, tmp_path, **PRICES)
        client.ask()
    assert client.ledger.spent_usd == pytest.approx(1000 * 0.30e-6 + 100 * 2.50e-6)


def test_prices_that_are_too_low_to_keep_the_cap_stop_the_run(tmp_path):
    with judge_endpoint(in_turn(says(LONG))) as endpoint:
        low = {"usd_per_million_prompt_tokens": 0.001, "usd_per_million_completion_tokens": 0.001}
        client = Client(endpoint, tmp_path, max_cost_usd=1.0, **low)
        with pytest.raises(ProviderFailure, match="correct the prices, or the cap cannot be kept"):
            client.ask()
        assert client.ledger.spent_usd == pytest.approx(endpoint.billed_usd)
        assert client.ledger.find_reply(question().key("first"))[0] == LONG, "it is paid for"


def test_a_prompt_never_has_more_tokens_than_it_is_held_for(tokenizer):
    for text in ("", "a", "über die Brücke", "お名前は何ですか", "🙂" * 9, "\x00\n\t " * 20, "<|im_start|>" * 5):
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert len(tokenizer.encode(prompt)) <= question(text).max_prompt_tokens
