"""The shipped maths problems: their fields, their split, and answers that the checker can read."""

import asyncio
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from classroom_rl.config.base import DatasetSource
from classroom_rl.grading.checker import AnswerChecker, _are_equal
from classroom_rl.grading.forms import _as_number, _is_words, _spell_out, _split_unit, _tidy
from classroom_rl.rollout.datasets import load_problems

FOLDER = Path(__file__).resolve().parents[2] / "data/maths"
SPLITS = {
    name: [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    for name in ("train", "test")
}
EVERYTHING = [row for rows in SPLITS.values() for row in rows]


def same(text: str) -> str:
    """A problem's text as far as it tells problems apart."""
    return re.sub(r"[\W_]+", " ", text.casefold())


def test_there_are_as_many_as_were_promised_of_every_level():
    assert {name: len(rows) for name, rows in SPLITS.items()} == {"train": 200, "test": 50}
    for rows in SPLITS.values():
        assert {row["level"] for row in rows} == {"middle school", "high school", "university"}
        assert len({row["topic"] for row in rows}) >= 15


def test_each_has_its_fields_and_an_id_of_its_own():
    assert all(set(row) == {"id", "problem", "answer", "topic", "level"} for row in EVERYTHING)
    assert all(isinstance(value, str) and value.strip() for row in EVERYTHING for value in row.values())
    assert len({row["id"] for row in EVERYTHING}) == len(EVERYTHING)


def test_no_problem_is_there_twice_whether_in_one_split_or_in_both():
    counts = Counter(same(row["problem"]) for row in EVERYTHING)
    assert [text for text, count in counts.items() if count > 1] == []
    without_numbers = {
        name: {re.sub(r"\d+", "", same(row["problem"])) for row in rows} for name, rows in SPLITS.items()
    }
    shared = {text for text in without_numbers["train"] & without_numbers["test"] if len(text.split()) > 4}
    assert not shared, "the same problem with other numbers"


@pytest.mark.parametrize("name", SPLITS)
def test_the_programs_read_them(name):
    problems = load_problems([DatasetSource(str(FOLDER / f"{name}.jsonl"))])
    assert [(problem.text, problem.answer) for problem in problems] == [
        (row["problem"], row["answer"]) for row in SPLITS[name]
    ]


def test_answers_are_of_many_kinds():
    answers = [row["answer"] for row in EVERYTHING]
    kinds = {
        "integer": r"-?\d+",
        "decimal": r"-?\d+\.\d+",
        "fraction": r"-?\\frac\{\d+\}\{\d+\}",
        "percent": r".*\\%",
        "unit": r".*\\text\{ ?(?:[a-z/]+)\}.*|.*\^\\circ",
        "set": r"(?:\\left)?\\\{.*\}",
        "interval": r"[(\[].*\\infty.*",
        "tuple": r"\(-?\d+, -?\d+.*\)",
        "radical": r".*\\sqrt.*",
        "pi": r".*\\pi.*",
        "expression": r".*x.*",
        "equation": r"[a-z] = .*",
        "matrix": r".*matrix.*",
        "words": r"\\text\{[A-Za-z]+\}",
    }
    rare = {kind for kind, form in kinds.items() if sum(bool(re.fullmatch(form, answer)) for answer in answers) < 2}
    assert not rare


def is_read(answer: str) -> bool:
    """Whether math-verify, or the reading of numbers, makes something of an answer: not only the same text."""
    tidy = _tidy(answer)
    if _is_words(tidy):
        return True
    value, unit = _split_unit(tidy)
    equal = _as_number(value) is not None or _are_equal(_spell_out(value), _spell_out(value))
    return equal and not ("text" in answer and unit is None)


def test_every_answer_is_one_that_the_checker_reads():
    assert [row["id"] for row in EVERYTHING if not is_read(row["answer"])] == []


def test_every_answer_equals_itself_and_nothing_else():
    checker = AnswerChecker(timeout_s=60.0, workers=1)

    async def grade(boxed: str) -> list[bool]:
        return [
            await checker.is_correct(rf"Hence \boxed{{{boxed or row['answer']}}}.", row["answer"]) for row in EVERYTHING
        ]

    try:
        assert all(asyncio.run(grade("")))
        assert not any(asyncio.run(grade("98765.4321")))
        assert checker.given_up == 0
    finally:
        checker.shutdown()
