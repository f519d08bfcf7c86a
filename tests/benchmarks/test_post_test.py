"""A tutor that gives everything away and one that scaffolds tie at once, and differ in what the student still knows."""

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.post_test import (
    CORRECTS,
    GIVES_AWAY,
    SCAFFOLDS,
    Subject,
    answered_by,
    difference,
    language_subject,
    maths_subject,
    measure,
    solved_alone,
    table,
)
from benchmarks.post_test_scripts import ScriptedRole
from classroom_rl.config.values import LEDGER, STUDENT
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.judges.post_test.exams import DOES_NOT_KNOW


@pytest.fixture(scope="module")
def checker() -> Iterator[AnswerChecker]:
    answer_checker = AnswerChecker(workers=1)
    yield answer_checker
    answer_checker.shutdown()


@pytest.fixture(scope="module", params=["language", "maths"])
def measured(request: pytest.FixtureRequest, checker: AnswerChecker) -> tuple[Subject, dict, dict]:
    subject = language_subject(12) if request.param == "language" else maths_subject(6)
    return (subject, *asyncio.run(measure(subject, 1, checker)))


def mean(values: dict[str, list[float]]) -> float:
    flat = [value for group in values.values() for value in group]
    return sum(flat) / len(flat)


def test_they_tie_at_once_and_differ_afterwards(measured) -> None:
    _, figures, _ = measured
    assert difference(figures, "at_once")["mean"] == 0.0
    assert mean(figures[SCAFFOLDS]["at_once"]) == 1.0, "a tie of two tutors that teach nothing would show nothing"
    for name in (LEDGER, STUDENT):
        assert difference(figures, name)["mean"] >= 0.3 and difference(figures, name)["p"] < 0.05
        assert mean(figures[GIVES_AWAY][name]) < mean(figures[CORRECTS][name]) < mean(figures[SCAFFOLDS][name])


def test_what_the_student_knew_before_is_told_from_what_it_learned(checker: AnswerChecker) -> None:
    """The tutor that corrects leaves evidence of what was known before, and of nothing else."""
    figures, _ = asyncio.run(measure(language_subject(12), 1, checker))
    corrected = figures[CORRECTS]
    assert 0 < mean(corrected[LEDGER]) <= mean(corrected["knew"]) < 0.8
    assert mean(corrected["learned"]) == 0 and mean(figures[SCAFFOLDS]["learned"]) == 1
    assert mean(figures[GIVES_AWAY]["knew"]) > 0.2 and mean(figures[GIVES_AWAY][LEDGER]) == 0


def test_in_maths_the_student_solves_nothing_before_and_everything_with_the_transcript(checker: AnswerChecker) -> None:
    subject = maths_subject(4)
    figures, _ = asyncio.run(measure(subject, 1, checker))
    assert mean(asyncio.run(solved_alone(subject, checker))) == 0
    assert {mean(arm_figures["at_once"]) for arm_figures in figures.values()} == {1.0}


def test_the_students_answers_are_its_own(measured, checker: AnswerChecker) -> None:
    """A student that knows nothing scores nothing, whatever its ledger says."""
    subject, _, records = measured
    ignorant = ScriptedRole(lambda messages: DOES_NOT_KNOW)
    assert mean(asyncio.run(answered_by(ignorant, subject, records[SCAFFOLDS], checker))) == 0


def test_the_table_has_a_row_for_each_tutor_and_the_difference(measured) -> None:
    _, figures, _ = measured
    rows = table(figures).splitlines()
    assert [row.split("  ")[0] for row in rows[1:]] == [*figures, f"{SCAFFOLDS} − {GIVES_AWAY}"]
    assert "after" in rows[0] and "at once" in rows[0]
