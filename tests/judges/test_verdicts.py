"""A judge that ranks and scores a whole group in one call, over real HTTP: who is asked what, what becomes of its
answer, and what is paid. How an answer on one conversation is read: test_json_answer.py."""

import asyncio
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from classroom_rl.judges.model_judge import EngineReplies, ModelJudge
from classroom_rl.judges.verdicts import contradictions, group_schema, parse_group, read_again
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.store.journal import read_journal
from tests.conftest import ROOT
from tests.support.judge_endpoint import Behaviour, Call, Script, fails, judge_endpoint, says
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


def grade(record: ConversationRecord) -> float:
    return grade_of(record.turns[0].text)


def scores(grade: float) -> dict:
    return {SCORE: grade, "forward_progression_score": grade, "overall_momentum_score": 10 * grade}


def answer_of_group(conversations: list[str], grade: Callable[[str], float] = grade_of) -> dict:
    graded = [grade(conversation) for conversation in conversations]
    order = sorted(range(len(graded)), key=lambda index: -graded[index])
    entries = [{"number": i + 1, "reasoning": f"grade {value}", **scores(value)} for i, value in enumerate(graded)]
    return {"comparison": "", "ranking": [index + 1 for index in order], "conversations": entries}


def shown_in(body: dict) -> list[str]:
    return [conversation.strip() for conversation in body["messages"][0]["content"].split("LESSON\n")[1:]]


def is_about_group(body: dict) -> bool:
    return "LESSON\n" in body["messages"][0]["content"]


def single(body: dict, share: float = 1.0, more: float = 0.0) -> Behaviour:
    grade = share * grade_of(body["messages"][0]["content"]) + more
    return says(verdict(grade, grade, 10 * grade), "single")


def fair(body: dict, nth: int) -> Behaviour:
    return says(json.dumps(answer_of_group(shown_in(body))), "group") if is_about_group(body) else single(body)


def prose_on_groups(body: dict, nth: int) -> Behaviour:
    return says("prose", "prose") if is_about_group(body) else fair(body, nth)


@dataclass
class GroupRoom:
    """A classroom whose judge is asked about groups. `generation` is of one message and one attempt."""

    room: Room
    generation: GenerationConfig
    options: dict

    def server(self, url: str, **options) -> Server:
        return Server(self.room, self.generation, url, **self.options | options)

    def play(
        self, problems: list[str], script: Script = fair, request: dict = TRAINING, **options
    ) -> tuple[list[ConversationRecord], list[Call]]:
        """The conversations on these problems, and the calls of the judge."""
        with judge_endpoint(script) as endpoint:
            records = self.server(endpoint.url, **options).sample(problems, **request).conversations
        return records, endpoint.calls

    def script(self, teacher: Callable[[str], str] | None = None, student: Callable[[str], str] | None = None) -> None:
        if teacher is not None:
            self.room.teacher = ScriptedEngine(self.room.tokenizer, teacher)
        if student is not None:
            self.room.student = ScriptedEngine(self.room.tokenizer, student)


@pytest.fixture
def group_room(room: Room, judged: GenerationConfig, tmp_path: Path) -> GroupRoom:
    """The teacher says in each message how many messages it has said before."""
    lesson = "LESSON\n{% for turn in lesson %}{{ turn.content }}\n{% endfor %}"
    template = f"{{{{ problem }}}}\n{{% for lesson in conversations %}}{lesson}{{% endfor %}}"
    (tmp_path / "group.txt").write_text(template)
    options = {"mode": "group", "anchor_share": 0.0, "group_prompts_paths": {RULE: str(tmp_path / "group.txt")}}
    short = replace(judged, max_turns=1, number_judge_attempts=1, extra_penalty_for_rejected_judges=0.0)
    numbers, classroom = count(), GroupRoom(room, short, options)
    classroom.script(teacher=lambda _: f"I am number {next(numbers)}.")
    return classroom


