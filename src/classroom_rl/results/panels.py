"""The panels of the plots for PPO and supervised runs, those that environments describe, and the helpers of all
plots."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from classroom_rl.results.charts import smooth
from classroom_rl.results.run_folder import RunData
from classroom_rl.rollout.extensions import MetricPanel

if TYPE_CHECKING:
    from matplotlib.axes import Axes


BLUE, ORANGE, GREEN, RED, VIOLET = "#2457b3", "#c2410c", "#0f766e", "#b91c1c", "#7c3aed"
COLOURS = (BLUE, ORANGE, GREEN, VIOLET, RED)
BLACK, GREY = "#111827", "#94a3b8"
_COLOURS_BY_NAME = {"blue": BLUE, "orange": ORANGE, "green": GREEN, "red": RED, "violet": VIOLET, "grey": GREY}

Points = list[tuple[float, float]]
Panel = Callable[["Axes", RunData], bool]
"""Draws one panel into the axes; returns False if the run has nothing to draw in it."""


def trend(axes: "Axes", points: Points, colour: str, label: str) -> None:
    """Draw a faint line of all steps and a bold line of their running mean."""
    marker = "o" if len(points) == 1 else None  # a line of one point would be invisible
    axes.plot(*zip(*points, strict=True), color=colour, alpha=0.3, linewidth=1)
    axes.plot(*zip(*smooth(points), strict=True), color=colour, linewidth=2, label=label, marker=marker)


def name_axes(axes: "Axes", title: str, y: str, x: str = "optimizer step") -> bool:
    """Set a panel's title and the names of its axes. Returns True, so that panels can end with it."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set(xlabel=x, ylabel=y)
    return True


def legend_beside(axes: "Axes", reverse: bool = False) -> None:
    """Add a legend to the right of the axes, where it hides nothing, if it has more than one entry."""
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(
            frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.3, reverse=reverse
        )


def panel_of(description: MetricPanel) -> Panel:
    """Return the panel that an environment describes."""

    def draw(axes: "Axes", data: RunData) -> bool:
        series = [(label, colour, points) for name, label, colour in description.lines if (points := data.series(name))]
        for label, colour, points in series:
            trend(axes, points, _COLOURS_BY_NAME[colour], label)
        return bool(series) and name_axes(axes, description.title, description.y)

    return draw


_MIN_EXPLAINED_VARIANCE = -1.0
"""Explained variances below this are drawn at this value: those of the first steps may be far lower."""


def _draw_ppo(axes: "Axes", data: RunData, names: Sequence[tuple[str, str]]) -> bool:
    series = [(label, points) for name, label in names if (points := data.series(f"ppo/{name}"))]
    for colour, (label, points) in zip(COLOURS, series, strict=False):
        trend(axes, points, colour, label)
    return bool(series)


def _explained_variance(axes: "Axes", data: RunData) -> bool:
    points = [(step, max(value, _MIN_EXPLAINED_VARIANCE)) for step, value in data.series("ppo/explained_variance")]
    if not points:
        return False
    trend(axes, points, BLUE, "explained variance")
    axes.axhline(0, color=BLACK, linewidth=0.8)
    return name_axes(axes, "What the critic explains of the returns, before it sees the batch", "share of the variance")


def _critic(axes: "Axes", data: RunData) -> bool:
    lines = (
        ("value_loss", "critic's loss"),
        ("returns_mean", "mean return"),
        ("advantage_std", "advantages' deviation"),
    )
    return _draw_ppo(axes, data, lines) and name_axes(axes, "Critic and advantages", "in units of the reward")


def _clipped_tokens(axes: "Axes", data: RunData) -> bool:
    lines = (("clip_fraction", "policy clipped"), ("value_clip_fraction", "value clipped"))
    return _draw_ppo(axes, data, lines) and name_axes(axes, "Clipped tokens", "share of sampled tokens")


def _movement(axes: "Axes", data: RunData) -> bool:
    points = data.series("ppo/approx_kl")
    if not points:
        return False
    trend(axes, points, ORANGE, "KL(old ‖ new), k3")
    axes.set_ylim(bottom=0)
    return name_axes(axes, "How far the policy moved within a batch", "nats per token")


def _entropy(axes: "Axes", data: RunData) -> bool:
    points = data.series("ppo/entropy")
    if points:
        trend(axes, points, BLUE, "entropy")
        axes.set_ylim(bottom=0)
    return bool(points) and name_axes(axes, "Entropy of the policy", "nats per token")


PPO_PANELS: tuple[Panel, ...] = (_explained_variance, _critic, _clipped_tokens, _movement, _entropy)


SUPERVISION = "supervision/"
CATEGORY = "supervision/category/"
PASS_EXAMPLES = "corrections/pass_examples"
MOVING_AVERAGE = 10
"""The number of steps in the moving average of the reward."""

_BINS = 24
_PALETTE = (BLUE, ORANGE, GREEN, VIOLET, RED, "#ca8a04", "#0891b2", "#be185d", "#4d7c0f", "#64748b", "#78350f")


def is_supervised(data: RunData) -> bool:
    """Whether the run recorded any metric of a supervisor."""
    return any(name.startswith(SUPERVISION) for line in data.steps for name in line)


