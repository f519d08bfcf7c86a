"""What trained readers find in a tutor's messages, and how far each can be trusted (docs/classroom.md).

A figure is the share of the tutor's replies to a student's message for which a label holds; for `correction` of the
replies to an error, and for `treats_as_wrong` of the replies to a message without one. Intervals are bootstrapped over
lessons.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.evaluation.metrics.language import ErrorLabels, errors_in
from classroom_rl.judges.feedback import nearest_phrase
from classroom_rl.judges.messages import ParsedPlan, read_plan, spoken
from classroom_rl.judges.readings import (
    CORRECTION,
    LANGUAGE_LABELS,
    MATHS_LABELS,
    TREATS_AS_WRONG,
    Exchange,
    MessageReaders,
)
from classroom_rl.results.evaluation_files import group_by_problem
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.rollout.thoughts import visible_text

ByLesson = dict[str, dict[str, list[float]]]
"""Label → lesson → for each reply whether the label holds, 1 or 0."""


def read_by_lesson(
    records: Sequence[ConversationRecord], readers: MessageReaders, labels: ErrorLabels | None = None
) -> ByLesson:
    """What the readers find in a tutor's replies; `labels` as in `conversation_figures`."""
    found: ByLesson = {}
    for lesson, group in group_by_problem(records).items():
        for record in group:
            for label, value in _read(record, readers, labels):
                found.setdefault(label, {}).setdefault(lesson, []).append(float(value))
    return found


def reading_metrics(
    records: Sequence[ConversationRecord], readers: MessageReaders, labels: ErrorLabels | None = None
) -> dict[str, Any]:
    """The entry `readings` of a sampling in metrics.json: which readers these are (`version`), and for each label its
    estimate with the reader's `trust`."""
    found = read_by_lesson(records, readers, labels)
    entry = about_readers(readers, found)
    for label, values in found.items():
        entry["labels"][label] |= mean_with_ci(values)
    return entry


def about_readers(readers: MessageReaders, labels: Iterable[str]) -> dict[str, Any]:
    """The entry `readings` without estimates: which readers these are, and how far to trust them for some labels."""
    trust = {label: {"trust": readers.trust[label].as_json()} for label in labels}
    return {"version": readers.version, "labels": trust}


def _read(record: ConversationRecord, readers: MessageReaders, labels: ErrorLabels | None) -> list[tuple[str, bool]]:
    """(label, whether it holds) for each reply of the tutor's own to a student's message."""
    plan = read_plan(record.problem)
    texts = [visible_text(turn.text) for turn in record.turns]
    errors = errors_in(record, plan, labels)
    of_maths = bool(record.answer.strip())
    found = []
    for place, turn in enumerate(record.turns):
        if turn.role != "teacher" or turn.given or place == 0 or record.turns[place - 1].role != "student":
            continue
        student, before = texts[place - 1], texts[: place - 1]
        target = record.answer if of_maths else _target(student, plan)
        context = (record.problem, *before) if of_maths else tuple(before)
        exchange = Exchange(spoken(turn.text), student, target, context)
        for label in MATHS_LABELS if of_maths else LANGUAGE_LABELS:
            if label in readers.trust and _applies(label, errors.get(place - 1)):
                found.append((label, readers.reads(label, exchange)))
    return found


def _target(student: str, plan: ParsedPlan) -> str:
    """The phrase that the student tried to say; "" if it tried none."""
    return nearest_phrase(student, plan) or ""


def _applies(label: str, error: bool | None) -> bool:
    """Whether a label is measured on a reply to a message with an error (None: nobody knows)."""
    wanted = {CORRECTION: True, TREATS_AS_WRONG: False}
    return label not in wanted or error is wanted[label]
