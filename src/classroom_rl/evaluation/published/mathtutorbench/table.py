"""The figures of a tutor on MathTutorBench as tables: each task with what was counted, and a line beside the published
leaderboard."""

from collections.abc import Mapping
from typing import Any

from classroom_rl.config.benchmark import TUTOR_TASKS
from classroom_rl.evaluation.report.tables import NO_VALUE, align, causes_text, estimate_text

_HEADINGS = (
    "solving",
    "socratic",
    "correct?",
    "location",
    "correction",
    "scaffold",
    "pedagogy",
    "sc.hard",
    "ped.hard",
)
"""Of the tasks, in the order of `TUTOR_TASKS`."""

LEADERBOARD = {
    "LLaMA3.2-3B-Instruct": (0.60, 0.29, 0.67, 0.41, 0.13, 0.64, 0.63, 0.45, 0.40),
    "LLaMA3.1-8B-Instruct": (0.70, 0.29, 0.63, 0.29, 0.09, 0.61, 0.67, 0.46, 0.49),
    "LLaMA3.1-70B-Instruct": (0.91, 0.29, 0.71, 0.56, 0.19, 0.63, 0.70, 0.49, 0.49),
    "GPT-4o": (0.90, 0.48, 0.67, 0.37, 0.84, 0.50, 0.82, 0.46, 0.70),
    "LearnLM-1.5-Pro": (0.94, 0.32, 0.75, 0.57, 0.74, 0.64, 0.68, 0.66, 0.67),
    "Llemma-7B-ScienceTutor": (0.62, 0.29, 0.66, 0.29, 0.16, 0.37, 0.48, 0.38, 0.42),
    "Qwen2.5-7B-SocraticLM": (0.73, 0.32, 0.05, 0.39, 0.23, 0.39, 0.39, 0.28, 0.28),
    "Qwen2.5-Math-7B-Instruct": (0.88, 0.35, 0.43, 0.47, 0.49, 0.06, 0.07, 0.05, 0.05),
}
"""Model → its published figures, in the order of `TUTOR_TASKS`."""

SOURCE = "README.md of github.com/eth-lre/mathtutorbench, commit 072e7d8"


def tasks_table(metrics: Mapping[str, Any]) -> str:
    """A line for each task; then the leaderboard, with the tutor's line at its end."""
    rows = [["task", "figure", "value", "answered", "no reply", "cut off", "unreadable"]]
    for task, entry in metrics["tasks"].items():
        counts = [f"{entry['answered']} of {entry['asked']}", causes_text(entry["failures"]), str(entry["cut"])]
        value = estimate_text(entry, "value")
        rows.append([task, entry["figure"], value, *counts, str(entry["unreadable"])])
    reasons = dict.fromkeys(entry["why"] for entry in metrics["tasks"].values() if entry["why"])
    values = {task: entry["value"] for task, entry in metrics["tasks"].items()}
    leaderboard = [["model", *_HEADINGS], *([model, *map(_cell, figures)] for model, figures in LEADERBOARD.items())]
    leaderboard.append([metrics["tutor"], *(_cell(values.get(task)) for task in TUTOR_TASKS)])
    opening = f"\n{metrics['tutor']}; 95 % intervals over problems, where a figure is a mean over them"
    notes = [f"No win rate: {reason}" for reason in reasons]
    if metrics["drawn"]:
        notes.append("Only some of the problems were drawn: the last line is not comparable with the others.")
    return "\n\n".join([opening, align(rows), *notes, f"Beside the leaderboard ({SOURCE}):", align(leaderboard)])


def _cell(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.2f}"
