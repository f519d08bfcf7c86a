"""Tests of the viewer's routes for single conversations, groups and sets, also those that are still played, and of the
split of messages into spoken and thought parts."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from classroom_rl.environments.classroom.conversation import Solution
from classroom_rl.results.evaluation_files import write_compared, write_records
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.datasets import Problem
from classroom_rl.rollout.post_test import PRODUCED, ExamAnswer, LedgerEntry, PostTest
from classroom_rl.rollout.thoughts import split_thoughts, visible_text
from classroom_rl.viewer.turn_views import pieces_of
from tests.support.viewer_run import (
    GROUP,
    HOSTILE,
    HOSTILE_LESSON,
    LESSONS,
    add_tokenizer,
    conversation,
    listed,
    write_journal,
)

# One conversation, a group, two sets -----------------------------------------------------------------------------


def one(http: TestClient, index: int, where: str = "step-1", route: str = "conversation") -> dict:
    page = listed(http, where=where)
    answer = http.get(f"/api/{route}", params={"where": where, "id": page["columns"]["id"][index]})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_conversation_has_turns_personas_thoughts_reasons_and_trained_tokens(http: TestClient) -> None:
    told = one(http, 1)
    assert told["problem"] == LESSONS[0] and told["reward"] == 0.3 and told["rewards"] == {"pedagogical": 0.3}
    assert [turn["persona"] for turn in told["turns"]] == [None, "correct_student", None, "error_student", None]
    assert told["turns"][2]["parts"] == [["thought", "<think>Plan 1.</think>"], ["said", "Go on 1."]]
    assert [turn["trained"] for turn in told["turns"]] == [3, 0, 3, 0, 3]
    assert told["trained_tokens"] == 9 and told["context_tokens"] == 13
    assert told["turns"][0]["policy"] == "run v1"
    assert told["verdicts"][0]["reasons"] == {"task_final_score": "because"}
    assert "completion_ids" not in told


def test_a_failed_judge_is_shown_with_what_it_said(http: TestClient) -> None:
    told = one(http, 2)
    assert told["reward"] is None and told["verdicts"][0]["error"] == "JudgeOutputError: no JSON"
    assert told["verdicts"][0]["raw"] == "I would rather not say."


def test_what_was_said_arrives_letter_for_letter(http: TestClient) -> None:
    for i, text in enumerate(HOSTILE.values()):
        told = one(http, 2 * GROUP + i, "step-0")
        assert told["turns"][0]["parts"] == [["said", text]] and told["problem"] == HOSTILE_LESSON


def test_tokens_come_as_text_with_their_mask_where_the_run_has_the_tokenizer(http, run, small_tokenizer) -> None:
    without = one(http, 0, route="tokens")
    assert not without["pieces"] and "holds no tokenizer.json" in without["why"] and without["trained"] == 9
    add_tokenizer(run, small_tokenizer)
    told = one(http, 0, route="tokens")
    assert told["prompt"] == "t1t2" and "".join(piece[0] for piece in told["pieces"]) == "".join(
        f"t{i}" for i in range(3, 16)
    )
    assert [piece[1] for piece in told["pieces"]] == [1, 1, 1, 0, 0] * 2 + [1, 1, 1]
    assert [piece[2] for piece in told["pieces"]][:4] == [-0.5, -0.5, -0.5, 0.0]
    write_rollouts(run, 1, 0, [conversation(1, 0, LESSONS[0], completion_ids=list(range(90, 103)))])
    assert "does not have all of them" in one(http, 0, route="tokens")["why"]


@pytest.fixture
def small_tokenizer(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(20)}, unk_token="t0"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "small.json"))
    return tmp_path / "small.json"


def test_a_character_of_several_tokens_is_one_piece() -> None:
    data = "aé👩".encode()

    def decode(ids: list[int]) -> str:
        return bytes(data[i] for i in ids).decode(errors="replace")

    assert pieces_of(decode, range(7), [1] * 7) == [("a", 1, 1), ("é", 1, 2), ("👩", 1, 4)]
    assert [count for _, _, count in pieces_of(decode, range(7), [1, 1, 0, 0, 0, 0, 0])] == [1, 1, 5]


def test_a_group_is_the_conversations_on_one_problem(http: TestClient) -> None:
    problem = Problem.of(LESSONS[1]).id
    group = http.get("/api/group", params={"where": "step-1", "problem_id": problem}).json()
    assert group["total"] == GROUP and [each["index"] for each in group["conversations"]] == [4, 5, 6, 7]
    assert group["mean"] == pytest.approx(1 / 3) and group["std"] == pytest.approx(0.12472191)
    few = http.get("/api/group", params={"where": "step-1", "problem_id": problem, "limit": 2}).json()
    assert few["total"] == GROUP and len(few["conversations"]) == 2
    unknown = http.get("/api/group", params={"where": "step-1", "problem_id": "none"})
    assert unknown.status_code == 404 and "no conversation on the problem 'none'" in unknown.json()["detail"]


def test_two_sets_are_compared_lesson_by_lesson(http: TestClient, run: Path) -> None:
    sides = {"left": "eval-before", "right": "eval-after"}
    told = http.get("/api/compare", params={**sides, "sampling": "sampled"}).json()
    assert told["total"] == 2 and told["samplings"] == ["sampled", "greedy"]
    assert told["columns"]["left"] == pytest.approx([0.7 / 3] * 2) and told["columns"]["right"] == pytest.approx(
        [1.9 / 3] * 2
    )
    assert told["mean_left"] == pytest.approx(0.7 / 3)
    assert http.get("/api/compare", params={**sides, "sampling": "greedy"}).json()["total"] == 1
    better = [conversation(5, 0, LESSONS[0], reward=0.9), conversation(5, 1, LESSONS[1], reward=0.1)]
    write_rollouts(run, 5, 0, better)
    for sort, order in (("risen", [0.9, 0.1]), ("fallen", [0.1, 0.9])):
        steps = http.get("/api/compare", params={"left": "step-1", "right": "step-5", "sort": sort}).json()
        assert steps["columns"]["right"] == order
    unjudged = [conversation(6, 0, LESSONS[0], reward=None), conversation(6, 1, LESSONS[1], reward=0.5)]
    write_rollouts(run, 6, 0, unjudged)
    told = http.get("/api/compare", params={"left": "step-5", "right": "step-6"}).json()
    assert (told["total"], told["rewarded"], told["mean_left"], told["mean_right"]) == (2, 1, 0.1, 0.5)


def test_the_lessons_of_a_set_can_be_searched(http: TestClient) -> None:
    assert http.get("/api/lessons", params={"where": "eval-before"}).json()["total"] == 2
    found = http.get("/api/lessons", params={"where": "eval-before", "text": "sister"}).json()
    assert found["columns"]["title"] == ["Lesson: a walk · Plan: you, sister"]
    problem = {"where": "eval-before", "problem_id": found["columns"]["problem_id"][0]}
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
    assert [(each["text"], each["grade"]) for each in first["initial_solutions"]] == [("alone: 1/2", 1), ("no idea", 0)]


def test_a_post_test_is_shown_with_its_ledger_and_its_answers(http: TestClient, run: Path) -> None:
    entry = LedgerEntry("What do you cook?", "What do you cook?", PRODUCED, 1, True)
    test = PostTest((entry,), (ExamAnswer("ledger", 0, "What do you cook?", "I cook an egg.", True),))
    tested = conversation(7, 0, LESSONS[0], post_test=test)
    write_rollouts(run, 7, 0, [tested, conversation(7, 1, LESSONS[0])])
    told = one(http, 0, "step-7")
    assert told["post_test"]["ledger"] == [asdict(entry)] and told["post_test"]["answers"][0]["right"]
    assert one(http, 1, "step-7")["post_test"] is None


def test_several_tutors_of_one_evaluation_are_told_apart(http: TestClient, run: Path) -> None:
    played = {
        name: [("sampled", conversation(0, i, LESSONS[0], request_id=f"eval-{name}")) for i in range(2)]
        for name in ("base", "trained")
    }
    (run / "eval" / "compare").mkdir()
    write_compared(run / "eval" / "compare" / "conversations.parquet", played)
    page = listed(http, where="eval-compare")
    assert page["total"] == 4 and page["samplings"] == ["base, sampled", "trained, sampled"]
    only = listed(http, where="eval-compare", sampling="trained, sampled")["columns"]["id"]
    assert only == [record.id for _, record in played["trained"]]
    problem = played["base"][0][1].problem_id
    group = http.get("/api/group", params={"where": "eval-compare", "problem_id": problem}).json()
    assert [each["sampling"] for each in group["conversations"]] == ["base, sampled"] * 2 + ["trained, sampled"] * 2


# What is being played --------------------------------------------------------------------------------------------


def events_of(record, finished: bool) -> list[dict]:
    """What the journal holds of a conversation."""
    plain = record.model_dump(mode="json")
    events, ids, subject = [], record.completion_ids, {"conversation": record.id}
    for turn in plain["turns"]:
        added = ids[turn["span"][0] : turn["span"][1]] if turn["span"] else ids[3:5]
        logprobs = [-0.5] * 3 if turn["span"] else []
        prompt = {"prompt_ids": record.prompt_ids} if not events else {}
        events.append(
            {"event": "turn", "time": 4e9} | subject | {"turn": turn, "ids": added, "logprobs": logprobs} | prompt
        )
    if not finished:
        return events[:3]
    left_out = ("prompt_ids", "completion_ids", "mask", "logprobs")
    kept = {name: value for name, value in plain.items() if name not in left_out}
    verdict = {"event": "verdict", "time": 4e9} | subject | {"verdict": plain["verdicts"][0]}
    return [*events, verdict, {"event": "conversation", "time": 4e9} | subject | {"record": kept}]


def test_what_is_not_in_a_file_yet_is_read_from_the_journal(http: TestClient, run: Path) -> None:
    request = "run-step000003-rank0of1-abcd"
    done, playing = conversation(3, 0, LESSONS[0]), conversation(3, 1, LESSONS[0])
    batch = {"event": "batch", "time": 4e9, "request": request, "step": 3}
    batch |= {"problems": [[LESSONS[1], ""], [LESSONS[0], "42"]], "problem_of": [0, 1]}
    weights = {"event": "weights", "time": 4e9, "policy": "run v3"}
    path = write_journal(run, [weights, batch, *events_of(done, True), *events_of(playing, False)])
    with path.open("ab") as file:
        file.write(
            b'{"event": "judge_check", "time": 4e9, "request": "%s-judge-check", "step": 3}\n' % request.encode()
        )
        file.write(b'{"event": "turn", "time": 4000000000.0, "conversation": "cut o')
    pulse = http.get("/api/pulse").json()
    assert (pulse["playing"], pulse["played"], pulse["policy"]) == (1, 1, "run v3")
    page = listed(http, where="now")
    assert page["columns"]["state"] == ["END", "PLAYING"] and page["columns"]["step"] == [3, 3]
    assert page["columns"]["personas"][1] == {"correct_student": 1}
    assert page["columns"]["messages"] == [5, 3] and page["columns"]["reward"] == [0.4, None]
    assert page["columns"]["title"] == ["Lesson: at the market · Plan: you, brother"] * 2
    whole, part = one(http, 0, "now"), one(http, 1, "now")
    assert (part["problem"], part["answer"]) == (LESSONS[0], "42")
    assert page["columns"]["problem_id"][1] == part["problem_id"] == Problem.of(LESSONS[0], "42").id
    assert whole["problem"] == LESSONS[0] and whole["trained_tokens"] == 9 and len(whole["turns"]) == 5
    assert [turn["parts"][0][1] for turn in part["turns"][:2]] == ["Hello.", "Answer 1 as correct_student."]
    write_rollouts(run, 3, 0, [done, playing])
    assert listed(http, where="now")["total"] == 0 and listed(http, where="step-3")["total"] == 2


def test_a_batch_that_begins_anew_leaves_its_old_conversations_behind(http: TestClient, run: Path) -> None:
    record = conversation(3, 0, LESSONS[0])
    first_turn = events_of(record, False)[:1]
    batch = {"event": "batch", "time": 4e9, "request": record.request_id, "step": 3, "body": "b"}
    again = [batch | {"weights": "w"}, *first_turn]
    write_journal(run, [batch | {"weights": "w"}, *first_turn])
    assert len(one(http, 0, "now")["turns"]) == 1
    with (run / "journal.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in [batch | {"weights": "new"}, *again[1:]]))
    assert len(one(http, 0, "now")["turns"]) == 1
    with (run / "journal.jsonl").open("a") as file:
        continued = [batch | {"weights": "new"}, events_of(record, False)[1]]
        file.write("".join(json.dumps(event) + "\n" for event in continued))
    assert len(one(http, 0, "now")["turns"]) == 2, "the same work, gone on with"


def test_the_journals_of_further_servers_belong_to_the_run(http: TestClient, run: Path) -> None:
    (run / "server1").mkdir()
    write_journal(run, events_of(conversation(3, 0, LESSONS[0]), True))
    write_journal(run / "server1", events_of(conversation(3, 1, LESSONS[1]), False))
    pulse = http.get("/api/pulse").json()
    assert (pulse["playing"], pulse["played"]) == (1, 1)
    assert len(one(http, 1, "now")["turns"]) == 3
    with (run / "server1" / "journal.jsonl").open("a") as file:
        file.write(json.dumps(events_of(conversation(3, 1, LESSONS[1]), True)[-1]) + "\n")
    after = http.get("/api/pulse").json()
    assert (after["playing"], after["played"]) == (0, 2) and after["journal"] != pulse["journal"]


def test_a_finished_run_plays_nothing(http: TestClient, run: Path) -> None:
    old = [event | {"time": 1.0} for event in events_of(conversation(0, 0, LESSONS[0]), True)]
    write_journal(run, old)
    assert http.get("/api/pulse").json()["played"] == 0 and listed(http, where="now")["total"] == 0


# Thoughts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello.", [("said", "Hello.")]),
        ("<think>a</think>b", [("thought", "<think>a</think>"), ("said", "b")]),
        ("b<think>a", [("said", "b"), ("thought", "<think>a")]),
        ("a</think>b", [("thought", "a</think>"), ("said", "b")]),
        ("a</think>b<think>c", [("thought", "a</think>"), ("said", "b"), ("thought", "<think>c")]),
        ("<think>a</think>b</think>c", [("thought", "<think>a</think>b</think>"), ("said", "c")]),
        ("", []),
    ],
)
def test_thoughts_are_told_from_what_is_said(text: str, parts: list) -> None:
    assert split_thoughts(text) == parts


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "b ", " ", "\n", "<thi"])).map("".join))
def test_what_is_said_is_what_others_hear_and_nothing_is_lost(text: str) -> None:
    parts = split_thoughts(text)
    assert "".join(piece for _, piece in parts) == text
    assert "".join(piece for kind, piece in parts if kind == "said").strip() == visible_text(text)
