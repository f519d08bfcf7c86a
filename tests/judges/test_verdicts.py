"""A judge that ranks and scores a whole group in one call, over real HTTP: who is asked what, what becomes of its
answer, and what is paid."""

import asyncio
import gc
import json
import random
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.classroom.metrics import batch_metrics
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import JudgeOutputError, ProviderFailure, RequestRefused
from classroom_rl.evaluation.rejudge import rejudge
from classroom_rl.judges.model_judge import ChatEngineJudge
from classroom_rl.judges.verdicts import Verdict, contradictions, group_schema, parse_group, read_again
from classroom_rl.rollout import runner
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.environment import Group
from classroom_rl.rollout.store.journal import read_journal
from tests.conftest import ROOT
from tests.support.judge_endpoint import Behaviour, fails, judge_endpoint, says
from tests.support.judged_room import Server, always, verdict
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import Room

RULE = "pedagogical_eval"
TRAINING = {"run_id": "", "policy_version": 0}
"""What a training's request says besides its conversations."""
SCORE = "task_final_score"


def grade_of(text: str) -> float:
    """What the judges of these tests think of a conversation: the number that its teacher says, out of 10."""
    return int(re.search(r"I am number (\d+)\.", text)[1]) % 10 / 10


def scores(grade: float) -> dict:
    return {SCORE: grade, "forward_progression_score": grade, "overall_momentum_score": 10 * grade}


def answer_of_group(conversations: list[str], grade: Callable[[str], float] = grade_of) -> dict:
    graded = [grade(each) for each in conversations]
    order = sorted(range(len(graded)), key=lambda place: -graded[place])
    entries = [{"number": i + 1, "reasoning": f"grade {each}", **scores(each)} for i, each in enumerate(graded)]
    return {"comparison": "", "ranking": [place + 1 for place in order], "conversations": entries}


def shown_in(body: dict) -> list[str]:
    return [each.strip() for each in body["messages"][0]["content"].split("LESSON\n")[1:]]


def is_about_group(body: dict) -> bool:
    return "LESSON\n" in body["messages"][0]["content"]


def fair(body: dict, nth: int) -> Behaviour:
    if is_about_group(body):
        return says(json.dumps(answer_of_group(shown_in(body))), "group")
    return says(json.dumps(single(grade_of(body["messages"][0]["content"]))), "single")


def single(grade: float) -> dict:
    return json.loads(verdict(grade, grade, 10 * grade))


@pytest.fixture
def numbered(tokenizer, tmp_path: Path) -> Room:
    """A room whose teacher says in each message how many messages it has said before."""
    room, said = Room(tokenizer, tmp_path / "run"), count()
    room.teacher = ScriptedEngine(tokenizer, lambda _: f"I am number {next(said)}.")
    return room


@pytest.fixture
def options(tmp_path: Path) -> dict:
    lesson = "LESSON\n{% for turn in lesson %}{{ turn.content }}\n{% endfor %}"
    template = f"{{{{ problem }}}}\n{{% for lesson in conversations %}}{lesson}{{% endfor %}}"
    (tmp_path / "group.txt").write_text(template)
    return {"mode": "group", "anchor_share": 0.0, "group_prompts_paths": {RULE: str(tmp_path / "group.txt")}}


@pytest.fixture
def short(judged: GenerationConfig) -> GenerationConfig:
    """One message of the teacher, one attempt."""
    return replace(judged, max_turns=1, number_judge_attempts=1, extra_penalty_for_rejected_judges=0.0)


def grade(record: ConversationRecord) -> float:
    return grade_of(record.turns[0].text)


# Who is asked what --------------------------------------------------------------------------------------------------


