"""Labels of a tutor's messages by trained move classifiers, and how far to trust each classifier (docs/classroom.md).

A figure is the share of the tutor's replies to the student for which a label holds. `correction` counts only replies to
an error, and `treats_as_wrong` only replies to a message without one. Intervals are bootstrapped over lessons.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.evaluation.metrics.language import ErrorLabels, errors_in
from classroom_rl.judges.feedback import nearest_phrase
from classroom_rl.judges.messages import read_plan, spoken
from classroom_rl.judges.readings import (
    CORRECTION,
    LANGUAGE_LABELS,
    MATHS_LABELS,
    TREATS_AS_WRONG,
    Exchange,
    MessageReaders,
)
from classroom_rl.results.evaluation_files import group_by_problem
from classroom_rl.results.statistics import ByLesson
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.rollout.thoughts import visible_text

_ONLY_AFTER = {CORRECTION: True, TREATS_AS_WRONG: False}
"""Label → whether the student's message must hold an error for the label to be measured on the reply."""


def read_by_lesson(
    records: Sequence[ConversationRecord], readers: MessageReaders, labels: ErrorLabels | None = None
) -> ByLesson:
    """Label a tutor's replies with move classifiers: for each label 1 or 0 for each reply. `labels` as in
    `conversation_figures`."""
    by_label: ByLesson = {}
    for lesson, group in group_by_problem(records).items():
        for record in group:
            for label, value in _readings_of_record(record, readers, labels):
                by_label.setdefault(label, {}).setdefault(lesson, []).append(float(value))
    return by_label


def reading_metrics(
    records: Sequence[ConversationRecord], readers: MessageReaders, labels: ErrorLabels | None = None
) -> dict[str, Any]:
    """The entry `readings` of a sampling in metrics.json: the move classifiers' `version`, and for each label its
    estimate and the classifier's agreement with people (`trust`)."""
    by_label = read_by_lesson(records, readers, labels)
    entry = about_readers(readers, by_label)
    for label, values in by_label.items():
        entry["labels"][label] |= mean_with_ci(values)
    return entry


def about_readers(readers: MessageReaders, labels: Iterable[str]) -> dict[str, Any]:
    """The entry `readings` without estimates: the move classifiers' version, and their agreement with people on the
    given labels."""
    trust = {label: {"trust": readers.trust[label].as_json()} for label in labels}
    return {"version": readers.version, "labels": trust}


def _readings_of_record(
    record: ConversationRecord, readers: MessageReaders, labels: ErrorLabels | None
) -> list[tuple[str, bool]]:
    """(label, whether it holds) for each reply to the student that the tutor wrote itself."""
    plan = read_plan(record.problem)
    texts = [visible_text(turn.text) for turn in record.turns]
    errors = errors_in(record, plan, labels)
    of_maths = bool(record.answer.strip())
    values = []
    for position, turn in enumerate(record.turns):
        if turn.role != "teacher" or turn.given or position == 0 or record.turns[position - 1].role != "student":
            continue
        student, earlier = texts[position - 1], texts[: position - 1]
        target = record.answer if of_maths else nearest_phrase(student, plan) or ""  # what the student tried to say
        context = (record.problem, *earlier) if of_maths else tuple(earlier)
        exchange = Exchange(spoken(turn.text), student, target, context)
        error = errors.get(position - 1)  # None: unknown
        for label in MATHS_LABELS if of_maths else LANGUAGE_LABELS:
            if label in readers.trust and _ONLY_AFTER.get(label, error) is error:
                values.append((label, readers.reads(label, exchange)))
    return values
