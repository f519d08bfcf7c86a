"""A row that cannot be read is named with its file, line and field; whole dialogues are drawn."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.base import DatasetSource
from classroom_rl.config.benchmark import MISTAKE_LOCATION, PROBLEM_SOLVING, SCAFFOLDING, BenchmarkConfig
from classroom_rl.config.benchmark import SOLUTION_CORRECTNESS as CORRECTNESS
from classroom_rl.errors import DataError
from classroom_rl.evaluation.published.checked_rows import draw
from classroom_rl.evaluation.published.mathdial import read_mathdial
from classroom_rl.evaluation.published.mathtutorbench.clone import TaskFile, read_questions
from classroom_rl.evaluation.published.mrbench import read_mrbench
from classroom_rl.judges.moves import labelled as rows_of_files
from tests.support.published_rows import (
    bridged,
    mathdial_flat,
    mathdial_published,
    mrbench_conversation,
    mrbench_flat,
    verified,
    with_field,
)
from tests.support.tutor_messages import write_rows


def reads(task: str) -> Callable:
    def read(name: str, split: str) -> list:
        file = TaskFile(dataset_path=name, system_prompt="?", test_split=split)
        return read_questions(BenchmarkConfig(datasets={name: name}), task, file)

    return read


NESTED, FLAT, TURNS = mrbench_conversation(1), mrbench_flat(mrbench_conversation(1))[0], mathdial_flat(0)
GPT4, IN_GPT4 = "anno_llm_responses.GPT4", r"field anno_llm_responses\.GPT4\."
WRONG = [
    (read_mrbench, {"text": "Hello"}, "has the fields text; it needs Ground_Truth_Solution, anno_llm"),
    (read_mrbench, with_field(FLAT, "tutor", 7), "field tutor: .*valid string"),
    (read_mrbench, with_field(NESTED, f"{GPT4}.annotation.Coherence", 1), IN_GPT4 + r"annotation\.Coherence: .*string"),
    (
        read_mrbench,
        with_field(NESTED, f"{GPT4}.annotation.Coherence", "Maybe"),
        IN_GPT4 + ".*'Maybe', which is none of",
    ),
    (read_mrbench, with_field(NESTED, f"{GPT4}.annotation.Coherence", None), IN_GPT4 + "annotation has no coherence"),
    (read_mrbench, with_field(NESTED, f"{GPT4}.response", "\ud800"), IN_GPT4 + "response holds half of a character"),
    (read_mathdial, with_field(TURNS, "turns.4.move", "tell"), "turn 4 has the move 'tell'; there are focus, probing"),
    (reads(PROBLEM_SOLVING), verified(0), "line 2: field question: Field required"),
    (reads(CORRECTNESS), with_field(verified(0), "dialog_history", []), "dialog_history holds no turn of the student"),
    (reads(MISTAKE_LOCATION), with_field(verified(0), "incorrect_index", "1"), "incorrect_index: .*valid integer"),
    (reads(SCAFFOLDING), with_field(bridged(0), "dialog_history.2.user", "Student"), "does not end with a teacher's"),
    (reads(SCAFFOLDING), with_field(bridged(0), "dialog_history.2.text", None), r"dialog_history\.2\.text: "),
]


@pytest.mark.parametrize(("read", "row", "message"), WRONG)
def test_a_wrong_row_is_named_with_its_field(tmp_path: Path, read: Callable, row: dict, message: str):
    path = tmp_path / "a.jsonl"
    path.write_text(f"\n{json.dumps(row)}\n", encoding="utf-8")
    with pytest.raises(DataError, match=message) as error:
        read(str(path), "test")
    assert str(error.value).startswith(f"{path}: line 2")


@pytest.mark.parametrize("read", [read_mrbench, read_mathdial, reads(SCAFFOLDING)])
def test_an_empty_file_and_one_that_does_not_exist_are_named(tmp_path: Path, read: Callable):
    with pytest.raises(DataError, match=r"There is no file .*nowhere\.jsonl"):
        read(str(tmp_path / "nowhere.jsonl"), "test")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no"):
        read(str(write_rows(tmp_path / "empty.jsonl", [])), "test")


def test_a_name_without_a_suffix_is_fetched_from_the_hub(monkeypatch: pytest.MonkeyPatch):
    sources = []

    def load_rows(source: DatasetSource) -> list[dict]:
        sources.append((source.name_or_path, source.split))
        return [mathdial_published(mathdial_flat(0))]

    monkeypatch.setattr(rows_of_files, "load_rows", load_rows)
    assert len(read_mathdial("eth-nlped/mathdial", "test")) == 3
    assert sources == [("eth-nlped/mathdial", "test")]


@given(st.lists(st.sampled_from("abcdef"), max_size=20), st.integers(1, 8), st.integers(0, 3))
def test_whole_dialogues_are_drawn_in_their_order_and_the_same_ones_for_a_seed(items: list, limit: int, seed: int):
    marked = list(enumerate(items))
    drawn = draw(marked, lambda item: item[1], limit, seed)
    assert drawn == sorted(drawn) == draw(marked, lambda item: item[1], limit, seed)
    groups = {group for _, group in drawn}
    assert len(groups) == min(limit, len(set(items))) and drawn == [item for item in marked if item[1] in groups]
    assert draw(marked, lambda item: item[1], -1, seed) == marked
    assert set(drawn) <= set(draw(marked, lambda item: item[1], limit + 1, seed)), "what was paid for is in it"
