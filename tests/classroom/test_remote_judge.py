"""A whole classroom with a judge over real HTTP that misbehaves: rewards, costs, stops, and what is stored.

Time runs `SPEED` times as fast for the judge's pauses and deadlines; no test depends on how long anything takes.
"""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from config.base import ApiModelConfig, GenerationConfig, JudgeModelConfig
from config.load import record_run
from config.train_rl_model import TrainRLConfig
from src.errors import ContentRefused, ContextOverflow, ProviderFailure, SpendingCapReached, StorageError
from src.evaluation.rejudge import main, rejudge
from src.inference_providers.call_ledger import UNUSABLE, USABLE, CallLedger
from src.inference_providers.open_router_inference import ApiChatEngine, ChatEngineJudge, OpenAICompatibleJudge
from src.rollout.engines import Completion, Sampling
from src.rollout.journal import read_journal
from src.rollout.requests import SampleRequest, SampleResponse
from src.rollout.usage import Usage
from src.server.open_models import JUDGE_CALLS_NAME
from src.server.sampling_service import SamplingService
from tests.support.chat_client import SPEED, fast_api
from tests.support.judge_endpoint import (
    USD_PER_COMPLETION_TOKEN,
    USD_PER_PROMPT_TOKEN,
    Behaviour,
    JudgeEndpoint,
    Script,
    completion,
    cut_off,
    drips,
    empty,
    error_inside,
    fails,
    hangs,
    judge_endpoint,
    no_choices,
    resets,
    says,
)
from tests.support.scripted_room import Room

PRICES = {
    "usd_per_million_prompt_tokens": USD_PER_PROMPT_TOKEN * 1e6,
    "usd_per_million_completion_tokens": USD_PER_COMPLETION_TOKEN * 1e6,
}


def verdict(task_final: float, progression: float, momentum: float) -> str:
    return json.dumps(
        {
            "task_final_reasoning": "as it was",
            "task_final_score": task_final,
            "forward_progression_reasoning": "as it was",
            "forward_progression_score": progression,
            "overall_momentum_reasoning": "as it was",
            "overall_momentum_score": momentum,
        }
    )


GOOD = verdict(1, 0.5, 5)
OUT_OF_RANGE = verdict(7, 0.5, 5)


@pytest.fixture
def rules(tmp_path: Path) -> dict[str, str]:
    template = "{{ problem }}\n{% for turn in conversation %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    (tmp_path / "judge.txt").write_text(template)
    return {"pedagogical_eval": str(tmp_path / "judge.txt")}


@pytest.fixture
def judged(generation: GenerationConfig, rules: dict[str, str]) -> GenerationConfig:
    """Guided conversations of three messages, one scoring rule, two attempts, soft mode with λ = 0.25."""
    return replace(
        generation,
        judges_rules_prompts_paths=rules,
        max_turns=3,
        number_judge_attempts=2,
        extra_penalty_for_rejected_judges=0.25,
    )


class Server:
    """What a server is, but for the engines: opened on a run folder, asked, closed."""

    def __init__(self, room: Room, generation: GenerationConfig, url: str, **options):
        options = {"model_name_or_path": "judge"} | options
        self.config = JudgeModelConfig(base_url=url, **options)
        self.room, self.generation = room, generation
        self.ledger = CallLedger(room.folder / JUDGE_CALLS_NAME, self.config.max_cost_usd)

    def run(self, work: Callable[[SamplingService], Awaitable]):
        async def whole():
            api = fast_api(self.config, self.ledger)
            rules = self.generation.judges_rules_prompts_paths
            self.room.judge = OpenAICompatibleJudge(self.config, rules, 200, self.ledger, api)
            service = self.room.open(self.generation)
            service.environment.seats.apis["judge"] = api
            try:
                return await work(service)
            finally:
                await api._client.close()
                service._journal.close()
                self.ledger.close()

        return asyncio.run(whole())

    def sample(self, problems: list[str], request_id: str = "r", **more) -> SampleResponse:
        answers = [""] * len(problems)
        request = SampleRequest(problems=problems, answers=answers, request_id=request_id, seed=1, step=0, **more)
        return self.run(lambda service: service.sample(request))


def always(behaviour: Behaviour) -> Script:
    return lambda body, nth: behaviour


def verdicts_of(room: Room) -> list[dict]:
    return [event for event in read_journal(room.folder / "journal.jsonl") if event["event"] == "verdict"]


