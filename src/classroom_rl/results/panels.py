"""What the panels of all plots share: colours, lines with their running mean, titles, legends."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from classroom_rl.results.charts import smooth
from classroom_rl.results.run_folder import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED, VIOLET = "#2457b3", "#c2410c", "#0f766e", "#b91c1c", "#7c3aed"
COLOURS = (BLUE, ORANGE, GREEN, VIOLET, RED)
BLACK, GREY = "#111827", "#94a3b8"

Points = list[tuple[float, float]]
Panel = Callable[["Axes", RunData], bool]
"""Draws one panel into the axes; returns False if the run holds nothing to draw in it."""


def trend(axes: "Axes", points: Points, colour: str, label: str) -> None:
    """Draw a faint line of all steps and a strong line of their running mean."""
    marker = "o" if len(points) == 1 else None
    axes.plot(*zip(*points, strict=True), color=colour, alpha=0.3, linewidth=1)
    axes.plot(*zip(*smooth(points), strict=True), color=colour, linewidth=2, label=label, marker=marker)


def name_axes(axes: "Axes", title: str, y: str, x: str = "optimizer step") -> bool:
    """Set a panel's title and the names of its axes; returns True."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set(xlabel=x, ylabel=y)
    return True


def legend_beside(axes: "Axes", reverse: bool = False) -> None:
    """Put a legend with more than one entry beside the axes, where it hides nothing."""
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(
            frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.3, reverse=reverse
        )
