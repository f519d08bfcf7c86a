"""The chart of a tutor's level over a conversation, before and after training."""

from collections.abc import Mapping
from typing import Any

from classroom_rl.evaluation.metrics.level import AT_MESSAGE, LEVEL
from classroom_rl.results.charts import Drawing, Mark, Series, line_chart
from classroom_rl.results.run_folder import Measurement, RunData, is_number

LEAST_VALUES = 6
"""A message's number that fewer conversations reach is left out."""

_COLOURS = {"before": "a", "after": "b"}


def level_chart(data: RunData) -> Drawing | None:
    """The mean score of the tutor's first message, of its second, and so on, with 95 % intervals; None for a run whose
    evaluations did not measure levels."""
    marks = [
        Mark(f"message {number}, {when} training", when, _COLOURS[when], number, estimate["mean"], estimate["ci95"])
        for when, measurement in data.measurements.items()
        for number, estimate in _by_number(measurement).items()
    ]
    if not marks:
        return None
    lines = {when: [(mark.x, mark.y) for mark in marks if mark.legend == when] for when in data.measurements}
    return line_chart(
        "Level of a conversation's messages",
        [Series(when, _COLOURS[when], points, faint=True) for when, points in lines.items() if points],
        note="How well the tutor's messages stay at the lesson's level (0 to 1), with 95 % intervals.",
        y_range=(0.0, 1.0),
        marks=marks,
        x="message",
    )


def _by_number(measured: Measurement) -> dict[int, Mapping[str, Any]]:
    """Message number → the estimate of its score, of the first sampling, in order."""
    figures = measured.metrics[measured.samplings[0]].get(LEVEL, {}) if measured.samplings else {}
    numbered = {
        int(name.removeprefix(AT_MESSAGE)): estimate
        for name, estimate in figures.items()
        if name.startswith(AT_MESSAGE)
    }
    return {
        number: estimate
        for number, estimate in sorted(numbered.items())
        if is_number(estimate["mean"]) and estimate["n"] >= LEAST_VALUES
    }
