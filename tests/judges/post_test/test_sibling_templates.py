"""Sibling problems from templates: the program, and the data that it made."""

import asyncio
import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from classroom_rl.config.base import DatasetSource
from classroom_rl.config.load import ROOT
from classroom_rl.errors import DataError
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.judges.post_test.exams import exam_of
from classroom_rl.judges.post_test.sibling_templates import ProblemTemplate, dataset, make_rows, read_templates
from classroom_rl.rollout.datasets import load_problems

FOLDER = ROOT / "data/maths_siblings"
SPLITS = ("train", "test")
ROWS = {
    name: [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    for name in SPLITS
}


def template(**changes) -> ProblemTemplate:
    fields = {
        "id": "shop",
        "problem": "{number} pens cost {price} euros each. {paid} euros are paid. What is left?",
        "numbers": {"number": [3, 9], "price": [2, 5], "paid": [60, 90]},
        "steps": [{"name": "the price of all", "formula": "number * price"}],
        "answer": "paid - number * price",
    }
    return ProblemTemplate.model_validate(fields | changes)


def test_a_problem_is_worked_out_by_its_formulas() -> None:
    for row in make_rows(template(), problems=3, siblings=2, seed=1):
        for problem in (row, *row["sibling_problems"]):
            number, price, paid = map(int, re.findall(r"\d+", problem["problem"]))
            assert problem["answer"] == str(paid - number * price)
            assert problem["steps"] == [{"name": "the price of all", "value": str(number * price)}]


def test_the_same_seed_makes_the_same_and_another_seed_others() -> None:
    first, repeated, other = (make_rows(template(), 3, 2, seed) for seed in (1, 1, 2))
    assert first == repeated != other
    texts = [problem["problem"] for row in first for problem in (row, *row["sibling_problems"])]
    assert len(set(texts)) == 9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answer": "paid - cost"}, "names cost"),
        ({"problem": "{pens} pens?"}, "names pens"),
        ({"answer": "paid -"}, "cannot be computed"),
        ({"answer": "0 - paid"}, "gave 0 problems"),  # no negative values
        ({"answer": "paid / 7", "numbers": {"number": [3, 3], "price": [2, 2], "paid": [60, 62]}}, "gave 0 problems"),
        ({"answer": "number"}, "gave 0 problems"),  # a number of the problem: nobody could tell which one was named
        ({"numbers": {"number": [3, 4], "price": [5, 5], "paid": [61, 61]}}, "gave 2 problems"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(changes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        make_rows(template(**changes), 3, 2, 1)


def test_values_may_have_two_decimals_where_the_template_says_so() -> None:
    halves = {"answer": "paid / 2", "numbers": {"number": [3, 9], "price": [2, 5], "paid": [61, 99]}}
    assert all("." not in row["answer"] for row in make_rows(template(**halves), 3, 0, 1))
    answers = [row["answer"] for row in make_rows(template(**halves, whole=False), 9, 0, 1)]
    assert any(answer.endswith(".5") for answer in answers)


def test_a_file_that_holds_no_templates_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(DataError, match="There is no file"):
        read_templates(path)
    path.write_text('{"id": "a"}\n')
    with pytest.raises(DataError, match="line 1 is no template"):
        read_templates(path)


def test_the_command_writes_what_the_programs_read(tmp_path: Path) -> None:
    templates = FOLDER / "templates/test.jsonl"
    command = [sys.executable, "-m", "classroom_rl.judges.post_test.sibling_templates", "--templates", str(templates)]
    process = subprocess.run([*command, "--out", str(tmp_path / "p.jsonl")], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0 and "24 problems" in process.stdout
    assert (tmp_path / "p.jsonl").read_bytes() == (FOLDER / "test.jsonl").read_bytes()
    failed = subprocess.run([*command[:-1], "none.jsonl", "--out", "x"], cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stderr.startswith("error: There is no file none.jsonl")


# The shipped data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPLITS)
def test_the_shipped_problems_are_what_the_program_makes(name: str) -> None:
    lines = list(dataset(read_templates(FOLDER / f"templates/{name}.jsonl"), problems=4, siblings=3, seed=42))
    assert [json.loads(line) for line in lines] == ROWS[name]


def test_no_template_is_in_both_splits() -> None:
    train, test = ({row["id"].rpartition("-")[0] for row in ROWS[name]} for name in SPLITS)
    assert len(train) == 18 and len(test) == 6 and not train & test


@pytest.mark.parametrize("name", SPLITS)
def test_the_programs_read_them(name: str) -> None:
    columns = {"sibling_problems_column": "sibling_problems", "steps_column": "steps"}
    problems = load_problems([DatasetSource(str(FOLDER / f"{name}.jsonl"), **columns)])
    for problem, row in zip(problems, ROWS[name], strict=True):
        siblings = [sibling["problem"] for sibling in row["sibling_problems"]]
        assert (problem.text, problem.answer) == (row["problem"], row["answer"])
        assert [sibling.problem for sibling in problem.material.siblings] == siblings
        assert len(exam_of(problem, 3).ledger([])) == len(row["steps"]) + 1


def test_every_value_is_one_that_the_checker_reads_and_no_two_of_a_problem_are_equal(checker: AnswerChecker) -> None:
    for row in (*ROWS["train"], *ROWS["test"]):
        values = [row["answer"], *(step["value"] for step in row["steps"])]
        assert all(Fraction(value) > 0 for value in values) and len(set(values)) == len(values)
        assert asyncio.run(checker.is_correct(rf"\boxed{{{row['answer']}}}", row["answer"]))