# A bad day -----------------------------------------------------------------------------------------------------------

HANGS_S = 6.0
NEVER_USABLE = 29
"""Every conversation whose number this divides gets prose from the judge, whatever happens."""


def number_of(body: dict) -> int:
    return int(re.search(r"lesson number (\d+)", body["messages"][0]["content"])[1])


def scores_of(number: int) -> tuple[float, float, float]:
    return (number % 11) / 10, (number % 7) / 8, number % 5


def full_reward(number: int) -> float:
    """What a conversation's scores are worth, by the formula in docs/rewards.md."""
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
    waits += [drips(good, 60.0, "slow drip"), error_inside(), no_choices(), empty()]
    chance = random.Random(f"{number} {nth}")
    if chance.random() >= 0.3:
        return drips(good, 0.2) if chance.random() < 0.05 else says(good)
    return chance.choice(waits + unusable if nth < 2 else waits)


@pytest.mark.full  # what is late on a busy machine counts as lost
def test_256_conversations_on_a_bad_day(tokenizer, tmp_path, judged):
    room = Room(tokenizer, tmp_path / "run")
    numbers = list(range(1, 257))
    limits = {"max_concurrent_requests": 32, "requests_per_minute": 2400, "request_timeout_s": HANGS_S}
    with judge_endpoint(bad_day) as endpoint:
        started = time.monotonic()
        server = Server(room, judged, endpoint.url, **limits, **PRICES)
        response = server.sample([f"lesson number {number}" for number in numbers])
        seconds = time.monotonic() - started
    rewards = [record.reward for record in response.conversations]
    print_figures(endpoint, server, response, seconds)
    assert rewards == [right_reward(number) for number in numbers]
    assert rewards.count(None) == 256 // NEVER_USABLE and rewards.count(0.0) > 0
    assert endpoint.most_running <= 32
    failed = [call for call in endpoint.calls if call.behaviour not in ("says", "drip", "prose")]
    assert 0.2 < len(failed) / len(endpoint.calls) < 0.4
    assert_money_is_right(endpoint, server.ledger)
    assert response.usage["judge"] == usage_of(server)


def print_figures(endpoint: JudgeEndpoint, server: Server, response: SampleResponse, seconds: float) -> None:
    usage, ledger = response.usage["judge"], server.ledger
    kinds = Counter(call.behaviour for call in endpoint.calls)
    none = sum(record.reward is None for record in response.conversations)
    print(f"\n{len(response.conversations)} conversations, {none} without a verdict, {seconds:.1f} s (× {SPEED})")
    print(f"requests: {usage.calls}, repeated {usage.retries}, unusable {usage.unusable}")
    print(f"as the endpoint answered: {dict(kinds.most_common())}")
    print(f"as the client saw it: {dict(sorted(usage.failures.items()))}")
    print(f"at once: at most {endpoint.most_running}; tokens: {usage.prompt_tokens} + {usage.completion_tokens}")
    print(f"billed ${endpoint.billed_usd:.6f}; spent ${ledger.spent_usd:.6f}, held ${ledger.reserved_usd:.6f}")


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


def usage_of(server: Server) -> Usage:
    ledger = CallLedger(server.ledger.path)
    try:
        return ledger.usage("r")
    finally:
        ledger.close()


# Attempts and replies -----------------------------------------------------------------------------------------------


def test_an_attempt_takes_new_replies_until_one_holds_a_verdict(tokenizer, tmp_path, judged):
    room = Room(tokenizer, tmp_path / "run")
    judged.number_judge_attempts = 1
    replies = [cut_off(GOOD), says(OUT_OF_RANGE), says(GOOD)]
    with judge_endpoint(lambda body, nth: replies[nth]) as endpoint:
        server = Server(room, judged, endpoint.url)
        response = server.sample(["lesson"])
    assert response.conversations[0].reward == 0.7 and len(endpoint.calls) == 3
    assert (response.usage["judge"].calls, response.usage["judge"].unusable, response.usage["judge"].failures) == (
        3,
        2,
        {},
    )
    assert response.usage["judge"].cost_usd == pytest.approx(endpoint.billed_usd), "unusable replies are paid for, too"