def passes_of(data: RunData) -> list[float]:
    """Return the steps after which a pass over corrections ran."""
    return [step for step, examples in data.series(PASS_EXAMPLES) if examples > 0]


def moving_average(points: Sequence[tuple[float, float]], window: int = MOVING_AVERAGE) -> Points:
    """Compute the mean of each value and those before it, `window` values in total; fewer at the beginning."""
    values = [value for _, value in points]
    return [(step, fmean(values[max(0, index + 1 - window) : index + 1])) for index, (step, _) in enumerate(points)]


def changes(points: Sequence[tuple[float, float]]) -> list[float]:
    """Return the differences of successive values."""
    return [later - earlier for (_, earlier), (_, later) in pairwise(points)]


def _reward(axes: "Axes", data: RunData) -> bool:
    points = data.series("reward")
    if not points or not is_supervised(data):
        return False
    axes.plot(*zip(*points, strict=True), color=BLUE, alpha=0.35, linewidth=1, label="each step")
    average = f"mean of the last {MOVING_AVERAGE} steps"
    axes.plot(*zip(*moving_average(points), strict=True), color=BLUE, linewidth=2, label=average)
    _mark_passes(axes, data)
    return name_axes(axes, "Reward", "reward")


def _mark_passes(axes: "Axes", data: RunData) -> None:
    for number, step in enumerate(passes_of(data)):
        label = None if number else "pass over corrections"
        axes.axvline(step, color=ORANGE, linestyle="--", linewidth=1.1, alpha=0.8, label=label)


def _valid_messages(axes: "Axes", data: RunData) -> bool:
    lines = (
        ("supervision/valid_share", "valid", GREEN),
        ("supervision/no_verdict_share", "without a verdict", RED),
    )
    series = [(label, colour, points) for name, label, colour in lines if (points := data.series(name))]
    for label, colour, points in series:
        trend(axes, points, colour, label)
    if series:
        _mark_passes(axes, data)
    axes.set_ylim(-0.04, 1.04)
    return bool(series) and name_axes(axes, "Messages that the supervisor called valid", "share of messages")


def shares_of_categories(data: RunData) -> tuple[list[float], dict[str, list[float]]]:
    """Return the steps with a review, and category → its share in each of these steps (0 where it did not occur). The
    most frequent category comes first; categories that never occurred are left out."""
    names = dict.fromkeys(name for line in data.steps for name in line if name.startswith(CATEGORY))
    by_name = {name.removeprefix(CATEGORY): dict(data.series(name)) for name in names}
    steps = sorted({step for shares in by_name.values() for step in shares})
    filled = {name: [shares.get(step, 0.0) for step in steps] for name, shares in by_name.items()}
    common_first = sorted(filled, key=lambda name: (-sum(filled[name]), name))
    return steps, {name: filled[name] for name in common_first if any(filled[name])}


def _categories(axes: "Axes", data: RunData) -> bool:
    steps, shares = shares_of_categories(data)
    if not shares:
        return False
    colours = [_PALETTE[index % len(_PALETTE)] for index in range(len(shares))]
    if len(steps) > 1:
        axes.stackplot(steps, *shares.values(), labels=shares, colors=colours, alpha=0.8, linewidth=0)
        axes.margins(x=0.05)
    else:
        bottom = 0.0
        for (name, [height]), colour in zip(shares.items(), colours, strict=True):
            axes.bar(steps, [height], 0.5, bottom=bottom, color=colour, label=name)
            bottom += height
    axes.set_ylim(0, max(0.05, 1.08 * max(map(sum, zip(*shares.values(), strict=True)))))
    legend_beside(axes, reverse=True)  # from the top of the stack down
    return name_axes(axes, "What was wrong", "share of reviewed messages")


def _cross_entropy(axes: "Axes", data: RunData) -> bool:
    steps, passes = data.series("corrections/ce_loss"), data.series("corrections/pass_loss")
    if steps:
        trend(axes, steps, BLUE, "each step, running mean")
    if passes:
        axes.plot(*zip(*passes, strict=True), "o", color=ORANGE, markersize=5, label="at the end of a pass")
    if steps or passes:
        axes.set_ylim(0, 1.08 * max(value for _, value in (*steps, *passes)) or 1.0)
    return bool(steps or passes) and name_axes(axes, "Cross-entropy on the corrections", "nats per token")


def _reward_changes(axes: "Axes", data: RunData) -> bool:
    differences = changes(data.series("reward"))
    if not differences or not is_supervised(data):
        return False
    limit = max(map(abs, differences)) or 1.0
    axes.hist(differences, bins=_BINS, range=(-limit, limit), color=BLUE, alpha=0.75)
    axes.axvline(0, color=BLACK, linewidth=0.8)
    axes.axvline(
        fmean(differences), color=ORANGE, linewidth=1.6, label=f"mean {fmean(differences):+.4f}".replace("-", "−")
    )
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    return name_axes(axes, "Change of the reward from step to step", "steps", "change of the reward")


SUPERVISION_PANELS: tuple[Panel, ...] = (_reward, _valid_messages, _categories, _cross_entropy, _reward_changes)
