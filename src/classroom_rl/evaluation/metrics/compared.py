"""The figures of a comparison of tutors: their labels, and their values for each lesson."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.evaluation.metrics.language import ErrorLabels, tutor_figures
from classroom_rl.evaluation.metrics.post_test import POST_TEST, POST_TEST_LABELS, post_test_by_problem
from classroom_rl.evaluation.metrics.readings import read_by_lesson
from classroom_rl.evaluation.report.tables import Measure, reading_name
from classroom_rl.judges.feedback import KINDS
from classroom_rl.judges.readings import LANGUAGE_LABELS, MessageReaders
from classroom_rl.judges.verdicts import CRITERIA
from classroom_rl.results.evaluation_files import group_by_problem
from classroom_rl.results.statistics import judgement_of, read_exchanges, rewards_by_lesson

ByLesson = dict[str, dict[str, list[float]]]
"""Figure → lesson → values."""


@dataclass(frozen=True)
class Figure:
    """A row of a comparison. `direction` is +1 if higher is better, −1 if lower is better, 0 if neither."""

    key: str
    label: str
    is_share: bool = False
    direction: int = 0

    @property
    def measure(self) -> Measure:
        """How the figure's estimate, {"mean", "ci95", "n"}, is printed."""
        return Measure(self.label, ("mean",), ("ci95",), (), self.is_share, self.direction)


JUDGED = (
    Figure("reward", "Reward", direction=1),
    *(
        Figure(f"scores/{name}", f"{criterion.label} (0–{criterion.top:g})", direction=1)
        for name, criterion in CRITERIA.items()
    ),
    Figure("scaffolded", "Error turns scaffolded (rubric)", True, 1),
    Figure("falsely_corrected", "Clean turns falsely corrected (rubric)", True, -1),
)
COUNTED = (
    Figure("talk_ratio", "Teacher's share of all words", True),
    Figure("teacher_words", "Teacher's words in a message"),
    Figure("ends_with_task", "Task-setting messages that end with the task", True, 1),
    Figure("tasks_per_message", "Tasks in a message"),
    Figure("plan_introduced", "Of the plan, introduced", True, 1),
    Figure("plan_produced", "Of the plan, produced by the student", True, 1),
    Figure("hands_over", "Messages that hand over what is to be said", True, -1),
    Figure("repeats", "Messages that set a task again", True, -1),
    Figure("in_english", "Messages in English", True),
    *(Figure(f"feedback/{kind}", f"Reply to an error: {kind}", True) for kind in KINDS),
    Figure("uptake", "Errors taken up in the next turn", True, 1),
    Figure("repair", "Errors repaired in the next turn", True, 1),
    Figure("false_corrections", "Clean turns falsely corrected (rules)", True, -1),
)
READ = "read/"
"""The prefix of a figure's key before the label of a move classifier."""

TESTED = tuple(
    Figure(f"{POST_TEST}/{name}", label, True, direction) for name, (label, direction) in POST_TEST_LABELS.items()
)
READINGS = tuple(Figure(f"{READ}{label}", reading_name(label), True) for label in LANGUAGE_LABELS)
FIGURES = JUDGED + TESTED + COUNTED + READINGS


def figures_by_lesson(
    records: Sequence[ConversationRecord],
    labels: ErrorLabels | None = None,
    readers: MessageReaders | None = None,
) -> tuple[ByLesson, dict]:
    """A tutor's values of all figures that it has, and the fidelity of its simulated student.

    Args:
        labels: as in `conversation_figures`.
        readers: trained move classifiers, which add the figures `read/…`.
    """
    language = tutor_figures(records, labels)
    post_tests = {f"{POST_TEST}/{name}": values for name, values in post_test_by_problem(records).items()}
    judged = {"reward": rewards_by_lesson(records)} | judged_by_lesson(records)
    figures: ByLesson = judged | post_tests | language.by_lesson
    if readers is not None:
        figures |= {f"{READ}{label}": values for label, values in read_by_lesson(records, readers, labels).items()}
    return figures, language.fidelity


def judged_by_lesson(records: Sequence[ConversationRecord]) -> ByLesson:
    """The judge's scores by criterion, and the toy judge's findings on the teacher's replies if it can parse the
    lesson."""
    figures: ByLesson = {}
    for lesson, group in group_by_problem(records).items():
        for record in group:
            for key, value in _judged(record):
                figures.setdefault(key, {}).setdefault(lesson, []).append(float(value))
    return figures


def _judged(record: ConversationRecord) -> list[tuple[str, float]]:
    judgement = judgement_of(record)
    scores = asdict(judgement.scores) if judgement is not None and judgement.scores is not None else {}
    values = [(f"scores/{name}", value) for name, value in scores.items()]
    for exchange in read_exchanges(record) or []:
        key, value = (
            ("scaffolded", exchange.scaffolded) if exchange.errors else ("falsely_corrected", exchange.corrected)
        )
        values.append((key, value))
    return values
