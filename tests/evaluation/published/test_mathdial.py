"""MathDial: what is read, what the tutor is asked, and how its turns are compared with the teachers'."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.evaluation.published.mathdial import compare_turns, read_mathdial
from classroom_rl.evaluation.run import evaluate
from classroom_rl.judges.moves.labelled import read_labelled
from tests.evaluation.published.conftest import ASKS, DIALOGUES, on_mathdial, prompt_of
from tests.support.judge_endpoint import Behaviour, JudgeEndpoint, Script, cut_off, fails, judge_endpoint, says
from tests.support.published_rows import mathdial_flat, mathdial_published
from tests.support.tutor_messages import write_rows

# What is read ------------------------------------------------------------------------------------------------------


def test_mathdial_as_published_and_flat_hold_the_same_turns(tmp_path: Path):
    flat = [mathdial_flat(number) for number in range(2)]
    path = write_rows(tmp_path / "test.jsonl", flat)
    turns = read_mathdial(str(path), "test")
    write_rows(path, [mathdial_published(row) for row in flat])
    assert turns == read_mathdial(str(path), "test")
    assert [turn.move for turn in turns] == ["focus", "telling", "generic"] * 2
    assert [turn.number for turn in turns[:3]] == [2, 4, 6]
    assert turns[1].before[-1] == {"role": "student", "content": "She gives them away."}
    assert turns[1].exchange_with("Mine.").message == "Mine." and turns[1].exchange_with("Mine.").target == "35"


def test_a_move_classifier_gets_the_same_input_as_in_its_training(tmp_path: Path):
    path = str(write_rows(tmp_path / "mathdial.jsonl", [mathdial_flat(1)]))
    _, *trained_on = read_labelled(path)  # the opening turn answers nobody
    assert [turn.exchange for turn in read_mathdial(path, "")] == [message.exchange for message in trained_on]


def test_a_teacher_who_speaks_twice_answers_the_student_once(tmp_path: Path):
    row = mathdial_flat(0)
    row["turns"].insert(3, {"role": "teacher", "move": "probing", "text": "And why?"})
    turns = read_mathdial(str(write_rows(tmp_path / "a.jsonl", [row])), "")
    assert [turn.move for turn in turns] == ["focus", "telling", "generic"]


# Whole runs --------------------------------------------------------------------------------------------------------


def judged_by(endpoint: JudgeEndpoint) -> str:
    return f"judges=[{{model_name_or_path: judge, base_url: '{endpoint.url}'}}]"


def labels(telling: str, reveals: str = "no") -> Behaviour:
    return says(json.dumps({"reasoning": "…", "telling": telling, "reveals_answer": reveals}))


def tutor_and_judge(tutor: Callable[[str], Behaviour], judge: Callable[[str], Behaviour]) -> Script:
    return lambda body, _: (tutor if body["model"] == "tutor" else judge)(prompt_of(body))


def test_telling_of_tutor_and_teacher_by_the_rules(tmp_path: Path, mathdial: str, asking: JudgeEndpoint, capsys):
    metrics = evaluate(on_mathdial(tmp_path / "run", mathdial, asking))
    prompts = [prompt_of(call.body) for call in asking.calls]
    assert all("for you alone: 2" in prompt and "The student's first solution: She has" in prompt for prompt in prompts)
    first = [prompt for prompt in prompts if "Does she get apples" not in prompt]  # what the teacher said then
    assert len(first) == DIALOGUES and all("Student: I took 15 away." in prompt for prompt in first)
    assert metrics["turns"] == metrics["answered"] == 12 and metrics["dialogues"] == DIALOGUES
    assert metrics["telling_by_the_teachers_own_label"]["mean"] == pytest.approx(1 / 3)
    (rules,) = metrics["labellers"].values()
    telling = rules["shares"]["telling"]
    assert (telling["tutor"]["mean"], telling["teacher"]["mean"]) == (0, pytest.approx(1 / 3))
    assert telling["difference"]["mean"] == pytest.approx(-1 / 3) and telling["difference"]["n"] == 12
    assert rules["agreement_on_telling"]["kappa"] == 1.0
    assert rules["shares"]["reveals_answer"]["teacher"]["mean"] == pytest.approx(1 / 3)
    assert metrics["words"]["tutor"] == 5
    assert "tutor − teacher" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "run/turns.jsonl").read_text("utf-8").splitlines()]
    assert [line["move"] for line in lines[:3]] == ["focus", "telling", "generic"] and lines[0]["tutor"] == ASKS
    assert lines[1]["labels"]["rules"]["teacher"] == {"telling": True, "reveals_answer": True}


def test_a_judge_labels_both_sides_and_its_failures_leave_pairs_out(tmp_path: Path, mathdial: str):
    def judge(prompt: str) -> Behaviour:
        turn = prompt.split("# The teacher's next turn\n")[1].split("# Your answer")[0]
        if "See you tomorrow" in turn:
            return says("hard to say")
        return labels("yes", "yes") if "the answer is" in turn else labels("no")

    with judge_endpoint(tutor_and_judge(lambda prompt: says("Add: the answer is 99."), judge)) as endpoint:
        metrics = evaluate(on_mathdial(tmp_path / "run", mathdial, endpoint, judged_by(endpoint)))
    labeller = metrics["labellers"]["judge"]
    assert (labeller["asked"], labeller["answered"], labeller["failures"]) == (24, 20, {"unreadable": 4})
    assert labeller["turns_compared"] == 8, "the four turns that it did not label on one side are left out on both"
    telling = labeller["shares"]["telling"]
    assert (telling["tutor"]["mean"], telling["teacher"]["mean"], telling["difference"]["mean"]) == (1, 0.5, 0.5)
    assert labeller["agreement_on_telling"]["messages"] == 8 and labeller["agreement_on_telling"]["kappa"] == 1
    assert labeller["paid"]["cost_usd"] > 0


def test_a_turn_without_a_reply_is_counted_and_compared_with_nothing(tmp_path: Path, mathdial: str):
    def tutor(prompt: str) -> Behaviour:
        if "Ann has 20 apples" in prompt:
            return fails(400, {"message": "flagged by moderation"})
        if "Ann has 21 apples" in prompt:
            return fails(400, {"message": "This model's maximum context length is 100 tokens"})
        if "Ann has 22 apples" in prompt:
            return says("<think>I never come to an end")
        return cut_off("Tell me, what did you do first, and what then?")

    with judge_endpoint(tutor_and_judge(tutor, lambda prompt: labels("no"))) as endpoint:
        metrics = evaluate(on_mathdial(tmp_path / "run", mathdial, endpoint, judged_by(endpoint)))
    assert metrics["failures"] == {"content refused": 3, "too long": 3, "empty": 3}
    assert metrics["answered"] == metrics["cut"] == 3
    assert {labeller["turns_compared"] for labeller in metrics["labellers"].values()} == {3}
    assert metrics["labellers"]["judge"]["asked"] == 12 + 3


@given(st.lists(st.tuples(st.sampled_from([True, False, None]), st.sampled_from([True, False, None])), min_size=3))
def test_the_difference_is_that_of_the_shares_for_any_labels(tmp_path_factory, pairs: list[tuple]):
    path = tmp_path_factory.mktemp("any") / "mathdial.jsonl"
    turns = read_mathdial(str(write_rows(path, [mathdial_flat(number) for number in range(len(pairs))])), "")

    def side(index: int) -> list[dict | None]:
        values = [pair[index] for pair in pairs for _ in range(3)]
        return [None if value is None else {"telling": value, "reveals_answer": value} for value in values]

    comparison = compare_turns(turns, side(0), side(1))
    shares, complete = comparison["shares"]["telling"], [pair for pair in pairs if None not in pair]
    assert comparison["turns_compared"] == 3 * len(complete)
    if complete:
        assert shares["difference"]["mean"] == pytest.approx(shares["tutor"]["mean"] - shares["teacher"]["mean"])
    else:
        assert shares["difference"]["mean"] is None