def behaviours(calls: list[Call]) -> list[str]:
    return [call.behaviour for call in calls]


def assert_each_has_its_reward(records: list[ConversationRecord]) -> None:
    assert [record.reward for record in records] == pytest.approx([grade(record) for record in records])


def group_sizes(records: list[ConversationRecord]) -> set[int | None]:
    return {verdict.group_size for record in records for verdict in record.verdicts}


# Who is asked what --------------------------------------------------------------------------------------------------


def test_one_call_judges_a_group_and_each_conversation_gets_its_own_scores(group_room):
    records, calls = group_room.play(["a"] * 8 + ["b"] * 8)
    assert behaviours(calls) == ["group"] * 2 and group_sizes(records) == {8}
    assert_each_has_its_reward(records)
    assert len({record.reward for record in records[:8]}) == 8
    for group in (records[:8], records[8:]):
        best = max(group, key=grade)
        assert [record for record in group if record.verdicts[0].rank == 1] == [best]
        assert best.verdicts[0].reasons == {RULE: f"grade {grade(best)}"}


def test_every_attempt_shows_the_group_in_another_order(group_room):
    group_room.generation.number_judge_attempts = 3
    records, calls = group_room.play(["a"] * 8)
    orders = [tuple(shown_in(call.body)) for call in calls]
    assert len(set(orders)) == 3 and len({frozenset(order) for order in orders}) == 1
    assert_each_has_its_reward(records)


def test_a_rule_that_decides_is_asked_about_each_conversation(group_room, rules):
    group_room.generation.judges_rules_prompts_paths = rules | {"does_not_leak_answer": rules[RULE]}
    ok = json.dumps({"reasoning": "", "decision": "OK"})
    script = lambda body, nth: fair(body, nth) if is_about_group(body) else says(ok, "decides")  # noqa: E731
    _, calls = group_room.play(["a"] * 4, script)
    assert sorted(behaviours(calls)) == ["decides"] * 4 + ["group"]


def test_equal_conversations_are_shown_once_and_get_the_same_verdict(group_room):
    numbers = iter([1, 2, 1, 1])
    group_room.script(teacher=lambda _: f"I am number {next(numbers)}.")
    records, calls = group_room.play(["a"] * 4)
    assert [len(shown_in(call.body)) for call in calls] == [2] and group_sizes(records) == {2}
    assert_each_has_its_reward(records)


@pytest.mark.parametrize("problems", [["a"], ["a", "b"]])
def test_a_conversation_alone_is_judged_alone(group_room, problems):
    records, calls = group_room.play(problems)
    assert set(behaviours(calls)) == {"single"} and group_sizes(records) == {1}


def test_an_evaluation_on_the_same_server_is_judged_one_by_one(group_room):
    records, calls = group_room.play(["a"] * 4, request={})
    assert behaviours(calls) == ["single"] * 4 and group_sizes(records) == {None}


def test_the_schema_of_a_group_goes_with_the_request(group_room):
    _, (call,) = group_room.play(["a"] * 3)
    assert call.body["response_format"]["json_schema"]["schema"] == group_schema(3)
    assert call.body["max_tokens"] == 3 * 200


@pytest.mark.parametrize("failing", [(0,), (2,), (0, 1, 2, 3)])
def test_a_conversation_that_fails_before_the_others_end_is_not_waited_for(group_room, failing):
    turns = count()

    def student(_: str) -> str:
        if next(turns) % 4 in failing:
            raise RequestRefused("no")
        return "Hello."

    group_room.script(student=student)
    group_room.generation.max_turns = 3
    records, calls = group_room.play(["a"] * 4)
    assert sum(record.failure is not None for record in records) == len(failing)
    assert all((record.reward is None) == (record.failure is not None) for record in records)
    assert [len(shown_in(call.body)) for call in calls] == ([4 - len(failing)] if len(failing) < 4 else [])


