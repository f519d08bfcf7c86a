"""Kappa and its interval on numbers worked out by hand; a cross-validation that does not look at what it measures on;
and public data of real tutors, which is not part of the project (docs/classroom.md says how to get it)."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.readers import BEFORE
from classroom_rl.config.load import ROOT
from classroom_rl.errors import DataError
from classroom_rl.judges.moves.classifier import seen
from classroom_rl.judges.moves.cross_validation import (
    BY_CLASSIFIER,
    agreement,
    best_threshold,
    difference,
    kappa,
    measure,
)
from classroom_rl.judges.moves.labelled import LABELS_OF, LabelledMessage, read_labelled
from classroom_rl.judges.moves.rules import RULES
from tests.judges.conftest import FOLDS
from tests.support.tutor_messages import mrbench_rows, write_rows

LABELS = [True] * 25 + [False] * 25
PREDICTIONS = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
FEW_LESSONS = [str(index % 10) for index in range(50)]
MANY_LESSONS = [str(index) for index in range(50)]


# Agreement -----------------------------------------------------------------------------------------------------------


def test_the_textbook_example():
    """Agreement 35 of 50; by chance 0.5 · 0.6 + 0.5 · 0.4 = 0.5; (0.7 − 0.5) / 0.5 = 0.4."""
    few = agreement(LABELS, PREDICTIONS, FEW_LESSONS)
    assert few.kappa == pytest.approx(0.4) == kappa(np.array(LABELS), np.array(PREDICTIONS))
    assert (few.precision, few.recall, few.base_rate) == (20 / 30, 20 / 25, 0.5)
    assert (few.messages, few.lessons) == (50, 10)
    assert few.ci95 is None, "ten lessons: no interval of a kappa covers"
    low, high = agreement(LABELS, PREDICTIONS, MANY_LESSONS).ci95
    assert -1 <= low < 0.4 < high <= 1


@pytest.mark.parametrize(
    ("labels", "predictions", "value", "precision"),
    [
        (LABELS, LABELS, 1, 1),
        (LABELS, [not label for label in LABELS], -1, 0),
        ([True] * 50, [True] * 50, 0, 1),  # who always says the same agrees by chance alone
        (LABELS, [False] * 50, 0, None),
    ],
)
def test_extreme_predictions(labels, predictions, value, precision):
    result = agreement(labels, predictions, FEW_LESSONS)
    assert (result.kappa, result.precision) == (value, precision)


def test_the_interval_is_over_lessons_not_messages():
    """The same messages in forty copies of each lesson: few lessons stay few."""
    copied = agreement(LABELS * 40, PREDICTIONS * 40, MANY_LESSONS * 40)
    assert copied.ci95 == pytest.approx(agreement(LABELS, PREDICTIONS, MANY_LESSONS).ci95) and copied.messages == 2000


def test_a_difference():
    gain, (low, high) = difference(LABELS, LABELS, PREDICTIONS, MANY_LESSONS)
    assert gain == pytest.approx(0.6) and 0 < low < gain < high
    assert difference(LABELS, PREDICTIONS, PREDICTIONS, MANY_LESSONS) == (0, [0, 0])
    assert difference(LABELS, LABELS, PREDICTIONS, FEW_LESSONS)[1] is None


# Cross-validation ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_maths(labelled: list[LabelledMessage]) -> list[LabelledMessage]:
    return [message for message in labelled if message.source == "MRBench"]


def test_labels_that_mean_nothing_are_not_read_better_than_by_chance(of_maths: list[LabelledMessage]):
    """The same messages with the labels of other lessons: whatever is measured now is chance."""
    shuffled = np.random.default_rng(0).permutation(len(of_maths))
    mixed = [replace(message, labels=of_maths[index].labels) for message, index in zip(of_maths, shuffled, strict=True)]
    for label, result in measure(mixed, FOLDS).items():
        assert abs(result.agreements[BY_CLASSIFIER].kappa) < 0.25, label


def test_what_is_read_in_a_lesson_does_not_depend_on_its_labels(of_maths: list[LabelledMessage]):
    """Neither weights nor thresholds are chosen with the fold that is measured."""
    in_lesson = [message.lesson == of_maths[0].lesson for message in of_maths]
    turned = [
        replace(message, labels={label: not value for label, value in message.labels.items()}) if turns else message
        for message, turns in zip(of_maths, in_lesson, strict=True)
    ]
    before, after = measure(of_maths, FOLDS), measure(turned, FOLDS)
    for label in before:
        assert (before[label].found[BY_CLASSIFIER][in_lesson] == after[label].found[BY_CLASSIFIER][in_lesson]).all()


def test_the_best_threshold_separates():
    labels = np.array([False, False, True, True])
    assert 1 < best_threshold(labels, np.array([0.0, 1.0, 2.0, 3.0])) <= 2


@pytest.mark.parametrize(
    ("lessons", "labels", "folds", "words"),
    [
        (3, {}, 4, "3 lessons; a cross-validation with 4 folds needs"),
        (8, {"Actionability": "No"}, 2, "The label actionable is never given"),
    ],
)
def test_data_that_cannot_be_measured_on(tmp_path: Path, lessons: int, labels: dict, folds: int, words: str):
    rows = [row | {"labels": row["labels"] | labels} for row in mrbench_rows(lessons, seed=1)]
    with pytest.raises(DataError, match=words):
        measure(read_labelled(str(write_rows(tmp_path / "a.jsonl", rows))), folds)


# Real tutors ---------------------------------------------------------------------------------------------------------

DATA = Path(os.environ.get("TUTOR_DATA", ROOT.parent / "shared" / "data"))
FILES = {source: DATA / f"{source.lower()}.jsonl" for source in LABELS_OF}
needs_data = pytest.mark.skipif(
    not all(file.is_file() for file in FILES.values()), reason=f"there is no data of real tutors in {DATA}"
)
LEAST_KAPPAS = {
    "question": (0.7, 0.75),
    "hint": (0.35, 0.6),
    "correction": (0.55, 0.6),
    "treats_as_wrong": (0.45, 0.55),
    "confirmation": (0.35, 0.5),
    "reveals_answer": (0.3, 0.65),
    "telling": (0.4, 0.5),
    "actionable": (0.25, 0.45),
    "mistake_identified": (0.4, 0.5),
}
"""A bit below kappa of the rules on half of each set, and of what reads, in the cross-validation."""


@needs_data
@pytest.mark.parametrize("source", LABELS_OF)
def test_the_rules_agree_with_people(source: str):
    messages = read_labelled(str(FILES[source]))
    lessons = [message.lesson for message in messages]
    for label in LABELS_OF[source]:
        labels = [message.labels[label] for message in messages]
        result = agreement(labels, [RULES[label](seen(label, message.exchange)) for message in messages], lessons)
        assert result.kappa > LEAST_KAPPAS[label][0], (label, result)


@needs_data
@pytest.mark.full
@pytest.mark.parametrize("source", LABELS_OF)
def test_what_reads_agrees_better_than_the_rule_before(source: str):
    messages = read_labelled(str(FILES[source]))
    lessons = [message.lesson for message in messages]
    for label, result in measure(messages).items():
        assert result.agreements[result.chosen].kappa > LEAST_KAPPAS[label][1], (label, result.agreements)
        old_predictions = [BEFORE[label][1](seen(label, message.exchange)) for message in messages]
        labels = [message.labels[label] for message in messages]
        _, (low, _) = difference(labels, result.found[result.chosen], old_predictions, lessons)
        assert low > 0, label
