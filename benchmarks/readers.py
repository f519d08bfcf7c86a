"""How far readers of a tutor's message agree with people, on public data of real tutors:

    python -m benchmarks.readers ../shared/data [--folds 10]

The folder holds .jsonl files that judges/moves/labelled.py can read. For each label the table compares the rule that
the judge and the figures used before, the rules in judges/moves/rules.py, and a classifier in a cross-validation with
all messages of a lesson in one fold. Cohen's kappa with a 95 % interval over lessons.

Rules and features were written while looking at about half of the lessons; the last column is kappa on the others.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.judges.feedback import falsely_corrects, feedback_kind
from classroom_rl.judges.messages import ParsedPlan, Phrase, own_words, read_message
from classroom_rl.judges.moves.classifier import require_sklearn, seen
from classroom_rl.judges.moves.cross_validation import (
    BY_CLASSIFIER,
    BY_RULES,
    OUTER_FOLDS,
    Measured,
    agreement,
    difference,
    measure,
)
from classroom_rl.judges.moves.labelled import LabelledMessage, read_labelled
from classroom_rl.judges.moves.rules import answers, asks, values
from classroom_rl.judges.readings import (
    ACTIONABLE,
    CONFIRMATION,
    CORRECTION,
    HINT,
    MISTAKE_IDENTIFIED,
    QUESTION,
    REVEALS_ANSWER,
    TELLING,
    TREATS_AS_WRONG,
    Exchange,
    interval_text,
)
from classroom_rl.judges.rule_judge import PRAISE


def _is_metalinguistic(about: Exchange) -> bool:
    plan = ParsedPlan((Phrase(about.target, ""),))
    return feedback_kind(about.student, about.message, plan) == "metalinguistic"


def _holds_answer(about: Exchange) -> bool:
    return bool(about.target) and bool(answers(about) & values([about.message]))


BEFORE: dict[str, tuple[str, Callable[[Exchange], bool]]] = {
    QUESTION: ("a sentence ends with a question mark", asks),
    HINT: ("`feedback_kind` is metalinguistic", _is_metalinguistic),
    CORRECTION: ("`falsely_corrects`", lambda about: falsely_corrects(about.message)),
    TREATS_AS_WRONG: ("`falsely_corrects`", lambda about: falsely_corrects(about.message)),
    CONFIRMATION: ("the judge's pattern of praise", lambda about: bool(PRAISE.search(own_words(about.message)))),
    REVEALS_ANSWER: ("the answer stands in the message", _holds_answer),
    TELLING: ("the answer stands in the message", _holds_answer),
    ACTIONABLE: ("ends with a task", lambda about: bool(read_message(about.message).ends_with_task)),
    MISTAKE_IDENTIFIED: ("`falsely_corrects`", lambda about: falsely_corrects(about.message)),
}
"""What the project read each label by before, or came closest to it."""

HEADER = (
    "label",
    "set",
    "messages (lessons)",
    "base",
    "rule before",
    "rules",
    "classifier",
    "reads",
    "κ of what reads",
)
HEADER += ("minus the rule before", "on lessons not looked at")


def table(messages: Sequence[LabelledMessage], folds: int = OUTER_FOLDS) -> list[list[str]]:
    """The rows of the table, without its header."""
    rows = []
    for label, measured in measure(messages, folds).items():
        source_messages = [message for message in messages if message.source == measured.source]
        every_message = np.ones(len(source_messages), bool)
        rows.append(_row(label, measured, source_messages, every_message))
        has_answer = np.array([bool(message.exchange.target) for message in source_messages])
        if label == REVEALS_ANSWER and has_answer.any() and not has_answer.all():
            rows.append(_row(f"{label}, answer known", measured, source_messages, has_answer))
    return rows


def _row(name: str, measured: Measured, there: Sequence[LabelledMessage], part: np.ndarray) -> list[str]:
    """A row of the table, for the messages where `part` is true."""
    labels = np.array([message.labels[measured.label] for message in there])[part]
    lessons = [message.lesson for message, inside in zip(there, part, strict=True) if inside]
    rule = BEFORE[measured.label][1]
    before = np.array([rule(seen(measured.label, message.exchange)) for message in there])[part]
    predictions = {kind: predicted[part] for kind, predicted in measured.found.items()}
    best = predictions[measured.chosen]
    gain, interval = difference(labels, best, before, lessons)
    unseen = np.array([not was_looked_at(lesson) for lesson in lessons])
    elsewhere = _kappa(
        labels[unseen], best[unseen], [lesson for lesson, new in zip(lessons, unseen, strict=True) if new]
    )
    return [
        name,
        measured.source,
        f"{len(labels)} ({len(set(lessons))})",
        f"{labels.mean():.2f}",
        _kappa(labels, before, lessons),
        _kappa(labels, predictions[BY_RULES], lessons),
        _kappa(labels, predictions[BY_CLASSIFIER], lessons),
        measured.chosen.replace("_", " "),
        _kappa(labels, best, lessons),
        f"{gain:+.2f}" + ("" if interval is None else f" [{interval[0]:+.2f}, {interval[1]:+.2f}]"),
        elsewhere,
    ]


def _kappa(given: np.ndarray, found: np.ndarray, lessons: Sequence[str]) -> str:
    if not len(given):
        return "–"
    measured = agreement(given, found, lessons)
    return f"{measured.kappa:.2f}" + (f" {interval_text(measured.ci95)}" if measured.ci95 else "")


def was_looked_at(lesson: str) -> bool:
    """Whether a lesson is in the half whose messages were read while rules and features were written."""
    return hashlib.sha256(lesson.encode()).digest()[0] < 128


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readers", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="a folder with .jsonl files of labelled messages")
    parser.add_argument("--folds", type=int, default=OUTER_FOLDS)
    options = parser.parse_args(arguments)
    try:
        require_sklearn()
        files = sorted(options.folder.glob("*.jsonl"))
        if not files:
            raise DataError(f"{options.folder} holds no .jsonl file.")
        messages = [message for file in files for message in read_labelled(str(file))]
        rows = table(messages, options.folds)
    except ClassroomError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"Cohen's κ [95 % interval over lessons]; {options.folds} folds, all messages of a lesson in one.\n")
    print(markdown(HEADER, rows))
    print("\nThe rule before:\n")
    print("\n".join(f"- {label}: {text}" for label, (text, _) in BEFORE.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
