"""Readers on public data of real tutors, which is not part of the project: skipped where it is missing.

The folder is TUTOR_DATA, else ../shared/data from the project's root. docs/classroom.md says how to get the data.
"""

import os
from pathlib import Path

import pytest

from benchmarks.readers import BEFORE
from classroom_rl.config.load import ROOT
from classroom_rl.judges.moves.classifier import seen
from classroom_rl.judges.moves.cross_validation import agreement, difference, measure
from classroom_rl.judges.moves.labelled import LABELS_OF, LabelledMessage, read_labelled
from classroom_rl.judges.moves.rules import RULES

DATA = Path(os.environ.get("TUTOR_DATA", ROOT.parent / "shared" / "data"))
FILES = {source: DATA / f"{source.lower()}.jsonl" for source in LABELS_OF}
pytestmark = pytest.mark.skipif(
    not all(file.is_file() for file in FILES.values()), reason=f"there is no data of real tutors in {DATA}"
)

LEAST_OF_RULES = {
    "question": 0.7,
    "hint": 0.35,
    "correction": 0.55,
    "treats_as_wrong": 0.45,
    "confirmation": 0.35,
    "reveals_answer": 0.3,
    "telling": 0.4,
    "actionable": 0.25,
    "mistake_identified": 0.4,
}
"""A bit below kappa of the rules on half of each set."""

LEAST = {
    "question": 0.75,
    "hint": 0.6,
    "correction": 0.6,
    "treats_as_wrong": 0.55,
    "confirmation": 0.5,
    "reveals_answer": 0.65,
    "telling": 0.5,
    "actionable": 0.45,
    "mistake_identified": 0.5,
}
"""A bit below kappa of what reads, in the cross-validation."""


def messages_of(source: str) -> list[LabelledMessage]:
    return read_labelled(str(FILES[source]))


@pytest.mark.parametrize("source", LABELS_OF)
def test_the_rules_agree_with_people(source: str):
    messages = messages_of(source)
    lessons = [each.lesson for each in messages]
    for label in LABELS_OF[source]:
        given = [each.labels[label] for each in messages]
        found = agreement(given, [RULES[label](seen(label, each.exchange)) for each in messages], lessons)
        assert found.kappa > LEAST_OF_RULES[label], (label, found)


@pytest.mark.full
@pytest.mark.parametrize("source", LABELS_OF)
def test_what_reads_agrees_better_than_the_rule_before(source: str):
    messages = messages_of(source)
    lessons = [each.lesson for each in messages]
    for label, measured in measure(messages).items():
        assert measured.agreements[measured.chosen].kappa > LEAST[label], (label, measured.agreements)
        before = [BEFORE[label][1](seen(label, each.exchange)) for each in messages]
        given = [each.labels[label] for each in messages]
        _, (low, _) = difference(given, measured.found[measured.chosen], before, lessons)
        assert low > 0, label
