"""Content that a judge over real HTTP refuses, or cannot read: who is blamed for it, and what it costs."""

import asyncio
from dataclasses import replace

import pytest

from classroom_rl.config.base import ApiModelConfig, JudgeModelConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.errors import ContentRefused, ContextOverflow
from classroom_rl.evaluation.rejudge import rejudge
from classroom_rl.judges.model_judge import ApiChatEngine, ChatEngineJudge
from classroom_rl.judges.verdicts import answer_schema
from classroom_rl.rollout.engine import Completion, Sampling
from tests.support.chat_client import timed_api
from tests.support.judge_endpoint import (
    Behaviour,
    Script,
    completion,
    cut_off,
    fails,
    judge_endpoint,
    says,
)
from tests.support.judged_room import GOOD, OUT_OF_RANGE, Server, always, verdict
from tests.support.scripted_room import Room
from tests.support.turned_clock import run

# What the judge will not read ---------------------------------------------------------------------------------------

REFUSALS = {
    "a filter's status": fails(400, {"code": "content_filter", "message": "filtered by the content policy"}),
    "a moderation": fails(403, "flagged by moderation"),
    "a filtered answer": says("", "filtered", finish_reason="content_filter"),
    "too long": fails(400, "This model's maximum context length is 8192 tokens."),
}
BAD_FORMS = {
    "no readable verdict": says("I would rather talk about the weather."),
    "two verdicts": says(GOOD + OUT_OF_RANGE),
    "cut off": cut_off(GOOD),
    "whole, and cut off in what follows": says(f"{GOOD}, it wr", finish_reason="length"),
    "quotes the tutor's JSON": says(GOOD.replace("as it was", f'it wrote "{GOOD}"')),
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


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("form", BAD_FORMS)
def test_a_judges_bad_form_is_no_verdict_and_never_the_tutors_fault(tokenizer, tmp_path, judged, form, soft):
    judged.ignore_rejected_judge = soft
    room = with_a_rude_tutor(Room(tokenizer, tmp_path / "run"))
    with judge_endpoint(refuses_rudeness(BAD_FORMS[form])) as endpoint:
        good, bad = Server(room, judged, endpoint.url).sample(["good lesson", "bad lesson"]).conversations
        assert len(endpoint.calls) == 2 + 2 * 3, "nothing is asked in plain words"
    assert (good.reward, bad.reward, bad.rejected, bad.failure) == (0.7, None, False, None)
    assert not any(verdict.refused or verdict.valid for verdict in bad.verdicts) and all(v.raw for v in bad.verdicts)
    assert [("cut off" in verdict.error) for verdict in bad.verdicts] == ["cut off" in form] * 2


@pytest.mark.parametrize("finish_reason", ["length", "stop"])
def test_a_kept_reply_is_cut_off_or_not_as_it_was_also_without_figures(tmp_path, finish_reason):
    """A student's message, asked for again after a restart; its provider counts no tokens."""

    def reply(exchange) -> None:
        exchange.bill("half")
        exchange.send(200, completion("half a", finish_reason, {}))

    async def ask(ledger, config) -> Completion:
        api = timed_api(config, ledger)
        try:
            return await ApiChatEngine(config, api).chat([{"role": "user", "content": "?"}], Sampling(0.6))
        finally:
            await api._client.close()

    with judge_endpoint(always(reply)) as endpoint:
        config = ApiModelConfig("m", base_url=endpoint.url)
        ended = []
        for _ in range(2):
            ledger = CallLedger(tmp_path / "calls.sqlite")
            ended.append(run(ask(ledger, config)).ended)
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
    """A judge's engine that answers rude words in prose."""

    def __init__(self) -> None:
        self.asked: list[Sampling] = []

    async def chat(self, messages, sampling: Sampling) -> Completion:
        self.asked.append(sampling)
        return Completion((1,), (0.0,), "Hm." if RUDE in messages[0]["content"] else GOOD, True)


@pytest.mark.parametrize("response_format", ["auto", "json_schema", "text"])
def test_a_judge_on_an_engine_answers_under_the_schema_and_blames_nobody_for_its_form(rules, response_format):
    engine = _Engine()
    judge = ChatEngineJudge(JudgeModelConfig(response_format=response_format), rules, 100, engine)
    rude = [{"role": "teacher", "content": RUDE}, {"role": "student", "content": "Oh."}]
    assert asyncio.run(judge.judge("pedagogical_eval", rude, "p", 0)) == "Hm."
    assert asyncio.run(judge.judge("pedagogical_eval", rude[1:], "p", 0)) == GOOD
    schema = None if response_format == "text" else answer_schema("pedagogical_eval")
    assert [sampling.schema for sampling in engine.asked] == [schema] * 4


class _FullEngine:
    """A judge's engine whose context holds so many characters; near the end an answer is cut off for lack of room."""

    async def chat(self, messages, sampling: Sampling) -> Completion:
        length = len(messages[0]["content"])
        if length > 400:
            raise ContextOverflow("A prompt does not fit.")
        return Completion((1,), (0.0,), GOOD if length < 300 else GOOD[:9], length < 300, counted=9)


@pytest.mark.parametrize("characters", [350, 600])
def test_a_full_context_of_the_judge_is_blamed_on_the_tutor_only_if_its_words_fill_it(rules, characters):
    judge = ChatEngineJudge(JudgeModelConfig(), rules, 100, _FullEngine())

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