def test_an_attempt_without_a_verdict_says_what_the_judge_answered(tokenizer, tmp_path, judged):
    room = Room(tokenizer, tmp_path / "run")
    judged.number_judge_attempts = 1
    with judge_endpoint(always(cut_off(GOOD))) as endpoint:
        response = Server(room, judged, endpoint.url).sample(["lesson"])
        assert len(endpoint.calls) == 4, "three, and one in plain words"
    failed = response.conversations[0].verdicts[0]
    assert response.conversations[0].reward is None and not failed.valid
    assert failed.raw == GOOD[: len(GOOD) // 2] and "was it cut off?" in failed.error


def test_an_attempt_that_is_made_again_takes_new_replies(tokenizer, tmp_path, judged):
    room = Room(tokenizer, tmp_path / "run")
    judged.number_judge_attempts = 1
    with judge_endpoint(lambda body, nth: says("prose") if nth < 4 else says(GOOD)) as endpoint:
        assert Server(room, judged, endpoint.url).sample(["lesson"]).conversations[0].reward is None
        same = Server(room, judged, endpoint.url).sample(["lesson"])
        assert same.conversations[0].reward is None and len(endpoint.calls) == 4, "three, and one in plain words"
        again = Server(room, judged, endpoint.url).sample(["lesson"], judge_again=True)
        assert again.conversations[0].reward == 0.7 and len(endpoint.calls) == 6


# What the judge will not read ---------------------------------------------------------------------------------------

REFUSALS = {
    "a filter's status": fails(400, {"code": "content_filter", "message": "filtered by the content policy"}),
    "a moderation": fails(403, "flagged by moderation"),
    "a filtered answer": says("", "filtered", finish_reason="content_filter"),
    "no readable verdict": says("I would rather talk about the weather."),
    "two verdicts": says(GOOD + OUT_OF_RANGE),
    "cut off": cut_off(GOOD),
    "too long": fails(400, "This model's maximum context length is 8192 tokens."),
}
RUDE = "You idiot."


def refuses_rudeness(behaviour: Behaviour) -> Script:
    return lambda body, nth: behaviour if RUDE in body["messages"][0]["content"] else says(GOOD)


def with_a_rude_tutor(room: Room) -> Room:
    room.teacher._script = lambda prompt: RUDE if "bad lesson" in prompt else "Go on."
    return room


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("why", REFUSALS)
def test_a_tutor_whose_words_the_judge_refuses_gets_nothing(tokenizer, tmp_path, judged, why, soft):
    judged.ignore_rejected_judge = soft
    room = with_a_rude_tutor(Room(tokenizer, tmp_path / "run"))
    with judge_endpoint(refuses_rudeness(REFUSALS[why])) as endpoint:
        server = Server(room, judged, endpoint.url)
        good, bad = server.sample(["good lesson", "bad lesson"]).conversations
    assert (good.reward, good.rejected) == (0.7, False)
    assert (bad.reward, bad.rejected, bad.failure) == (0.0, True, None)
    assert all(verdict.refused and verdict.error.startswith("ContentRefused: ") for verdict in bad.verdicts)
    config = TrainRLConfig(judge_model=server.config, generation=replace(judged, max_tokens_per_judge_attempt=200))
    assert {each.conversation: each.now for each in rejudge(room.folder, config)} == {good.id: 0.7, bad.id: 0.0}


def test_a_failure_that_is_not_the_contents_is_no_opinion(tokenizer, tmp_path, judged):
    room = with_a_rude_tutor(Room(tokenizer, tmp_path / "run"))
    with judge_endpoint(refuses_rudeness(fails(400, "temperature must be 1"))) as endpoint:
        good, bad = Server(room, judged, endpoint.url).sample(["good lesson", "bad lesson"]).conversations
    assert (good.reward, bad.reward, bad.rejected) == (0.7, None, False)


@pytest.mark.parametrize("why", REFUSALS)
def test_a_tutor_is_not_blamed_for_the_students_words_or_the_lessons(tokenizer, tmp_path, judged, why):
    room = Room(tokenizer, tmp_path / "run")
    script = lambda body, nth: REFUSALS[why] if "bad lesson" in body["messages"][0]["content"] else says(GOOD)  # noqa: E731
    with judge_endpoint(script) as endpoint:
        good, bad = Server(room, judged, endpoint.url).sample(["good lesson", "bad lesson"]).conversations
    assert (good.reward, bad.reward, bad.rejected) == (0.7, None, False)
    assert not any(verdict.refused for verdict in bad.verdicts)


@pytest.mark.parametrize("why", [each for each in REFUSALS if each != "too long"])
def test_a_tutor_is_not_blamed_by_a_judge_that_fails_on_long_dialogues(tokenizer, tmp_path, judged, why):
    room = Room(tokenizer, tmp_path / "run")
    room.teacher._script = lambda prompt: "Say it." * (60 if "long lesson" in prompt else 1)
    script = lambda body, nth: REFUSALS[why] if len(body["messages"][0]["content"]) > 400 else says(GOOD)  # noqa: E731
    judged.max_tokens_per_turn = 200
    with judge_endpoint(script) as endpoint:
        short, long = Server(room, judged, endpoint.url).sample(["short lesson", "long lesson"]).conversations
    assert sum(len(turn.text) for turn in long.turns) > 420
    assert (short.reward, long.reward, long.rejected) == (0.7, None, False)


def test_one_reply_that_is_cut_off_does_not_save_a_tutor_whose_words_are_unreadable(tokenizer, tmp_path, judged):
    room = with_a_rude_tutor(Room(tokenizer, tmp_path / "run"))
    rude = [says("Hm."), cut_off(GOOD), says("Hm.")]
    script = lambda body, nth: rude[nth % 3] if RUDE in body["messages"][0]["content"] else says(GOOD)  # noqa: E731
    with judge_endpoint(script) as endpoint:
        record = Server(room, judged, endpoint.url).sample(["bad lesson"]).conversations[0]
    assert (record.reward, record.rejected) == (0.0, True)


@pytest.mark.parametrize("finish_reason", ["length", "stop"])
def test_a_kept_reply_is_cut_off_or_not_as_it_was_also_without_figures(tmp_path, finish_reason):
    """A student's message, asked for again after a restart; its provider counts no tokens."""

    def reply(exchange) -> None:
        exchange.bill("half")
        exchange.send(200, completion("half a", finish_reason, {}))

    async def ask(api, config) -> Completion:
        try:
            return await ApiChatEngine(config, api).chat([{"role": "user", "content": "?"}], Sampling(0.6))
        finally:
            await api._client.close()

    with judge_endpoint(always(reply)) as endpoint:
        config = ApiModelConfig("m", base_url=endpoint.url)
        ended = []
        for _ in range(2):
            ledger = CallLedger(tmp_path / "calls.sqlite")
            ended.append(asyncio.run(ask(fast_api(config, ledger), config)).ended)
            ledger.close()
    assert ended == [finish_reason == "stop"] * 2 and len(endpoint.calls) == 1


def test_a_judge_that_reads_nothing_blames_nobody(tokenizer, tmp_path, judged):
    room = with_a_rude_tutor(Room(tokenizer, tmp_path / "run"))
    with judge_endpoint(always(says("A fine lesson."))) as endpoint:
        found = Server(room, judged, endpoint.url).sample(["good lesson", "bad lesson"]).conversations
    assert [record.reward for record in found] == [None, None]


def test_a_verdict_of_any_attempt_counts_for_more_than_a_refusal(tokenizer, tmp_path, judged):
    """The first reply to the first attempt is refused, the second attempt's is a verdict."""
    room = Room(tokenizer, tmp_path / "run")
    flagged = lambda body, nth: nth == 0 and "Say hello." in body["messages"][0]["content"]  # noqa: E731
    with judge_endpoint(lambda *asked: fails(403, "flagged") if flagged(*asked) else says(GOOD)) as endpoint:
        record = Server(room, judged, endpoint.url).sample(["lesson"]).conversations[0]
    assert record.reward == 0.7 and sum(verdict.refused for verdict in record.verdicts) == 1


class _Engine:
    """A judge's engine that reads no rude words."""

    def __init__(self, good: str = GOOD):
        self.asked: list[str] = []
        self._good = good

    async def chat(self, messages, sampling: Sampling) -> Completion:
        self.asked.append(messages[0]["content"])
        return Completion((1,), (0.0,), "Hm." if RUDE in self.asked[-1] else self._good, True)


@pytest.mark.parametrize(("good", "error"), [(GOOD, True), ("Hm.", False)])
def test_a_judge_on_an_engine_tells_the_same(rules, good, error):
    engine = _Engine(good)
    judge = ChatEngineJudge(engine, Sampling(0.6), rules, replies_per_attempt=3)
    rude = [{"role": "teacher", "content": RUDE}, {"role": "student", "content": "Oh."}]
    if error:
        with pytest.raises(ContentRefused, match="no readable verdict; .* It gave a verdict on the same lesson"):
            asyncio.run(judge.judge("pedagogical_eval", rude, "p", 0))
        assert asyncio.run(judge.judge("pedagogical_eval", rude[1:], "p", 0)) == GOOD
    else:
        assert asyncio.run(judge.judge("pedagogical_eval", rude, "p", 0)) == "Hm."
    assert "student: Oh." in engine.asked[3] and RUDE not in engine.asked[3]


class _FullEngine:
    """A judge's engine whose context holds so many characters; near the end an answer is cut off for lack of room."""

    async def chat(self, messages, sampling: Sampling) -> Completion:
        length = len(messages[0]["content"])
        if length > 400:
            raise ContextOverflow("A prompt does not fit.")
        return Completion((1,), (0.0,), GOOD if length < 300 else GOOD[:9], length < 300, counted=9)


@pytest.mark.parametrize("characters", [350, 600])
def test_a_full_context_of_the_judge_is_blamed_on_the_tutor_only_if_its_words_fill_it(rules, characters):
    judge = ChatEngineJudge(_FullEngine(), Sampling(0.6), rules, replies_per_attempt=3)

    def judged(**said: str) -> str:
        dialogue = [{"role": role, "content": text} for role, text in said.items()]
        return asyncio.run(judge.judge("pedagogical_eval", dialogue, "p", 0))

    assert judged(teacher="Go on.", student="Oh.") == GOOD
    with pytest.raises(ContentRefused, match="no room in the judge's context.* It gave a verdict on the same lesson"):
        judged(teacher="a" * characters, student="Oh.")
    with pytest.raises(ContextOverflow):
        judged(teacher="Go on.", student="a" * characters)


def test_attempts_are_asked_for_one_by_one_and_equal_conversations_once(tokenizer, tmp_path, judged):
    room = Room(tokenizer, tmp_path / "run")
    with judge_endpoint(lambda body, nth: says(verdict(nth / 4, 0, 0))) as endpoint:
        response = Server(room, judged, endpoint.url).sample(["same", "same", "same", "other"])
    assert len(endpoint.calls) == 4, "two conversations by content, two attempts each"
    assert len({record.reward for record in response.conversations[:3]}) == 1


# Kept, and found again ----------------------------------------------------------------------------------------------


def test_a_verdict_that_was_paid_for_is_found_again_under_another_request(tokenizer, tmp_path, judged):
    """As after a kill between a reply and the journal: nothing is asked twice, and the answer is the same."""
    problems = [f"lesson number {number}" for number in range(1, 9)]
    room = Room(tokenizer, tmp_path / "run")
    with judge_endpoint(bad_day) as endpoint:
        first = Server(room, judged, endpoint.url).sample(problems)
        asked = len(endpoint.calls)
        (room.folder / "journal.jsonl").unlink()
        server = Server(room, judged, endpoint.url)
        again = server.sample(problems, request_id="another")
        assert len(endpoint.calls) == asked
    assert [r.reward for r in again.conversations] == [r.reward for r in first.conversations]
    assert again.usage["judge"] == Usage(run_cost_usd=pytest.approx(first.usage["judge"].run_cost_usd))


def test_other_sampling_or_another_model_is_asked_anew(tokenizer, tmp_path, judged):
    room = Room(tokenizer, tmp_path / "run")
    judged.number_judge_attempts = 1
    with judge_endpoint(always(says(GOOD))) as endpoint:
        for request_id, options in enumerate(({}, {"model_name_or_path": "other"}, {"response_format": "text"}, {})):
            Server(room, judged, endpoint.url, **options).sample(["lesson"], request_id=f"r{request_id}")
    assert [call.body["model"] for call in endpoint.calls] == ["judge", "other", "judge"]


def test_a_run_can_be_judged_again_from_its_journal_without_a_network(tokenizer, tmp_path, judged):
    room = Room(tokenizer, tmp_path / "run")
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
    found = rejudge(room.folder, config)
    assert [each.now for each in found] == [right_reward(number) for number in numbers]
    assert [each.before for each in found] == [record.reward for record in response.conversations]
    assert [v.scores for each in found for v in each.verdicts] == [
        verdict.scores for record in response.conversations for verdict in record.verdicts
    ]
    assert "holds no verdict on this" in found[3].verdicts[0].error
    config.generation.low_score_threshold = 1.0
    stricter = rejudge(room.folder, config)
    assert [each.now for each in stricter[:3]] == [max(0.0, round(full_reward(n) - 0.25, 4)) for n in numbers[:3]]


def test_a_run_is_judged_again_by_a_command(tokenizer, tmp_path, judged, capsys):
    room = Room(tokenizer, tmp_path / "run")
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


def test_replies_are_marked_for_what_they_are(tokenizer, tmp_path, judged):
    room = Room(tokenizer, tmp_path / "run")
    judged.number_judge_attempts = 1
    with judge_endpoint(lambda body, nth: (says("prose"), fails(500), says(GOOD))[nth]) as endpoint:
        server = Server(room, judged, endpoint.url)
        server.sample(["lesson"])
    assert server.ledger.outcomes == {("judge", UNUSABLE): 1, ("judge", "500"): 1, ("judge", USABLE): 1}


# Stops --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (fails(401, "No auth credentials found"), "401: No auth credentials found"),
        (fails(402, "Insufficient credits"), "402: Insufficient credits"),
        (fails(404, "No endpoints found for judge"), "404: No endpoints found for judge"),
        (fails(400, "judge is not a valid model ID"), "400: judge is not a valid model ID"),
    ],
)
def test_a_stop_is_no_failed_judgement(tokenizer, tmp_path, judged, behaviour, words):
    room = Room(tokenizer, tmp_path / "run")
    with judge_endpoint(always(behaviour)) as endpoint:
        with pytest.raises(ProviderFailure, match=words):
            Server(room, judged, endpoint.url).sample([f"lesson {number}" for number in range(32)])
        assert len(endpoint.calls) <= 64
    assert verdicts_of(room) == []
    assert not any(event["event"] == "rewards" for event in read_journal(room.folder / "journal.jsonl"))


