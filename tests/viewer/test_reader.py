"""Tests of single conversations, groups, and comparisons of sets on the page's routes."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from classroom_rl.environments.classroom.conversation import Solution
from classroom_rl.judges.post_test.records import PRODUCED, ExamAnswer, LedgerEntry, PostTest
from classroom_rl.results.evaluation_files import write_compared, write_records
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.datasets import Problem
from tests.support.viewer_run import GROUP, LESSONS, conversation, listed, one


def test_a_conversation_has_turns_personas_thoughts_reasons_and_trained_tokens(http: TestClient) -> None:
    record = one(http, 1)
    assert record["problem"] == LESSONS[0] and record["reward"] == 0.3 and record["rewards"] == {"pedagogical": 0.3}
    assert [turn["persona"] for turn in record["turns"]] == [None, "correct_student", None, "error_student", None]
    assert record["turns"][2]["parts"] == [["thought", "<think>Plan 1.</think>"], ["said", "Go on 1."]]
    assert [turn["trained"] for turn in record["turns"]] == [3, 0, 3, 0, 3]
    assert record["trained_tokens"] == 9 and record["context_tokens"] == 13
    assert record["turns"][0]["policy"] == "run v1"
    assert record["verdicts"][0]["reasons"] == {"task_final_score": "because"}
    assert "completion_ids" not in record


def test_a_failed_judge_is_shown_with_what_it_said(http: TestClient) -> None:
    record = one(http, 2)
    assert record["reward"] is None and record["verdicts"][0]["error"] == "JudgeOutputError: no JSON"
    assert record["verdicts"][0]["raw"] == "I would rather not say."


def test_a_group_is_the_conversations_on_one_problem(http: TestClient) -> None:
    problem = Problem.of(LESSONS[1]).id
    group = http.get("/api/group", params={"where": "step-1", "problem_id": problem}).json()
    assert group["total"] == GROUP and [record["index"] for record in group["conversations"]] == [4, 5, 6, 7]
    assert group["mean"] == pytest.approx(1 / 3) and group["std"] == pytest.approx(0.12472191)
    limited = http.get("/api/group", params={"where": "step-1", "problem_id": problem, "limit": 2}).json()
    assert limited["total"] == GROUP and len(limited["conversations"]) == 2
    unknown = http.get("/api/group", params={"where": "step-1", "problem_id": "none"})
    assert unknown.status_code == 404 and "no conversation on the problem 'none'" in unknown.json()["detail"]


def test_two_sets_are_compared_lesson_by_lesson(http: TestClient, run: Path) -> None:
    sides = {"left": "eval-before", "right": "eval-after"}
    body = http.get("/api/compare", params={**sides, "sampling": "sampled"}).json()
    assert body["total"] == 2 and body["samplings"] == ["sampled", "greedy"]
    assert body["columns"]["left"] == pytest.approx([0.7 / 3] * 2) and body["columns"]["right"] == pytest.approx(
        [1.9 / 3] * 2
    )
    assert body["mean_left"] == pytest.approx(0.7 / 3)
    assert http.get("/api/compare", params={**sides, "sampling": "greedy"}).json()["total"] == 1
    better = [conversation(5, 0, LESSONS[0], reward=0.9), conversation(5, 1, LESSONS[1], reward=0.1)]
    write_rollouts(run, 5, 0, better)
    for sort, order in (("risen", [0.9, 0.1]), ("fallen", [0.1, 0.9])):
        steps = http.get("/api/compare", params={"left": "step-1", "right": "step-5", "sort": sort}).json()
        assert steps["columns"]["right"] == order
    unjudged = [conversation(6, 0, LESSONS[0], reward=None), conversation(6, 1, LESSONS[1], reward=0.5)]
    write_rollouts(run, 6, 0, unjudged)
    body = http.get("/api/compare", params={"left": "step-5", "right": "step-6"}).json()
    assert (body["total"], body["rewarded"], body["mean_left"], body["mean_right"]) == (2, 1, 0.1, 0.5)


def test_the_lessons_of_a_set_can_be_searched(http: TestClient) -> None:
    assert http.get("/api/lessons", params={"where": "eval-before"}).json()["total"] == 2
    lessons = http.get("/api/lessons", params={"where": "eval-before", "text": "sister"}).json()
    assert lessons["columns"]["title"] == ["Lesson: a walk · Plan: you, sister"]
    problem = {"where": "eval-before", "problem_id": lessons["columns"]["problem_id"][0]}
    assert http.get("/api/problem", params=problem).json()["problem"] == LESSONS[1]


def test_what_an_evaluation_of_maths_has_besides_is_shown(http: TestClient, run: Path) -> None:
    records = [conversation(0, i, LESSONS[0], request_id="eval-maths") for i in range(2)]
    records[0].turns[0] = replace(records[0].turns[0], given=True)
    initial = {records[0].problem_id: [Solution("alone: 1/2", 1.0), Solution("no idea", 0.0)]}
    scores = [[0.5, -2.0], [1.0, 2.0, 3.0]]
    path = run / "eval" / "maths" / "conversations.parquet"
    path.parent.mkdir()
    write_records(path, [("sampled", record) for record in records], initial, scores)
    first, second = (
        http.get("/api/conversation", params={"where": "eval-maths", "id": record.id}).json() for record in records
    )
    assert [turn["score"] for turn in first["turns"]] == [None, None, 0.5, None, -2.0]
    assert [turn["score"] for turn in second["turns"]] == [1.0, None, 2.0, None, 3.0]
    assert [(solution["text"], solution["grade"]) for solution in first["initial_solutions"]] == [
        ("alone: 1/2", 1),
        ("no idea", 0),
    ]


def test_a_post_test_is_shown_with_its_ledger_and_its_answers(http: TestClient, run: Path) -> None:
    entry = LedgerEntry("What do you cook?", "What do you cook?", PRODUCED, 1, True)
    test = PostTest((entry,), (ExamAnswer("ledger", 0, "What do you cook?", "I cook an egg.", True),))
    tested = conversation(7, 0, LESSONS[0], post_test=test)
    write_rollouts(run, 7, 0, [tested, conversation(7, 1, LESSONS[0])])
    record = one(http, 0, "step-7")
    assert record["post_test"]["ledger"] == [asdict(entry)] and record["post_test"]["answers"][0]["right"]
    assert one(http, 1, "step-7")["post_test"] is None


def test_several_tutors_of_one_evaluation_are_told_apart(http: TestClient, run: Path) -> None:
    records_by_tutor = {
        name: [("sampled", conversation(0, i, LESSONS[0], request_id=f"eval-{name}")) for i in range(2)]
        for name in ("base", "trained")
    }
    (run / "eval" / "compare").mkdir()
    write_compared(run / "eval" / "compare" / "conversations.parquet", records_by_tutor)
    page = listed(http, where="eval-compare")
    assert page["total"] == 4 and page["samplings"] == ["base, sampled", "trained, sampled"]
    only = listed(http, where="eval-compare", sampling="trained, sampled")["columns"]["id"]
    assert only == [record.id for _, record in records_by_tutor["trained"]]
    problem = records_by_tutor["base"][0][1].problem_id
    group = http.get("/api/group", params={"where": "eval-compare", "problem_id": problem}).json()
    assert [record["sampling"] for record in group["conversations"]] == ["base, sampled"] * 2 + ["trained, sampled"] * 2
