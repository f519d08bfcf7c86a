"""Judging in the classroom: how often the judge is asked, and who is blamed for content that it refuses or cannot
read."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

import classroom_rl.server.open_models
from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ContentRefused, ContextOverflow, JudgeOutputError
from classroom_rl.evaluation.rejudge import rejudge
from classroom_rl.judges.model_judge import EngineReplies, ModelJudge
from classroom_rl.judges.verdicts import answer_schema
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.environment import models_on_engines
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from tests.environments.classroom.conftest import ACCEPTS
from tests.support.judge_endpoint import Behaviour, Script, cut_off, fails, judge_endpoint, says
from tests.support.judged_room import GOOD, OUT_OF_RANGE, Server, verdict
from tests.support.scripted_engine import ScriptedEngine, ScriptedJudge
from tests.support.scripted_room import SCORES, Room

# How often it is asked ----------------------------------------------------------------------------------------------


def test_the_rule_of_a_judge_asks_as_often_as_is_configured(room: Room, maths: GenerationConfig):
    calls = []
    maths.judges_rules_prompts_paths = {"a": "scripted", "b": "scripted"}
    room.judge = ScriptedJudge(lambda rule, _, attempt: calls.append((rule, attempt)) or ACCEPTS)
    maths.number_judge_attempts = 3
    room.play(maths)
    assert sorted(calls) == [(rule, attempt) for rule in "ab" for attempt in range(3)]
    calls.clear()
    maths.number_judge_attempts = 0
    record = room.play(maths, request_id="none")[0]
    assert calls == [] and record.reward is not None, "λ = 0"


def test_failed_judge_is_no_opinion(room: Room, generation: GenerationConfig) -> None:
    def fail(rule: str, conversation: list, attempt: int) -> str:
        if attempt == 0:
            raise TimeoutError("the judge is asleep")
        return "I would say it was quite good."

    room.judge = ScriptedJudge(fail)
    generation.number_judge_attempts = 2
    record = room.play(generation)[0]
    assert record.reward is None and record.rewards == {"pedagogical": None}
    assert [verdict.valid for verdict in record.verdicts] == [False, False]
    assert "the judge is asleep" in record.verdicts[0].error and "quite good" in record.verdicts[1].error
    events = [event for event in read_journal(room.folder / JOURNAL_NAME) if event["event"] == "verdict"]
    assert [event["verdict"]["error"] for event in events] == [verdict.error for verdict in record.verdicts]


def test_one_valid_attempt_is_enough(room: Room, generation: GenerationConfig) -> None:
    better = json.dumps(SCORES | {"forward_progression_score": 1})
    answers = ["nothing", json.dumps(SCORES), better]
    room.judge = ScriptedJudge(lambda rule, conversation, attempt: answers[attempt])
    generation.number_judge_attempts = 3
    assert room.play(generation)[0].reward == pytest.approx(0.8)


def test_without_judge_attempts_no_judge_is_loaded(generation: GenerationConfig):
    generation.judges_rules_prompts_paths = {"does_not_leak_answer": "rule.txt"}
    config = EvalConfig(generation=generation, judge_model=JudgeModelConfig("some/judge"))
    assert set(models_on_engines(config, {})) == {"teacher", "student", "judge"}
    generation.number_judge_attempts = 0
    assert set(models_on_engines(config, {})) == {"teacher", "student"}


def test_a_local_judge_is_asked_with_the_rules_template_within_its_limit(
    room: Room, generation: GenerationConfig, template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = template("{{ problem }}: {{ conversation[0].content }}")
    generation.judges_rules_prompts_paths = {"does_not_leak_answer": path}
    generation.max_tokens_per_judge_attempt = 11
    roles = ("teacher", "student", "judge")
    engines = {role: ScriptedEngine(room.tokenizer, lambda _: "words " * 40) for role in roles}

    async def start(wanted, *_):
        assert wanted["judge"].model_name_or_path == "some/judge"
        return engines

    monkeypatch.setattr(classroom_rl.server.open_models, "_start_engines", start)
    monkeypatch.setattr(classroom_rl.server.open_models, "_check_models", lambda wanted: None)

    async def judge() -> str:
        config = EvalConfig(generation=generation, judge_model=JudgeModelConfig("some/judge"))
        opened = await classroom_rl.server.open_models.open_roles(config, {}, tmp_path)
        dialogue = [{"role": "teacher", "content": "Hello."}]
        return await opened.judge.judge("does_not_leak_answer", dialogue, "fractions", 0)

    with pytest.raises(JudgeOutputError, match="cut off at its most tokens") as caught:
        asyncio.run(judge())
    replies = engines["judge"].calls  # none holds a verdict, so it is asked again
    assert len(replies) == 3
    for prompt, sampling, _ in replies:
        assert room.tokenizer.decode(prompt) == "<user>fractions: Hello." and sampling.max_tokens == 11
    text = caught.value.answer
    assert text.startswith("words words") and len(room.tokenizer.encode(text)) <= 11


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


def rude(prompt: str) -> str:
    return RUDE if "bad lesson" in prompt else "Go on."


def with_a_rude_tutor(room: Room) -> Room:
    room.teacher = ScriptedEngine(room.tokenizer, rude)
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
    judged_again = {change.conversation: change.now for change in rejudge(room.folder, config)}
    assert judged_again == {good.id: 0.7, bad.id: 0.0}


def content_of(body: dict) -> str:
    return body["messages"][0]["content"]


def polite(prompt: str) -> str:
    return "Go on."


def talkative(prompt: str) -> str:
    return "Say it." * (60 if "bad lesson" in prompt else 1)


NOT_THE_TUTORS = {
    "a judge that is set wrong": (fails(400, "temperature must be 1"), lambda body: RUDE in content_of(body), rude),
    **{
        f"the student's words or the lesson's: {why}": (refusal, lambda body: "bad lesson" in content_of(body), polite)
        for why, refusal in REFUSALS.items()
    },
    **{
        f"a judge that fails on long dialogues: {why}": (refusal, lambda body: len(content_of(body)) > 400, talkative)
        for why, refusal in REFUSALS.items()
        if why != "too long"
    },
}
"""Cause → what the judge answers, about which requests, and the tutor."""


@pytest.mark.parametrize("cause", NOT_THE_TUTORS)
def test_a_tutor_is_not_blamed_for_what_is_not_its_words(tokenizer, tmp_path, judged, cause):
    refusal, is_refused, tutor = NOT_THE_TUTORS[cause]
    room = Room(tokenizer, tmp_path / "run")
    room.teacher = ScriptedEngine(tokenizer, tutor)
    judged.max_tokens_per_turn = 200
    with judge_endpoint(lambda body, nth: refusal if is_refused(body) else says(GOOD)) as endpoint:
        good, bad = Server(room, judged, endpoint.url).sample(["good lesson", "bad lesson"]).conversations
    assert (good.reward, bad.reward, bad.rejected) == (0.7, None, False)
    assert not any(verdict.refused for verdict in bad.verdicts)


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
    config = JudgeModelConfig(response_format=response_format)
    judge = ModelJudge(config, rules, 100, EngineReplies(engine, "judge"))
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
    judge = ModelJudge(JudgeModelConfig(), rules, 100, EngineReplies(_FullEngine(), "judge"))

    def judged(**messages: str) -> str:
        dialogue = [{"role": role, "content": text} for role, text in messages.items()]
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
