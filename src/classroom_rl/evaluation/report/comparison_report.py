"""Writes `report.html` of a comparison: one self-contained page with tables, and the same lessons with every tutor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.evaluation.report.build import SAMPLING_NAMES, page_template
from classroom_rl.evaluation.report.comparison_table import (
    difference_rows,
    fidelity_lines,
    figure_rows,
    judge_lines,
    judge_rows,
    samplings_of,
    supervised_lines,
)
from classroom_rl.evaluation.report.examples import Pair, ShownConversation, show

Records = Mapping[str, Sequence[tuple[str, ConversationRecord]]]
"""Tutor → (sampling, record) of each conversation, in the same order for all tutors."""
SHOWN_FURTHEST = 3


@dataclass(frozen=True)
class ShownLesson:
    """A lesson, with each tutor's first conversation on it."""

    title: str
    plan: str
    sides: dict[str, Optional[ShownConversation]]


def write_comparison_report(folder: Path, metrics: Mapping[str, Any], records: Records) -> Path:
    """Write `report.html` into the folder and return its path."""
    parts = []
    for sampling in samplings_of(metrics):
        by_tutor = {name: [r for each, r in pairs if each == sampling] for name, pairs in records.items()}
        parts.append(
            {
                "title": SAMPLING_NAMES[sampling],
                "notes": fidelity_lines(metrics, sampling) + judge_lines(metrics, sampling),
                "figures": figure_rows(metrics, sampling) + judge_rows(metrics, sampling),
                "differences": difference_rows(metrics, sampling),
                "others": [name for name in metrics["tutors"] if name != metrics["base"]],
                "lessons": [_show(group) for group in choose_lessons(by_tutor)],
            }
        )
    page = page_template("comparison.html.j2").render(
        name=folder.resolve().name,
        metrics=metrics,
        tutors=metrics["tutors"],
        parts=parts,
        notes=supervised_lines(metrics),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def choose_lessons(by_tutor: Mapping[str, Sequence[ConversationRecord]]) -> list[dict[str, ConversationRecord]]:
    """Choose the lessons to show, each with every tutor's first conversation: the `SHOWN_FURTHEST` lessons with the
    largest spread of rewards between tutors, the median, and the smallest. Ties are broken by lesson id."""
    firsts: dict[str, dict[str, ConversationRecord]] = {}
    for name, records in by_tutor.items():
        for record in records:
            firsts.setdefault(record.problem_id, {}).setdefault(name, record)
    ranked = sorted(firsts, key=lambda lesson: (-_spread(firsts[lesson]), lesson))
    places = [*range(SHOWN_FURTHEST), len(ranked) // 2, len(ranked) - 1]
    chosen = dict.fromkeys(ranked[place] for place in places if place < len(ranked))
    return [firsts[lesson] for lesson in chosen]


def _spread(group: Mapping[str, ConversationRecord]) -> float:
    rewards = [record.reward for record in group.values() if record.reward is not None]
    return round(max(rewards) - min(rewards), 6) if rewards else 0.0


def _show(group: Mapping[str, ConversationRecord]) -> ShownLesson:
    lesson = Pair("", None, next(iter(group.values())))
    return ShownLesson(lesson.title, lesson.plan, {name: show(record) for name, record in group.items()})