def test_one_call_judges_a_group_and_each_conversation_gets_its_own_scores(numbered, short, options):
    with judge_endpoint(fair) as endpoint:
        records = (
            Server(numbered, short, endpoint.url, **options).sample(["a"] * 8 + ["b"] * 8, **TRAINING).conversations
        )
    assert [call.behaviour for call in endpoint.calls] == ["group"] * 2
    assert [record.reward for record in records] == pytest.approx([grade(record) for record in records])
    assert len({record.reward for record in records[:8]}) == 8
    for group in (records[:8], records[8:]):
        best = max(group, key=grade)
        assert [record for record in group if record.verdicts[0].rank == 1] == [best]
        assert {record.verdicts[0].group_size for record in group} == {8}
        assert best.verdicts[0].reasons == {RULE: f"grade {grade(best)}"}


def test_every_attempt_shows_the_group_in_another_order(numbered, short, options):
    with judge_endpoint(fair) as endpoint:
        server = Server(numbered, replace(short, number_judge_attempts=3), endpoint.url, **options)
        records = server.sample(["a"] * 8, **TRAINING).conversations
    orders = [tuple(shown_in(call.body)) for call in endpoint.calls]
    assert len(set(orders)) == 3 and len({frozenset(order) for order in orders}) == 1
    assert [record.reward for record in records] == pytest.approx([grade(record) for record in records])


def test_a_rule_that_decides_is_asked_about_each_conversation(numbered, short, options, rules):
    rules = rules | {"does_not_leak_answer": rules[RULE]}
    ok = json.dumps({"reasoning": "", "decision": "OK"})
    with judge_endpoint(lambda body, nth: fair(body, nth) if is_about_group(body) else says(ok, "decides")) as endpoint:
        Server(numbered, replace(short, judges_rules_prompts_paths=rules), endpoint.url, **options).sample(
            ["a"] * 4, **TRAINING
        )
    assert sorted(call.behaviour for call in endpoint.calls) == ["decides"] * 4 + ["group"]


def test_equal_conversations_are_shown_once_and_get_the_same_verdict(room, short, options):
    said = iter([1, 2, 1, 1])
    room.teacher = ScriptedEngine(room.tokenizer, lambda _: f"I am number {next(said)}.")
    with judge_endpoint(fair) as endpoint:
        records = Server(room, short, endpoint.url, **options).sample(["a"] * 4, **TRAINING).conversations
    assert [len(shown_in(call.body)) for call in endpoint.calls] == [2]
    assert [record.reward for record in records] == pytest.approx([grade(record) for record in records])
    assert {record.verdicts[0].group_size for record in records} == {2}


@pytest.mark.parametrize("problems", [["a"], ["a", "b"]])
def test_a_conversation_alone_is_judged_alone(numbered, short, options, problems):
    with judge_endpoint(fair) as endpoint:
        records = Server(numbered, short, endpoint.url, **options).sample(problems, **TRAINING).conversations
    assert {call.behaviour for call in endpoint.calls} == {"single"}
    assert {record.verdicts[0].group_size for record in records} == {1}


def test_the_schema_of_a_group_goes_with_the_request(numbered, short, options):
    with judge_endpoint(fair) as endpoint:
        Server(numbered, short, endpoint.url, **options).sample(["a"] * 3, **TRAINING)
    assert endpoint.calls[0].body["response_format"]["json_schema"]["schema"] == group_schema(3)
    assert endpoint.calls[0].body["max_tokens"] == 3 * 200


@pytest.mark.parametrize("failing", [(0,), (2,), (0, 1, 2, 3)])
def test_a_conversation_that_fails_before_the_others_end_is_not_waited_for(numbered, judged, options, failing):
    turns = count()

    def reply(_: str) -> str:
        if next(turns) % 4 in failing:
            raise RequestRefused("no")
        return "Hello."

    numbered.student = ScriptedEngine(numbered.tokenizer, reply)
    generation = replace(judged, number_judge_attempts=1)
    with judge_endpoint(fair) as endpoint:
        records = Server(numbered, generation, endpoint.url, **options).sample(["a"] * 4, **TRAINING).conversations
    assert sum(record.failure is not None for record in records) == len(failing)
    assert all((record.reward is None) == (record.failure is not None) for record in records)
    assert [len(shown_in(call.body)) for call in endpoint.calls] == ([4 - len(failing)] if len(failing) < 4 else [])