def test_a_conversation_that_fails_after_all_others_have_ended_keeps_nobody_waiting(group_room):
    """The others say goodbye with their first message; this one goes on, and fails."""
    numbers = count()

    def teacher(_: str) -> str:
        number = next(numbers)
        return f"I am number {number}." + ("" if number == 2 else f" {END_OF_CONVERSATION}")

    def student(_: str) -> str:
        raise RequestRefused("no")

    group_room.script(teacher, student)
    group_room.generation.max_turns = 3
    records, calls = group_room.play(["a"] * 4)
    assert [record.failure is not None for record in records] == [False, False, True, False]
    assert [len(shown_in(call.body)) for call in calls] == [3]


# Anchors ------------------------------------------------------------------------------------------------------------


def test_anchors_are_judged_alone_as_well_and_change_no_reward(group_room):
    def generous(body: dict, nth: int) -> Behaviour:
        return fair(body, nth) if is_about_group(body) else single(body, share=0.5, more=0.1)

    records, calls = group_room.play(["a"] * 8, generous, anchor_share=1.0)
    assert sorted(behaviours(calls)) == ["group"] + ["single"] * 8
    assert_each_has_its_reward(records)
    assert [[verdict.anchor for verdict in record.verdicts] for record in records] == [[False, True]] * 8
    metrics = batch_metrics(records)
    gaps = [grade(record) / 2 - 0.1 for record in records]
    assert metrics["judge/anchors"] == 8 and metrics["judge/anchor_gap"] == pytest.approx(sum(gaps) / 8)
    assert metrics["judge/anchor_correlation"] == pytest.approx(1) and metrics["judge/contradictions"] == 0
    assert metrics["judge/anchor_error"] > 0 and metrics["judge/group_share"] == 1
    assert metrics[f"judge/{SCORE}"] == pytest.approx(sum(map(grade, records)) / 8), "anchors are no part of it"


def test_anchors_are_a_share_of_the_conversations(group_room):
    _, calls = group_room.play(["a"] * 8 + ["b"] * 192, anchor_share=0.25)
    assert 25 <= behaviours(calls).count("single") <= 80


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_a_group_without_a_verdict_is_judged_one_by_one(group_room):
    records, calls = group_room.play(["a"] * 4, prose_on_groups, anchor_share=1.0)
    assert behaviours(calls) == ["prose"] * 3 + ["single"] * 4, "no anchors beside them"
    assert_each_has_its_reward(records)
    assert group_sizes(records) == {1}
    assert batch_metrics(records)["judge/group_share"] == 0 and batch_metrics(records)["judge/anchors"] == 0


def test_a_stop_ends_the_batch_and_not_only_the_conversation_that_asked(group_room):
    group_room.generation.number_judge_attempts = 2
    with judge_endpoint(always(fails(402, "Insufficient credits"))) as endpoint:
        with pytest.raises(ProviderFailure, match="Insufficient credits"):
            group_room.server(endpoint.url).sample(["a"] * 8, **TRAINING)
        assert len(endpoint.calls) <= 2


@pytest.mark.parametrize("kept", [0, 1, 4, 8])
@pytest.mark.parametrize("together", [True, False])
def test_a_batch_that_goes_on_pays_for_nothing_again_and_mixes_nothing(group_room, kept, together):
    """The server stops after some of the verdicts are in the journal."""
    with judge_endpoint(fair if together else prose_on_groups) as endpoint:
        before = group_room.server(endpoint.url).sample(["a"] * 8, **TRAINING).conversations
        call_count = len(endpoint.calls)
        keep_verdicts(group_room.room.folder / "journal.jsonl", kept)
        after = group_room.server(endpoint.url).sample(["a"] * 8, **TRAINING).conversations
    replies_again = 0 if together or kept else 3  # a group that brought no verdict may be asked about again
    assert len(endpoint.calls) == call_count + replies_again
    assert [record.reward for record in after] == [record.reward for record in before]
    assert group_sizes(after) == {8 if together else 1}


