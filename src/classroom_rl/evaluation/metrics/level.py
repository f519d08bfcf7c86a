"""How well a tutor's messages stay at the CEFR level of the lesson, and how that changes over a conversation
(judges/difficulty.py). Each figure has its interval over lessons.

A slope is the change from one message of the tutor to its next one: that of the least-squares line through the values
of a conversation with at least `LEAST_MESSAGES` of them.
"""

from collections.abc import Sequence
from statistics import linear_regression

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.environments.classroom.prompt_check import check_levels
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.judges.difficulty import LevelRules, difficulty, lesson_level, level_scores
from classroom_rl.results.evaluation_files import group_by_problem
from classroom_rl.results.statistics import ByLesson
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.tokens import Turn

LEVEL, SLOPE, AT_MESSAGE = "level", "slope/", "score_of_message/"
LEAST_MESSAGES = 3
_SCORES = {"score": "the score", "score_of_new": "the score without repeated messages"}
_VALUES = {
    "words_above": ("words above the level", True, -1),
    "sentence_words": ("words in a sentence", False, 0),
    "zipf": ("Zipf frequency", False, 0),
    "subordinators": ("subordinators in a sentence", False, 0),
    "reading_ease": ("reading ease", False, 0),
}
LEVEL_LABELS: dict[str, tuple[str, bool, int]] = {
    "measured": ("Level: messages that could be measured", True, 0),
    "score": ("Level: score of a message", False, 1),
    "score_of_new": ("Level: score of a message that is no repetition", False, 1),
    **{f"{SLOPE}{name}": (f"Level: change of {label} per message", False, 1) for name, label in _SCORES.items()},
    **{name: (f"Level: {label}", is_share, direction) for name, (label, is_share, direction) in _VALUES.items()},
    **{
        f"{SLOPE}{name}": (f"Level: change of {label} per message", is_share, direction)
        for name, (label, is_share, direction) in _VALUES.items()
    },
}
"""Figure → its label in tables, whether it is a share, and whether higher is better (+1), worse (−1) or neither (0)."""


def measured_level(config: EvalConfig, problems: Sequence[Problem]) -> LevelRules | None:
    """How an evaluation measures levels; None if it does not. Raises `ConfigError` if it cannot on these problems."""
    return check_levels(config.generation.level, problems) if config.measure_level else None


def level_by_lesson(records: Sequence[ConversationRecord], rules: LevelRules) -> ByLesson:
    """Figure → lesson → the values of a tutor's messages (of slopes, of its conversations)."""
    by_figure: ByLesson = {}
    for lesson, group in group_by_problem(records).items():
        for record in group:
            for name, values in level_figures(record.problem, record.turns, rules).items():
                by_figure.setdefault(name, {}).setdefault(lesson, []).extend(values)
    return by_figure


def level_figures(problem: str, turns: Sequence[Turn], rules: LevelRules) -> dict[str, list[float]]:
    """The figures of one conversation: those of `LEVEL_LABELS` that it has, and the score of each of the messages that
    the tutor wrote, under `AT_MESSAGE` and its number."""
    lesson, scores = lesson_level(problem, rules), level_scores(problem, turns, rules)
    texts = [turn.text for turn in turns if turn.role == "teacher" and not turn.given]
    difficulties = [None if lesson is None else difficulty(text, lesson) for text in texts]
    series: dict[str, list] = {"score": scores, "score_of_new": level_scores(problem, turns, rules, of_repeats=None)}
    series |= {name: [measures and getattr(measures, name) for measures in difficulties] for name in _VALUES}
    points_by_name = {
        name: [(number, value) for number, value in enumerate(values, start=1) if value is not None]
        for name, values in series.items()
    }
    figures = {name: [value for _, value in points] for name, points in points_by_name.items()}
    for name, points in points_by_name.items():
        if len(points) >= LEAST_MESSAGES:
            figures[f"{SLOPE}{name}"] = [linear_regression(*zip(*points, strict=True)).slope]
    at_message = {f"{AT_MESSAGE}{number}": [score] for number, score in points_by_name["score"]}
    return {"measured": [float(score is not None) for score in scores]} | figures | at_message