def test_a_conversation_that_fails_after_all_others_have_ended_keeps_nobody_waiting(room, judged, options):
    """The others say goodbye with their first message; this one goes on, and fails."""
    said = count()

    def teach(_: str) -> str:
        number = next(said)
        return f"I am number {number}." + ("" if number == 2 else f" {END_OF_CONVERSATION}")

    def refuse(_: str) -> str:
        raise RequestRefused("no")

    room.teacher, room.student = ScriptedEngine(room.tokenizer, teach), ScriptedEngine(room.tokenizer, refuse)
    generation = replace(judged, number_judge_attempts=1, extra_penalty_for_rejected_judges=0.0)
    with judge_endpoint(fair) as endpoint:
        records = Server(room, generation, endpoint.url, **options).sample(["a"] * 4, **TRAINING).conversations
    assert [record.failure is not None for record in records] == [False, False, True, False]
    assert [len(shown_in(call.body)) for call in endpoint.calls] == [3]


def test_an_evaluation_on_the_same_server_is_judged_one_by_one(numbered, short, options):
    with judge_endpoint(fair) as endpoint:
        records = Server(numbered, short, endpoint.url, **options).sample(["a"] * 4).conversations
    assert [call.behaviour for call in endpoint.calls] == ["single"] * 4
    assert {verdict.group_size for record in records for verdict in record.verdicts} == {None}


# Anchors ------------------------------------------------------------------------------------------------------------


def test_anchors_are_judged_alone_as_well_and_change_no_reward(numbered, short, options):
    def generous(body: dict, nth: int) -> Behaviour:
        if is_about_group(body):
            return fair(body, nth)
        return says(json.dumps(single(0.1 + grade_of(body["messages"][0]["content"]) / 2)), "single")

    with judge_endpoint(generous) as endpoint:
        server = Server(numbered, short, endpoint.url, **options | {"anchor_share": 1.0})
        records = server.sample(["a"] * 8, **TRAINING).conversations
    assert sorted(call.behaviour for call in endpoint.calls) == ["group"] + ["single"] * 8
    assert [record.reward for record in records] == pytest.approx([grade(record) for record in records])
    assert [[each.anchor for each in record.verdicts] for record in records] == [[False, True]] * 8
    metrics = batch_metrics(records)
    gaps = [grade(record) / 2 - 0.1 for record in records]
    assert metrics["judge/anchors"] == 8 and metrics["judge/anchor_gap"] == pytest.approx(sum(gaps) / 8)
    assert metrics["judge/anchor_correlation"] == pytest.approx(1) and metrics["judge/contradictions"] == 0
    assert metrics["judge/anchor_error"] > 0 and metrics["judge/group_share"] == 1
    assert metrics[f"judge/{SCORE}"] == pytest.approx(sum(map(grade, records)) / 8), "anchors are no part of it"


def test_anchors_are_a_share_of_the_conversations(numbered, short, options):
    with judge_endpoint(fair) as endpoint:
        Server(numbered, short, endpoint.url, **options | {"anchor_share": 0.25}).sample(
            ["a"] * 8 + ["b"] * 192, **TRAINING
        )
    singles = sum(call.behaviour == "single" for call in endpoint.calls)
    assert 25 <= singles <= 80


# What goes wrong ------------------------------------------------------------------------------------------------------