def keep_verdicts(journal: Path, most: int) -> None:
    """Cut a journal after so many verdicts."""
    lines, verdicts = [], 0
    for line in journal.read_text().splitlines(keepends=True):
        event = json.loads(line)["event"]
        verdicts += event == "verdict"
        if event in ("batch", "turn") or event == "verdict" and verdicts <= most:
            lines.append(line)
    journal.write_text("".join(lines))


def test_an_attempt_that_fails_on_a_group_fails_for_all_of_it(group_room):
    """The other attempt judges all of them: no reward is a mean of other calls than another."""
    orders: list[str] = []

    def script(body: dict, nth: int) -> Behaviour:
        orders.append("|".join(shown_in(body)))
        return says("prose", "prose") if orders[-1] == orders[0] else fair(body, nth)

    group_room.generation.number_judge_attempts = 2
    records, calls = group_room.play(["a"] * 8, script)
    assert sorted(behaviours(calls)) == ["group", "prose", "prose", "prose"]
    assert_each_has_its_reward(records)
    assert all(sorted(verdict.valid for verdict in record.verdicts) == [False, True] for record in records)


@pytest.mark.parametrize("readable", [True, False])
def test_a_conversation_that_is_played_anew_has_its_whole_group_judged_anew(group_room, readable):
    """One of a group had failed. After a restart it is played, and no other keeps its old verdict."""
    numbers, down = count(), True

    def teacher(_: str) -> str:
        number = next(numbers)
        if number == 3 and down:
            raise RequestRefused("no")
        return f"I am number {number}."

    def script(body: dict, nth: int) -> Behaviour:
        return fair(body, nth) if down or readable else prose_on_groups(body, nth)

    group_room.script(teacher)
    with judge_endpoint(script) as endpoint:
        before = group_room.server(endpoint.url).sample(["a"] * 4, **TRAINING).conversations
        down = False
        after = group_room.server(endpoint.url).sample(["a"] * 4, judge_again=True, **TRAINING).conversations
    assert [[verdict.group_size for verdict in record.verdicts] for record in before] == [[3], [3], [3], []]
    assert [[verdict.group_size for verdict in record.verdicts] for record in after] == [[4 if readable else 1]] * 4
    assert_each_has_its_reward(after)
    events = read_journal(group_room.room.folder / "journal.jsonl")
    records = [event["record"] for event in events if event["event"] == "conversation"]
    assert {record["id"]: record["reward"] for record in records} == {record.id: record.reward for record in after}


def test_a_run_with_groups_is_judged_again_from_its_files(group_room):
    with judge_endpoint(fair) as endpoint:
        server = group_room.server(endpoint.url, anchor_share=0.5)
        before = server.sample(["a"] * 8, **TRAINING).conversations
    generation = replace(group_room.generation, max_tokens_per_judge_attempt=200)
    rejudged = rejudge(group_room.room.folder, TrainRLConfig(judge_model=server.config, generation=generation))
    assert (
        [conversation.now for conversation in rejudged]
        == [record.reward for record in before]
        == [conversation.before for conversation in rejudged]
    )
    anchors = [[verdict.scores for verdict in record.verdicts if verdict.anchor] for record in before]
    assert [
        [verdict.scores for verdict in conversation.verdicts if verdict.anchor] for conversation in rejudged
    ] == anchors
    assert any(anchors)


# On an engine, and the parser -----------------------------------------------------------------------------------------