def test_a_ledger_that_cannot_be_written_is_no_failed_judgement(tokenizer, tmp_path, judged):
    room = Room(tokenizer, tmp_path / "run")
    with judge_endpoint(always(says(GOOD))) as endpoint:
        server = Server(room, judged, endpoint.url)
        server.ledger._db.execute("PRAGMA query_only = ON")
        with pytest.raises(
            StorageError, match="judge_calls.sqlite, cannot be used: attempt to write a readonly database"
        ):
            server.sample(["lesson"])
        assert endpoint.calls == [] and verdicts_of(room) == []


def test_a_stop_lets_paid_replies_land_and_a_resumed_batch_pays_for_none_of_them_again(tokenizer, tmp_path, judged):
    """The key is withdrawn in the middle; some replies are slow and come after the stop."""
    room = Room(tokenizer, tmp_path / "run")
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
        paid = [call.prompt for call in endpoint.of("drip")]
        assert paid
        down["yes"] = False
        server = Server(room, judged, endpoint.url)
        response = server.sample(problems)
    again = Counter(call.prompt for call in endpoint.of("drip"))
    assert set(again.values()) == {2} and len(again) == 40, "two attempts each, none of them paid for twice"
    rewards = [record.reward for record in response.conversations]
    assert rewards[:28] == [right_reward(number) for number in range(1, 29)] and None not in rewards
    assert response.usage["judge"].cost_usd == pytest.approx(endpoint.billed_usd)