def broken(group: dict, how: str) -> str:
    entries = group["conversations"]
    match how:
        case "prose":
            return "They are all fine."
        case "one is missing":
            del entries[0]
        case "one twice":
            entries[0]["number"] = entries[1]["number"]
        case "one too many":
            entries.append(entries[0] | {"number": len(entries) + 1})
        case "no ranking":
            del group["ranking"]
        case "ranked twice":
            group["ranking"][0] = group["ranking"][1]
        case "out of range":
            entries[0][SCORE] = 1.5
        case "a text in place of an entry":
            entries[0] = "good"
        case "true as a number":
            group["ranking"] = [True if number == 1 else number for number in group["ranking"]]
    return json.dumps(group)


FAULTS = ["prose", "one is missing", "one twice", "one too many", "no ranking", "ranked twice", "out of range"]
FAULTS += ["a text in place of an entry", "true as a number"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_group_without_a_verdict_is_judged_one_by_one(numbered, short, options, fault):
    def script(body: dict, nth: int) -> Behaviour:
        if is_about_group(body):
            return says(broken(answer_of_group(shown_in(body)), fault), "broken")
        return fair(body, nth)

    with judge_endpoint(script) as endpoint:
        records = Server(numbered, short, endpoint.url, **options).sample(["a"] * 4, **TRAINING).conversations
    assert sorted(call.behaviour for call in endpoint.calls) == ["broken"] * 3 + ["single"] * 4
    assert [record.reward for record in records] == pytest.approx([grade(record) for record in records])
    assert {record.verdicts[0].group_size for record in records} == {1}


def test_a_second_reply_may_hold_the_verdict(numbered, short, options):
    script = lambda body, nth: says("Well.", "prose") if nth == 0 else fair(body, nth)  # noqa: E731
    with judge_endpoint(script) as endpoint:
        records = Server(numbered, short, endpoint.url, **options).sample(["a"] * 4, **TRAINING).conversations
    assert [call.behaviour for call in endpoint.calls] == ["prose", "group"]
    assert {record.verdicts[0].group_size for record in records} == {4}


def test_a_stop_ends_the_batch_and_not_only_the_conversation_that_asked(numbered, short, options):
    refuse = fails(402, "Insufficient credits")
    with judge_endpoint(always(refuse)) as endpoint, pytest.raises(ProviderFailure, match="Insufficient credits"):
        Server(numbered, replace(short, number_judge_attempts=2), endpoint.url, **options).sample(["a"] * 8, **TRAINING)
    assert len(endpoint.calls) <= 2


@pytest.mark.parametrize("kept", range(0, 9))
@pytest.mark.parametrize("together", [True, False])
def test_a_batch_that_goes_on_pays_for_nothing_again_and_mixes_nothing(numbered, short, options, kept, together):
    """The server stops after some of the verdicts are in the journal."""

    def script(body: dict, nth: int) -> Behaviour:
        return fair(body, nth) if together or not is_about_group(body) else says("prose", "prose")

    with judge_endpoint(script) as endpoint:
        before = Server(numbered, short, endpoint.url, **options).sample(["a"] * 8, **TRAINING)
        paid = len(endpoint.calls)
        journal = numbered.folder / "journal.jsonl"
        lines, verdicts = journal.read_text().splitlines(keepends=True), 0
        left = []
        for line in lines:
            event = json.loads(line)["event"]
            verdicts += event == "verdict"
            if event in ("batch", "turn") or event == "verdict" and verdicts <= kept:
                left.append(line)
        journal.write_text("".join(left))
        after = Server(numbered, short, endpoint.url, **options).sample(["a"] * 8, **TRAINING)
    replies_again = 0 if together or kept else 3  # a group that brought no verdict may be asked about again
    assert len(endpoint.calls) == paid + replies_again
    assert [each.reward for each in after.conversations] == [each.reward for each in before.conversations]
    assert {each.verdicts[0].group_size for each in after.conversations} == {8 if together else 1}


def test_an_attempt_that_fails_on_a_group_fails_for_all_of_it(numbered, short, options):
    """The other attempt judges all of them: no reward is a mean of other calls than another."""
    first: list[str] = []

    def script(body: dict, nth: int) -> Behaviour:
        order = "|".join(shown_in(body))
        first.append(order)
        return says("prose", "prose") if order == first[0] else fair(body, nth)

    with judge_endpoint(script) as endpoint:
        server = Server(numbered, replace(short, number_judge_attempts=2), endpoint.url, **options)
        records = server.sample(["a"] * 8, **TRAINING).conversations
    assert sorted(call.behaviour for call in endpoint.calls) == ["group", "prose", "prose", "prose"]
    assert [record.reward for record in records] == pytest.approx([grade(record) for record in records])
    assert all(sorted(verdict.valid for verdict in record.verdicts) == [False, True] for record in records)


@pytest.mark.parametrize("readable", [True, False])
def test_a_conversation_that_is_played_anew_has_its_whole_group_judged_anew(numbered, short, options, readable):
    """One of a group had failed. After a restart it is played, and no other keeps its old verdict."""
    up = {"no": True}

    def teach(_: str) -> str:
        number = next(numbers)
        if number == 3 and up["no"]:
            raise RequestRefused("no")
        return f"I am number {number}."

    numbers = count()
    numbered.teacher = ScriptedEngine(numbered.tokenizer, teach)

    def script(body: dict, nth: int) -> Behaviour:
        if up["no"] or readable or not is_about_group(body):
            return fair(body, nth)
        return says("prose", "prose")

    with judge_endpoint(script) as endpoint:
        before = Server(numbered, short, endpoint.url, **options).sample(["a"] * 4, **TRAINING).conversations
        assert [each.verdicts[0].group_size if each.verdicts else None for each in before] == [3, 3, 3, None]
        up["no"] = False
        again = Server(numbered, short, endpoint.url, **options)
        after = again.sample(["a"] * 4, judge_again=True, **TRAINING).conversations
    assert [len(each.verdicts) for each in after] == [1] * 4
    assert {each.verdicts[0].group_size for each in after} == {4 if readable else 1}
    assert [each.reward for each in after] == pytest.approx([grade(each) for each in after])
    kept = [
        event["record"] for event in read_journal(numbered.folder / "journal.jsonl") if event["event"] == "conversation"
    ]
    assert {each["id"]: each["reward"] for each in kept} == {each.id: each.reward for each in after}


def test_half_a_character_in_a_reason_stops_nothing(numbered, short, options):
    def script(body: dict, nth: int) -> Behaviour:
        group = answer_of_group(shown_in(body))
        group["conversations"][0]["reasoning"] = "\ud83d"
        return says(json.dumps(group), "group")

    with judge_endpoint(script) as endpoint:
        records = Server(numbered, short, endpoint.url, **options).sample(["a"] * 3, **TRAINING).conversations
    assert {record.verdicts[0].group_size for record in records} == {3}


def test_a_group_is_forgotten_when_it_was_judged(numbered, short, options, monkeypatch):
    seen: list[weakref.ref] = []
    monkeypatch.setattr(runner, "Group", lambda: seen.append(weakref.ref(made := Group())) or made)
    with judge_endpoint(fair) as endpoint:
        Server(numbered, short, endpoint.url, **options).sample(["a"] * 3 + ["b"] * 3, **TRAINING)
    gc.collect()
    assert seen and {each() for each in seen} == {None}


def test_groups_without_any_verdict_show_in_the_log(numbered, short, options):
    script = lambda body, nth: says("prose", "prose") if is_about_group(body) else fair(body, nth)  # noqa: E731
    with judge_endpoint(script) as endpoint:
        server = Server(numbered, short, endpoint.url, **options | {"anchor_share": 1.0})
        records = server.sample(["a"] * 3, **TRAINING).conversations
    assert batch_metrics(records)["judge/group_share"] == 0 and batch_metrics(records)["judge/anchors"] == 0
    assert [call.behaviour for call in endpoint.calls] == ["prose"] * 3 + ["single"] * 3, "no anchors beside them"


def test_a_run_with_groups_is_judged_again_from_its_files(numbered, short, options):
    options |= {"anchor_share": 0.5}
    with judge_endpoint(fair) as endpoint:
        server = Server(numbered, short, endpoint.url, **options)
        before = server.sample(["a"] * 8, **TRAINING).conversations
    generation = replace(short, max_tokens_per_judge_attempt=200)
    found = rejudge(numbered.folder, TrainRLConfig(judge_model=server.config, generation=generation))
    assert [each.now for each in found] == [each.reward for each in before] == [each.before for each in found]
    anchors = [[verdict.scores for verdict in each.verdicts if verdict.anchor] for each in found]
    assert anchors == [[verdict.scores for verdict in each.verdicts if verdict.anchor] for each in before]
    assert any(anchors)


# On an engine, and the parser -----------------------------------------------------------------------------------------


def test_a_judge_on_an_engine_reads_groups_too(options, rules):
    class Engine:
        asked: list[tuple[list, Sampling]] = []

        async def chat(self, messages, sampling: Sampling) -> Completion:
            self.asked.append((messages, sampling))
            text = "Hm." if len(self.asked) == 1 else json.dumps(answer_of_group(shown_in({"messages": messages})))
            return Completion((1,), (0.0,), text, True)

    config = load(TrainRLConfig, "train_rl", []).judge_model
    config.group_prompts_paths = options["group_prompts_paths"]
    dialogues = [[{"role": "teacher", "content": f"I am number {number}."}] for number in (3, 7)]
    text = asyncio.run(ChatEngineJudge(config, rules, 50, Engine()).judge_group(RULE, dialogues, "p", 0))
    assert [each.scores.task_final_score for each in parse_group(RULE, 0, text, 2)] == [0.3, 0.7]
    assert [(sampling.max_tokens, sampling.schema) for _, sampling in Engine.asked] == [(100, group_schema(2))] * 2


@given(st.lists(st.integers(0, 10), min_size=1, max_size=12), st.randoms())
def test_every_conversation_gets_its_own_entry_in_whatever_order_they_come(grades, chance: random.Random):
    answer = answer_of_group([str(grade) for grade in grades], lambda text: int(text) / 10)
    chance.shuffle(answer["conversations"])
    verdicts = parse_group(RULE, 2, f"Here: {json.dumps(answer)}", len(grades))
    assert [each.scores.task_final_score for each in verdicts] == [grade / 10 for grade in grades]
    assert sorted(each.rank for each in verdicts) == list(range(1, len(grades) + 1))
    assert [answer["ranking"][each.rank - 1] for each in verdicts] == list(range(1, len(grades) + 1))
    assert [read_again(each) for each in verdicts] == [replace(each, attempt=2) for each in verdicts]
    assert contradictions(verdicts) in (0, None)


def test_contradictions_between_ranks_and_scores_are_counted():
    answer = answer_of_group(["1", "2", "3"], lambda text: int(text) / 10)
    answer["ranking"] = [1, 3, 2]  # the worst first: it is before two better ones
    assert contradictions(parse_group(RULE, 0, json.dumps(answer), 3)) == pytest.approx(2 / 3)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_with_a_fault_is_no_verdict(fault):
    answer = answer_of_group(["1", "2", "3"], lambda text: int(text) / 10)
    with pytest.raises(JudgeOutputError):
        parse_group(RULE, 0, broken(answer, fault), 3)


def test_a_verdict_of_an_older_run_says_nothing_of_groups():
    assert Verdict(RULE, 0).group_size is None and not Verdict(RULE, 0).anchor


def test_single_and_group_calls_read_the_same_rubric():
    alone, together = (
        (ROOT / f"prompt_templates/judges/language_tutor_{name}.txt").read_text() for name in ("eval", "group")
    )
    rubric = alone[alone.index("# What the words mean") : alone.index("# The lesson plan")]
    assert rubric in together and len(rubric) > 4000