def test_a_judge_on_an_engine_reads_groups_too(group_room, rules):
    class Engine:
        asked: list[Sampling] = []

        async def chat(self, messages, sampling: Sampling) -> Completion:
            self.asked.append(sampling)
            text = "Hm." if len(self.asked) == 1 else json.dumps(answer_of_group(shown_in({"messages": messages})))
            return Completion((1,), (0.0,), text, True)

    config = load(TrainRLConfig, "train_rl", []).judge_model
    config.group_prompts_paths = group_room.options["group_prompts_paths"]
    dialogues = [[{"role": "teacher", "content": f"I am number {number}."}] for number in (3, 7)]
    judge = ModelJudge(config, rules, 50, EngineReplies(Engine(), "judge"))
    text = asyncio.run(judge.judge_group(RULE, dialogues, "p", 0))
    assert [verdict.scores.task_final_score for verdict in parse_group(RULE, 0, text, 2)] == [0.3, 0.7]
    assert [(sampling.max_tokens, sampling.schema) for sampling in Engine.asked] == [(100, group_schema(2))] * 2


def graded(*grades: int) -> dict:
    """An answer on conversations of these grades out of 10."""
    return answer_of_group([str(grade) for grade in grades], lambda text: int(text) / 10)


@given(st.lists(st.integers(0, 10), min_size=1, max_size=12), st.randoms())
def test_every_conversation_gets_its_own_entry_in_whatever_order_they_come(grades, chance: random.Random):
    answer = graded(*grades)
    chance.shuffle(answer["conversations"])
    verdicts = parse_group(RULE, 2, f"Here: {json.dumps(answer)}", len(grades))
    assert [verdict.scores.task_final_score for verdict in verdicts] == [grade / 10 for grade in grades]
    assert sorted(verdict.rank for verdict in verdicts) == list(range(1, len(grades) + 1))
    assert [answer["ranking"][verdict.rank - 1] for verdict in verdicts] == list(range(1, len(grades) + 1))
    assert [read_again(verdict) for verdict in verdicts] == [replace(verdict, attempt=2) for verdict in verdicts]
    assert contradictions(verdicts) in (0, None)


def test_contradictions_between_ranks_and_scores_are_counted():
    answer = graded(1, 2, 3) | {"ranking": [1, 3, 2]}  # the worst first: it is before two better ones
    assert contradictions(parse_group(RULE, 0, json.dumps(answer), 3)) == pytest.approx(2 / 3)


def test_a_reason_that_holds_half_a_character_can_be_kept():
    answer = graded(1, 2)
    answer["conversations"][0]["reasoning"] = "\ud83d"
    assert all(
        f"{verdict.reasons[RULE]}{verdict.raw}".encode() for verdict in parse_group(RULE, 0, json.dumps(answer), 2)
    )


def change_entries(change: Callable[[list], object]) -> Callable[[dict], object]:
    return lambda answer: change(answer["conversations"])


@pytest.mark.parametrize(
    "damage",
    [
        change_entries(lambda entries: entries.pop(0)),
        change_entries(lambda entries: entries[0].update(number=2)),
        change_entries(lambda entries: entries.append(entries[0] | {"number": 4})),
        change_entries(lambda entries: entries[0].update({SCORE: 1.5})),
        change_entries(lambda entries: entries.__setitem__(0, "good")),
        lambda answer: answer.pop("ranking"),
        lambda answer: answer.update(ranking=[3, 3, 1]),
        lambda answer: answer.update(ranking=[3, 2, True]),
    ],
    ids=["one missing", "one twice", "one too many", "range", "text", "no ranking", "ranked twice", "true as 1"],
)
def test_an_answer_with_a_fault_is_no_verdict(damage):
    answer = graded(1, 2, 3)
    assert parse_group(RULE, 0, json.dumps(answer), 3)
    damage(answer)
    with pytest.raises(JudgeOutputError):
        parse_group(RULE, 0, json.dumps(answer), 3)


def test_single_and_group_calls_read_the_same_rubric():
    single_prompt, group_prompt = (
        (ROOT / f"prompt_templates/judges/language_tutor_{name}.txt").read_text() for name in ("eval", "group")
    )
    rubric = single_prompt[single_prompt.index("# What the words mean") : single_prompt.index("# The lesson plan")]
    assert rubric in group_prompt and len(rubric) > 4000
