"""The figures of a comparison of tutors: their labels, and their values for each lesson; and the figures of post-tests:
what the student knows after the lesson, without the transcript."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from classroom_rl.environments.classroom.metrics import post_test_shares
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.evaluation.metrics.language import ErrorLabels, tutor_figures
from classroom_rl.evaluation.metrics.level import LEVEL, LEVEL_LABELS, level_by_lesson
from classroom_rl.evaluation.metrics.maths import PEDAGOGICAL_REWARD, SCORED, SOLVED
from classroom_rl.evaluation.metrics.readings import read_by_lesson
from classroom_rl.evaluation.report.tables import (
    MEASURES,
    POST_TEST,
    POST_TEST_LABELS,
    Measure,
    named_measures,
    reading_name,
)
from classroom_rl.judges.difficulty import LevelRules
from classroom_rl.judges.feedback import KINDS
from classroom_rl.judges.readings import LANGUAGE_LABELS, MessageReaders
from classroom_rl.judges.verdicts import CRITERIA
from classroom_rl.results.evaluation_files import group_by_problem
from classroom_rl.results.statistics import (
    ByLesson,
    judgement_of,
    outcomes_by_lesson,
    read_exchanges,
    rewards_by_lesson,
)
from classroom_rl.rollout.intervals import Estimate, mean_with_ci


def _measure(label: str, is_share: bool = False, direction: int = 0) -> Measure:
    """How a figure's estimate, {"mean", "ci95", "n"}, is printed."""
    return Measure(label, ("mean",), ("ci95",), (), is_share, direction)


READ = "read/"
"""The prefix of a figure's key before the label of a move classifier."""
_JUDGED = {
    "reward": _measure("Reward", direction=1),
    **{
        f"scores/{name}": _measure(f"{criterion.label} (0–{criterion.top:g})", direction=1)
        for name, criterion in CRITERIA.items()
    },
    "scaffolded": _measure("Error turns scaffolded (rubric)", True, 1),
    "falsely_corrected": _measure("Clean turns falsely corrected (rubric)", True, -1),
}
_TESTED = {
    f"{POST_TEST}/{name}": _measure(label, True, direction) for name, (label, direction) in POST_TEST_LABELS.items()
}
_COUNTED = {
    "talk_ratio": _measure("Teacher's share of all words", True),
    "teacher_words": _measure("Teacher's words in a message"),
    "ends_with_task": _measure("Task-setting messages that end with the task", True, 1),
    "tasks_per_message": _measure("Tasks in a message"),
    "plan_introduced": _measure("Of the plan, introduced", True, 1),
    "plan_produced": _measure("Of the plan, produced by the student", True, 1),
    "hands_over": _measure("Messages that hand over what is to be said", True, -1),
    "repeats": _measure("Messages that set a task again", True, -1),
    "in_english": _measure("Messages in English", True),
    **{f"feedback/{kind}": _measure(f"Reply to an error: {kind}", True) for kind in KINDS},
    "uptake": _measure("Errors taken up in the next turn", True, 1),
    "repair": _measure("Errors repaired in the next turn", True, 1),
    "false_corrections": _measure("Clean turns falsely corrected (rules)", True, -1),
}
_READINGS = {f"{READ}{label}": _measure(reading_name(label), True) for label in LANGUAGE_LABELS}
_LEVEL = {f"{LEVEL}/{name}": _measure(*label) for name, label in LEVEL_LABELS.items()}
_MATHS = {
    "/".join(measure.path[:-1]): _measure(measure.label, measure.is_share, measure.direction)
    for measure in MEASURES
    if measure.path[0] in (SOLVED, SCORED, PEDAGOGICAL_REWARD)
}
FIGURES: dict[str, Measure] = {**_JUDGED, **_MATHS, **_TESTED, **_COUNTED, **_LEVEL, **_READINGS}
"""The rows of every comparison: key → how the figure is printed."""


def figures_of(tutors: Iterable[Mapping[str, Any]]) -> dict[str, Measure]:
    """The rows of a comparison of tutors, given each one's figures: `FIGURES` that at least one of them has, and after
    the first row the rewards, judge rules and rubric of the configuration (`rewards/…`, `rejected_by/…`,
    `scores/…`)."""
    keys = dict.fromkeys(key for figures in tutors for key in figures)
    rows = {"reward": FIGURES["reward"]}
    for key in keys:
        group, _, name = key.partition("/")
        for measure in named_measures({group: [name]}):
            rows[key] = _measure(measure.label, measure.is_share, measure.direction)
    rows |= {key: measure for key, measure in FIGURES.items() if key in keys}
    return rows


def figures_by_lesson(
    records: Sequence[ConversationRecord],
    labels: ErrorLabels | None = None,
    readers: MessageReaders | None = None,
    level: LevelRules | None = None,
) -> tuple[ByLesson, dict]:
    """A language tutor's values of all figures that it has, and the fidelity of its simulated student. `labels` as in
    `conversation_figures`; trained move classifiers (`readers`) add the figures `read/…`, `level` adds `level/…`."""
    language, fidelity = tutor_figures(records, labels)
    figures: ByLesson = judged_by_lesson(records) | language
    if readers is not None:
        figures |= {f"{READ}{label}": values for label, values in read_by_lesson(records, readers, labels).items()}
    if level is not None:
        figures |= {f"{LEVEL}/{name}": values for name, values in level_by_lesson(records, level).items()}
    return figures, fidelity


def judged_by_lesson(records: Sequence[ConversationRecord]) -> ByLesson:
    """The reward and what stands behind it: `outcomes_by_lesson`, the judge's scores by criterion, the toy judge's
    findings on the teacher's replies if it can parse the lesson, and the post-test."""
    figures: ByLesson = {"reward": rewards_by_lesson(records), **outcomes_by_lesson(records)}
    figures |= {f"{POST_TEST}/{name}": values for name, values in post_test_by_problem(records).items()}
    for lesson, group in group_by_problem(records).items():
        for record in group:
            for key, value in _judged(record):
                figures.setdefault(key, {}).setdefault(lesson, []).append(float(value))
    return figures


def _judged(record: ConversationRecord) -> list[tuple[str, float]]:
    judgement = judgement_of(record)
    scores = judgement.scores.values if judgement is not None and judgement.scores is not None else {}
    values = [(f"scores/{name}", value) for name, value in scores.items()]
    for exchange in read_exchanges(record) or []:
        key, value = (
            ("scaffolded", exchange.scaffolded) if exchange.errors else ("falsely_corrected", exchange.corrected)
        )
        values.append((key, value))
    return values


def post_test_by_problem(records: Sequence[ConversationRecord]) -> ByLesson:
    """Figure → problem → one value for each conversation that has it; figures as in
    `classroom_rl.environments.classroom.metrics.post_test_metrics`."""
    values_of_figures: ByLesson = {}
    for problem, group in group_by_problem(records).items():
        for test in (record.post_test for record in group if record.post_test is not None):
            for name, value in post_test_shares(test).items():
                values_of_figures.setdefault(name, {}).setdefault(problem, []).append(value)
    return values_of_figures


def post_test_figures(records: Sequence[ConversationRecord]) -> dict[str, Estimate]:
    """The part of metrics.json about post-tests: each figure's mean over conversations; {} without post-tests."""
    return {name: mean_with_ci(values) for name, values in post_test_by_problem(records).items()}
