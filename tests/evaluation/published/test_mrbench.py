"""Published benchmarks are read as published and flat, and what cannot be read is named with file, row and field."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.benchmark import MISTAKE_CORRECTION, MISTAKE_LOCATION, PROBLEM_SOLVING, SCAFFOLDING
from classroom_rl.config.benchmark import SOLUTION_CORRECTNESS as CORRECTNESS
from classroom_rl.errors import DataError
from classroom_rl.evaluation.published.checked_rows import draw
from classroom_rl.evaluation.published.mathdial import read_mathdial
from classroom_rl.evaluation.published.mathtutorbench import read_tasks
from classroom_rl.evaluation.published.mrbench import DIMENSIONS, read_mrbench
from classroom_rl.judges.moves import labelled as rows_of_files
from classroom_rl.judges.moves.labelled import read_labelled
from tests.support.published_rows import (
    bridged,
    mathdial_flat,
    mathdial_published,
    mrbench_conversation,
    mrbench_flat,
    solved,
    verified,
    with_field,
    write_json,
)
from tests.support.tutor_messages import write_rows


def test_mrbench_as_published_and_flat_hold_the_same(tmp_path: Path):
    conversations = [mrbench_conversation(number) for number in range(3)]
    published = read_mrbench(write_json(tmp_path / "MRBench_V2.json", conversations), "test")
    rows = [row for each in conversations for row in mrbench_flat(each)]
    assert published == read_mrbench(str(write_rows(tmp_path / "flat.jsonl", rows)), "test")
    assert len(published) == 9 and len({reply.history for reply in published}) == 3
    expert, novice, gpt = published[:3]
    assert expert.id == "made-0-Expert" and expert.solution == "10 + 5 = 15\n 15"
    assert expert.history == "Tutor: A basket has 10 eggs, another has 5. How many?\nStudent: There are 10."
    assert set(expert.labels) == set(DIMENSIONS)
    assert expert.labels["mistake_location"] == "to some extent" and expert.labels["tutor_tone"] == "encouraging"
    reveals = [each.labels["revealing_of_the_answer"] for each in (expert, novice, gpt)]
    assert reveals == ["no", "yes, correct", "yes, incorrect"]


def test_a_reader_is_shown_of_both_benchmarks_what_it_was_trained_on(tmp_path: Path):
    """Otherwise its agreement would be that of another reader."""
    replies = write_json(tmp_path / "mrbench.json", [mrbench_conversation(1)])
    assert [each.exchange for each in read_mrbench(replies, "")] == [each.exchange for each in read_labelled(replies)]
    dialogues = str(write_rows(tmp_path / "mathdial.jsonl", [mathdial_flat(1)]))
    assert [each.exchange for each in read_mathdial(dialogues, "")] == [
        each.exchange for each in read_labelled(dialogues)
    ][1:], "the opening turn answers nobody"


def test_an_unknown_solution_is_none(tmp_path: Path):
    row = mrbench_conversation(1) | {"Ground_Truth_Solution": "Not Available"}
    assert {each.solution for each in read_mrbench(write_json(tmp_path / "a.json", [row]), "")} == {""}


def test_mathdial_as_published_and_flat_hold_the_same_turns(tmp_path: Path):
    flat = [mathdial_flat(number) for number in range(2)]
    path = write_rows(tmp_path / "test.jsonl", flat)
    found = read_mathdial(str(path), "test")
    write_rows(path, [mathdial_published(row) for row in flat])
    assert found == read_mathdial(str(path), "test")
    assert [turn.move for turn in found] == ["focus", "telling", "generic"] * 2
    assert [turn.number for turn in found[:3]] == [2, 4, 6]
    assert found[1].before[-1] == {"role": "student", "content": "She gives them away."}
    assert found[1].exchange_with("Mine.").message == "Mine." and found[1].exchange_with("Mine.").target == "35"


def test_a_teacher_who_speaks_twice_answers_the_student_once(tmp_path: Path):
    row = mathdial_flat(0)
    row["turns"].insert(3, {"role": "teacher", "move": "probing", "text": "And why?"})
    found = read_mathdial(str(write_rows(tmp_path / "a.jsonl", [row])), "")
    assert [turn.move for turn in found] == ["focus", "telling", "generic"]


def test_a_name_without_a_suffix_is_fetched_from_the_hub(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load_rows(source: Any) -> list[dict]:
        asked.append(SimpleNamespace(name=source.name_or_path, split=source.split))
        return [mathdial_published(mathdial_flat(0))]

    monkeypatch.setattr(rows_of_files, "load_rows", load_rows)
    assert len(read_mathdial("eth-nlped/mathdial", "test")) == 3
    assert asked == [SimpleNamespace(name="eth-nlped/mathdial", split="test")]


def test_a_tutor_without_a_reply_is_null_in_a_table_and_no_reply(tmp_path: Path):
    row = mrbench_conversation(1)
    row["anno_llm_responses"]["Phi3"] = None
    assert len(read_mrbench(write_json(tmp_path / "a.json", [row]), "")) == 3


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "Hello"}, "line 2 has the fields text; it needs Ground_Truth_Solution, anno_llm_responses"),
        (with_field(mrbench_flat(mrbench_conversation(1))[0], "tutor", 7), "line 2: field tutor: .*valid string"),
        (
            with_field(mrbench_conversation(1), "anno_llm_responses.GPT4.annotation.Coherence", 1),
            r"line 2: field anno_llm_responses\.GPT4\.annotation\.Coherence: .*valid string",
        ),
        (
            with_field(mrbench_conversation(1), "anno_llm_responses.GPT4.annotation.Coherence", "Maybe"),
            r"line 2: field anno_llm_responses\.GPT4\.annotation\.coherence is 'Maybe', which is none of",
        ),
        (
            with_field(mrbench_conversation(1), "anno_llm_responses.GPT4.annotation.Coherence", None),
            r"line 2: field anno_llm_responses\.GPT4\.annotation has no coherence",
        ),
        (
            with_field(mrbench_conversation(1), "anno_llm_responses.GPT4.response", "\ud800"),
            r"line 2: field anno_llm_responses\.GPT4\.response holds half of a character",
        ),
    ],
)
def test_a_wrong_row_of_mrbench_is_named_with_its_field(tmp_path: Path, row: dict, says: str):
    path = write_rows_as_ascii(tmp_path / "a.jsonl", [mrbench_conversation(0), row])
    with pytest.raises(DataError, match=says) as caught:
        read_mrbench(path, "test")
    assert str(caught.value).startswith(path)


@pytest.mark.parametrize(
    ("task", "row", "says"),
    [
        (PROBLEM_SOLVING, {"question": "?", "answer": "It is 4."}, "line 1: field answer does not end with '#### '"),
        (PROBLEM_SOLVING, verified(0), "line 1 has the fields .*; it needs answer, question"),
        (CORRECTNESS, with_field(verified(0), "dialog_history", []), "dialog_history holds no turn of the student"),
        (MISTAKE_LOCATION, with_field(verified(0), "incorrect_index", 4), "field incorrect_index is 4, but .* 4 steps"),
        (MISTAKE_LOCATION, with_field(verified(0), "incorrect_index", "1"), "field incorrect_index: .*valid integer"),
        (SCAFFOLDING, with_field(bridged(0), "dialog_history.2.user", "Student"), "does not end with a teacher's"),
        (SCAFFOLDING, with_field(bridged(0), "dialog_history.2.text", None), r"field dialog_history\.2\.text: "),
    ],
)
def test_a_wrong_row_of_a_task_is_named_with_its_field(tmp_path: Path, task: str, row: dict, says: str):
    path = write_rows_as_ascii(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=says) as caught:
        read_tasks(task, path, "test")
    assert str(caught.value).startswith(path)


def test_an_unknown_move_is_named(tmp_path: Path):
    row = with_field(mathdial_flat(0), "turns.4.move", "tell")
    with pytest.raises(DataError, match=r"line 1: turn 4 has the move 'tell'; there are focus, probing, telling"):
        read_mathdial(str(write_rows(tmp_path / "a.jsonl", [row])), "")


@pytest.mark.parametrize(
    "read", [read_mrbench, read_mathdial, lambda name, split: read_tasks(SCAFFOLDING, name, split)]
)
def test_an_empty_file_and_one_that_is_not_there_are_named(tmp_path: Path, read: Any):
    with pytest.raises(DataError, match="There is no file .*nowhere.jsonl"):
        read(str(tmp_path / "nowhere.jsonl"), "test")
    with pytest.raises(DataError, match="empty.jsonl holds no"):
        read(str(write_rows(tmp_path / "empty.jsonl", [])), "test")


def test_each_verified_problem_is_asked_about_with_a_mistake_and_without(tmp_path: Path):
    write_json(tmp_path / "stepverify.json", [verified(0)])
    wrong, right = read_tasks(MISTAKE_LOCATION, str(tmp_path), "")
    assert (wrong.expected, right.expected, wrong.has_mistake, right.has_mistake) == ("2", "0", True, False)
    assert wrong.variables["steps"] == ["One basket has 10.", "The other has 12.", "Together 22."]
    assert right.variables["steps"] == ["The other has 20.", "Together 30."]
    assert wrong.problem_id == right.problem_id
    told = [each.variables["conversation"][-1]["content"] for each in read_tasks(CORRECTNESS, str(tmp_path), "")]
    assert told == ["I added 2 and got 22.", "The other has 20, so there are 30."]
    assert {each.expected for each in read_tasks(MISTAKE_CORRECTION, str(tmp_path), "")} == {"30"}


def test_what_the_human_teacher_said_is_not_shown_to_the_tutor(tmp_path: Path):
    write_json(tmp_path / "mathdial_bridge.json", [bridged(0)])
    (found,) = read_tasks(SCAFFOLDING, str(tmp_path), "")
    assert found.expected == "What does twice as many mean?"
    assert "twice as many mean" not in json.dumps(found.variables["conversation"])


def test_a_number_with_a_comma_is_expected_without_it(tmp_path: Path):
    write_rows(tmp_path / "gsm8k_test.jsonl", [solved(4)])
    assert [each.expected for each in read_tasks(PROBLEM_SOLVING, str(tmp_path), "")] == ["1004"]


@given(st.lists(st.sampled_from("abcdef"), max_size=20), st.integers(1, 8), st.integers(0, 3))
def test_whole_dialogues_are_drawn_in_their_order_and_the_same_ones_for_a_seed(items: list, limit: int, seed: int):
    marked = list(enumerate(items))
    found = draw(marked, lambda item: item[1], limit, seed)
    assert found == sorted(found) == draw(marked, lambda item: item[1], limit, seed)
    groups = {group for _, group in found}
    assert len(groups) == min(limit, len(set(items))) and found == [each for each in marked if each[1] in groups]
    assert draw(marked, lambda item: item[1], -1, seed) == marked
    assert set(found) <= set(draw(marked, lambda item: item[1], limit + 1, seed)), "what was paid for is in it"


def write_rows_as_ascii(path: Path, rows: list[dict]) -> str:
    """As `write_rows`, for rows with half of a character."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)
