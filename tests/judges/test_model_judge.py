"""A whole classroom with a judge over real HTTP that misbehaves: rewards, costs, stops, and what is stored.

The clock of the judge's pauses and deadlines is turned (tests/support/turned_clock.py).
"""

import json
import random
import re
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.load import record_run
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.engines.api.call_ledger import UNUSABLE, USABLE, CallLedger
from classroom_rl.errors import ProviderFailure, SpendingCapReached, StorageError
from classroom_rl.evaluation.rejudge import main, rejudge
from classroom_rl.rollout.engine import Usage
from classroom_rl.rollout.store.journal import read_journal
from tests.support.judge_endpoint import (
    USD_PER_COMPLETION_TOKEN,
    USD_PER_PROMPT_TOKEN,
    Behaviour,
    JudgeEndpoint,
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
from tests.support.judged_room import GOOD, OUT_OF_RANGE, PRICES, Server, always, verdict, verdicts_of

# A bad day -----------------------------------------------------------------------------------------------------------

NEVER_USABLE = 29
"""Every conversation whose number this divides gets prose from the judge, whatever happens."""


def number_of(body: dict) -> int:
    return int(re.search(r"lesson number (\d+)", body["messages"][0]["content"])[1])


def scores_of(number: int) -> tuple[float, float, float]:
    return (number % 11) / 10, (number % 7) / 8, number % 5


def full_reward(number: int) -> float:
    """What a conversation's scores are worth, by the formula in docs/classroom.md."""
    task_final, progression, momentum = scores_of(number)
    return round(0.4 * task_final + 0.4 * progression + 0.2 * momentum / 10, 4)


def right_reward(number: int) -> float | None:
    """What a conversation's reward must be."""
    if number % NEVER_USABLE == 0:
        return None
    reward = full_reward(number)
    return reward if reward >= 0.3 else max(0.0, round(reward - 0.25, 4))


def bad_day(body: dict, nth: int) -> Behaviour:
    """30 % of the calls fail, in any of these ways; conversation and number of the call fix which do."""
    number = number_of(body)
    good = verdict(*scores_of(number))
    unusable = [cut_off(good), says("A fine lesson, I would say.", "prose"), says(OUT_OF_RANGE, "out of range")]
    if number % NEVER_USABLE == 0:
        return unusable[1]
    waits = [fails(429), fails(429, retry_after="3"), fails(500), fails(502), fails(503), resets(), hangs()]
    waits += [drips_for_ever(good), error_inside(), no_choices(), empty()]
    chance = random.Random(f"{number} {nth}")
    if chance.random() >= 0.3:
        return drips(good, 0.2) if chance.random() < 0.05 else says(good)
    return chance.choice(waits + unusable if nth < 2 else waits)


def test_256_conversations_on_a_bad_day(room, judged):
    numbers = list(range(1, 257))
    limits = {"max_concurrent_requests": 32, "requests_per_minute": 24_000}
    with judge_endpoint(bad_day) as endpoint:
        server = Server(room, judged, endpoint.url, **limits, **PRICES)
        response = server.sample([f"lesson number {number}" for number in numbers])
    rewards = [record.reward for record in response.conversations]
    assert rewards == [right_reward(number) for number in numbers]
    assert rewards.count(None) == 256 // NEVER_USABLE and rewards.count(0.0) > 0
    assert endpoint.most_running <= 32
    failed = [call for call in endpoint.calls if call.behaviour not in ("says", "drip", "prose")]
    assert 0.2 < len(failed) / len(endpoint.calls) < 0.4
    assert_money_is_right(endpoint, server.ledger)
    with closing(CallLedger(server.ledger.path)) as ledger:
        assert response.usage["judge"] == ledger.usage("r")


def assert_money_is_right(endpoint: JudgeEndpoint, ledger: CallLedger) -> None:
    """Every reply that came whole is booked as billed; every other that was billed is held at its worst case."""
    unseen = [call for call in endpoint.calls if call.behaviour in ("reset", "hang", "slow drip")]
    received = [call for call in endpoint.calls if call.stated and call not in unseen]
    assert ledger.spent_usd == pytest.approx(sum(call.billed_usd for call in received))
    assert ledger.prompt_tokens == sum(call.prompt_tokens for call in received)
    assert ledger.completion_tokens == sum(call.completion_tokens for call in received)
    worst = [(len(call.prompt.encode()) * USD_PER_PROMPT_TOKEN + 200 * USD_PER_COMPLETION_TOKEN) for call in unseen]
    assert ledger.reserved_usd >= sum(worst) >= sum(call.billed_usd for call in unseen) > 0
    assert ledger.spent_usd + ledger.reserved_usd >= endpoint.billed_usd


# Attempts and replies -----------------------------------------------------------------------------------------------


@pytest.fixture
def once(judged: GenerationConfig) -> GenerationConfig:
    """One attempt for each conversation."""
    return replace(judged, number_judge_attempts=1)


def test_an_attempt_takes_new_replies_until_one_holds_a_verdict(room, once):
    replies = [cut_off(GOOD), fails(500), says(OUT_OF_RANGE), says(GOOD)]
    with judge_endpoint(lambda body, nth: replies[nth]) as endpoint:
        server = Server(room, once, endpoint.url)
        response = server.sample(["lesson"])
    usage = response.usage["judge"]
    assert response.conversations[0].reward == 0.7 and len(endpoint.calls) == 4
    assert (usage.calls, usage.unusable, usage.failures) == (4, 2, {"500": 1})
    assert server.ledger.outcomes == {("judge", UNUSABLE): 2, ("judge", "500"): 1, ("judge", USABLE): 1}
    assert usage.cost_usd == pytest.approx(endpoint.billed_usd), "unusable replies are paid for, too"


def test_an_attempt_without_a_verdict_says_what_the_judge_answered(room, once):
    with judge_endpoint(always(cut_off(GOOD))) as endpoint:
        response = Server(room, once, endpoint.url).sample(["lesson"])
        assert len(endpoint.calls) == 3
    failed = response.conversations[0].verdicts[0]
    assert response.conversations[0].reward is None and not failed.valid
    assert failed.raw == GOOD[: len(GOOD) // 2] and "was cut off" in failed.error


def test_an_attempt_that_is_made_again_takes_new_replies(room, once):
    with judge_endpoint(lambda body, nth: says("prose") if nth < 4 else says(GOOD)) as endpoint:
        assert Server(room, once, endpoint.url).sample(["lesson"]).conversations[0].reward is None
        repeated = Server(room, once, endpoint.url).sample(["lesson"])
        assert repeated.conversations[0].reward is None and len(endpoint.calls) == 3
        rejudged = Server(room, once, endpoint.url).sample(["lesson"], judge_again=True)
        assert rejudged.conversations[0].reward == 0.7 and len(endpoint.calls) == 5


# Kept, and found again ----------------------------------------------------------------------------------------------


def test_a_verdict_that_was_paid_for_is_found_again_under_another_request(room, judged):
    """As after a kill between a reply and the journal: nothing is asked twice, and the answer is the same."""
    problems = [f"lesson number {number}" for number in range(1, 9)]
    with judge_endpoint(bad_day) as endpoint:
        first = Server(room, judged, endpoint.url).sample(problems)
        call_count = len(endpoint.calls)
        (room.folder / "journal.jsonl").unlink()
        server = Server(room, judged, endpoint.url)
        second = server.sample(problems, request_id="another")
        assert len(endpoint.calls) == call_count
    assert [record.reward for record in second.conversations] == [record.reward for record in first.conversations]
    assert second.usage["judge"] == Usage(run_cost_usd=pytest.approx(first.usage["judge"].run_cost_usd))


def test_other_sampling_or_another_model_is_asked_anew(room, once):
    with judge_endpoint(always(says(GOOD))) as endpoint:
        for request_id, options in enumerate(({}, {"model_name_or_path": "other"}, {"response_format": "text"}, {})):
            Server(room, once, endpoint.url, **options).sample(["lesson"], request_id=f"r{request_id}")
    assert [call.body["model"] for call in endpoint.calls] == ["judge", "other", "judge"]


def test_a_run_can_be_judged_again_from_its_journal_without_a_network(room, judged):
    numbers = [1, 2, 3, NEVER_USABLE]
    with judge_endpoint(bad_day) as endpoint:
        server = Server(room, judged, endpoint.url)
        response = server.sample([f"lesson number {number}" for number in numbers])
    config = TrainRLConfig(judge_model=server.config, generation=replace(judged, max_tokens_per_judge_attempt=200))
    lines = (room.folder / "journal.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    ended = [line for line in lines if line.startswith('{"event": "conversation"')]
    ended.sort(key=lambda line: json.loads(line)["conversation"], reverse=True)  # as if the last had ended first
    rest = [line for line in lines if line not in ended]
    (room.folder / "journal.jsonl").write_text("".join(rest + ended), encoding="utf-8")
    rejudged = rejudge(room.folder, config)
    assert [conversation.now for conversation in rejudged] == [right_reward(number) for number in numbers]
    assert [conversation.before for conversation in rejudged] == [record.reward for record in response.conversations]
    assert [v.scores for conversation in rejudged for v in conversation.verdicts] == [
        verdict.scores for record in response.conversations for verdict in record.verdicts
    ]
    assert "holds no verdict on this" in rejudged[3].verdicts[0].error
    config.generation.low_score_threshold = 1.0
    stricter = rejudge(room.folder, config)
    assert [conversation.now for conversation in stricter[:3]] == [
        max(0.0, round(full_reward(n) - 0.25, 4)) for n in numbers[:3]
    ]


def test_a_run_is_judged_again_by_a_command(room, judged, tmp_path, capsys):
    with judge_endpoint(always(says(GOOD))) as endpoint:
        server = Server(room, judged, endpoint.url)
        server.sample(["lesson one", "lesson two"])
    config = TrainRLConfig(judge_model=server.config, generation=replace(judged, max_tokens_per_judge_attempt=200))
    config.logging.save_dir = str(room.folder)
    record_run(config, "vllm_server")
    assert main([str(room.folder), "generation.low_score_threshold=0.9"]) == 0
    assert "2 conversations, 2 with another reward than before, 0 without a verdict" in capsys.readouterr().out
    lines = [json.loads(line) for line in (room.folder / "rejudged.jsonl").read_text().splitlines()]
    assert [(line["before"], line["now"]) for line in lines] == [(0.7, 0.45)] * 2
    assert main([str(tmp_path / "nowhere")]) == 2 and "There is no folder" in capsys.readouterr().err


# Stops --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "No auth credentials found"),
        (402, "Insufficient credits"),
        (404, "No endpoints found for judge"),
        (400, "judge is not a valid model ID"),
    ],
)
def test_a_stop_is_no_failed_judgement(room, judged, status, words):
    with judge_endpoint(always(fails(status, words))) as endpoint:
        with pytest.raises(ProviderFailure, match=f"{status}: {words}"):
            Server(room, judged, endpoint.url).sample([f"lesson {number}" for number in range(32)])
        assert len(endpoint.calls) <= 64
    assert verdicts_of(room) == []
    assert not any(event["event"] == "rewards" for event in read_journal(room.folder / "journal.jsonl"))


def test_a_ledger_that_cannot_be_written_is_no_failed_judgement(room, judged):
    with judge_endpoint(always(says(GOOD))) as endpoint:
        server = Server(room, judged, endpoint.url)
        server.ledger.close()
        with pytest.raises(StorageError, match="judge_calls.sqlite, cannot be used"):
            server.sample(["lesson"])
        assert endpoint.calls == [] and verdicts_of(room) == []


def test_a_stop_lets_paid_replies_land_and_a_resumed_batch_pays_for_none_of_them_again(room, judged):
    """The key is withdrawn in the middle; some replies are slow and come after the stop."""
    problems = [f"lesson number {number}" for number in range(1, 41)]
    down = {"yes": True}

    def script(body: dict, nth: int) -> Behaviour:
        number = number_of(body)
        if down["yes"] and number > 20:
            return fails(401, "key withdrawn")
        return drips(verdict(*scores_of(number)), 1.5)

    with judge_endpoint(script) as endpoint:
        with pytest.raises(ProviderFailure, match="key withdrawn"):
            Server(room, judged, endpoint.url).sample(problems)
        paid_prompts = [call.prompt for call in endpoint.of("drip")]
        assert paid_prompts
        down["yes"] = False
        server = Server(room, judged, endpoint.url)
        response = server.sample(problems)
    prompts = Counter(call.prompt for call in endpoint.of("drip"))
    assert set(prompts.values()) == {2} and len(prompts) == 40, "two attempts each, none of them paid for twice"
    rewards = [record.reward for record in response.conversations]
    assert rewards[:28] == [right_reward(number) for number in range(1, 29)] and None not in rewards
    assert response.usage["judge"].cost_usd == pytest.approx(endpoint.billed_usd)


def test_a_judge_that_stays_down_stops_the_run_at_its_deadline(room, judged):
    up_for = {"calls": 20}

    def script(body: dict, nth: int) -> Behaviour:
        up_for["calls"] -= 1
        good = drips(verdict(*scores_of(number_of(body))), 1.0)  # some answers still come after the first failures
        return good if up_for["calls"] >= 0 else fails(503, "maintenance")

    problems = [f"lesson number {number}" for number in range(1, 25)]
    with judge_endpoint(script) as endpoint:
        with pytest.raises(ProviderFailure, match="did not answer within judge_model.deadline_s = 60 s.*maintenance"):
            Server(room, judged, endpoint.url, deadline_s=60.0).sample(problems)
        assert all(event["verdict"]["error"] is None for event in verdicts_of(room))
        up_for["calls"] = 10**6
        response = Server(room, judged, endpoint.url).sample(problems)
    assert [record.reward for record in response.conversations] == [right_reward(number) for number in range(1, 25)]
    assert len(endpoint.of("drip")) == 48, "two attempts for each of 24 conversations, none of them twice"


def test_the_cap_stops_a_batch_and_a_higher_one_goes_on(room, judged):
    problems = [f"lesson number {number}" for number in range(1, 25)]
    with judge_endpoint(lambda body, nth: says(verdict(*scores_of(number_of(body))))) as endpoint:
        with pytest.raises(SpendingCapReached, match="max_cost_usd = 0.004 is reached"):
            Server(room, judged, endpoint.url, max_cost_usd=0.004, **PRICES).sample(problems)
        spent = endpoint.billed_usd
        assert 0.002 < spent <= 0.004 and all(event["verdict"]["error"] is None for event in verdicts_of(room))
        response = Server(room, judged, endpoint.url, max_cost_usd=0.1, **PRICES).sample(problems)
    assert len(endpoint.calls) == 48 and response.usage["judge"].cost_usd == pytest.approx(endpoint.billed_usd)
    assert [record.reward for record in response.conversations] == [right_reward(number) for number in range(1, 25)]