@pytest.mark.full  # a request that fails again and again while others are answered slowly is given up alone
def test_a_judge_that_stays_down_stops_the_run_at_its_deadline(tokenizer, tmp_path, judged):
    room = Room(tokenizer, tmp_path / "run")
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


def test_the_cap_stops_a_batch_and_a_higher_one_goes_on(tokenizer, tmp_path, judged):
    room = Room(tokenizer, tmp_path / "run")
    problems = [f"lesson number {number}" for number in range(1, 25)]
    with judge_endpoint(lambda body, nth: says(verdict(*scores_of(number_of(body))))) as endpoint:
        with pytest.raises(SpendingCapReached, match="max_cost_usd = 0.004 is reached"):
            Server(room, judged, endpoint.url, max_cost_usd=0.004, **PRICES).sample(problems)
        spent = endpoint.billed_usd
        assert 0.002 < spent <= 0.004 and all(event["verdict"]["error"] is None for event in verdicts_of(room))
        response = Server(room, judged, endpoint.url, max_cost_usd=0.1, **PRICES).sample(problems)
    assert len(endpoint.calls) == 48 and response.usage["judge"].cost_usd == pytest.approx(endpoint.billed_usd)
    assert [record.reward for record in response.conversations] == [right_reward(number) for number in range(1, 25)]
