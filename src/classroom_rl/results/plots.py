"""Draws the plots of a run from its run folder, as PNG files in `plots/`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from classroom_rl.judges.verdicts import Criterion, judged_criteria
from classroom_rl.results.panels import (
    BLACK,
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    PPO_PANELS,
    SUPERVISION_PANELS,
    VIOLET,
    Panel,
    legend_beside,
    name_axes,
    panel_of,
    trend,
)
from classroom_rl.results.run_folder import RunData, is_number
from classroom_rl.rollout.extensions import view_of
from classroom_rl.system.storage import storage_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOTS_FOLDER = "plots"
_REWARD_PREFIX = "rewards/"
_DPI = 130


def write_plots(data: RunData) -> list[Path]:
    """Write all plots for which the run has data, and return their paths. Each file is replaced atomically. Raises
    `StorageError` if the disk is full or may not be written to."""
    folder = data.folder / PLOTS_FOLDER
    written = []
    for name, panels in _plots_of(data).items():
        figure = _draw(data, panels)
        if figure is None:
            continue
        path = folder / f"{name}.png"
        unfinished = path.with_suffix(".unfinished")
        with storage_errors(path):
            folder.mkdir(exist_ok=True)
            figure.savefig(unfinished, format="png")
            unfinished.replace(path)
        written.append(path)
    return written


def _plots_of(data: RunData) -> dict[str, tuple[Panel, ...]]:
    """Return name → panels: the plots of every run, and one with the environment's own panels, named after it."""
    panels = tuple(map(panel_of, view_of(data.config).panels))
    name = (data.config.get("environment") or "classroom").rpartition(".")[2]
    return _PLOTS | ({name: panels} if panels and name not in _PLOTS else {})


def _draw(data: RunData, panels: Sequence[Panel]) -> Optional["Figure"]:
    """Draw the panels below each other. Empty panels are left out; None if all are empty."""
    from matplotlib.figure import Figure

    filled = [panel for panel in panels if panel(Figure().subplots(), data)]  # drawn once to see which are empty
    if not filled:
        return None
    figure = Figure(figsize=(7.4, 3.3 * len(filled) + 0.4), dpi=_DPI, layout="constrained")
    for axes, panel in zip(figure.subplots(len(filled), squeeze=False)[:, 0], filled, strict=True):
        panel(axes, data)
        axes.grid(alpha=0.22, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend() is None:
            legend_beside(axes)
    figure.suptitle(data.folder.resolve().name, fontsize=9, color="#6b7280", x=0.99, ha="right")
    return figure


# Reward ----------------------------------------------------------------------------------------------------------


def _reward(axes: "Axes", data: RunData) -> bool:
    points = data.series("reward")
    if not points:
        return False
    spread = dict(data.series("reward_std"))
    steps, rewards = zip(*points, strict=True)
    low, high = ([reward + sign * spread.get(step, 0.0) for step, reward in points] for sign in (-1, 1))
    axes.fill_between(steps, low, high, color=BLUE, alpha=0.1, linewidth=0, label="± standard deviation")
    trend(axes, points, BLUE, "training, running mean")
    held_out_judge = data.series("guard/held_out_reward")
    if held_out_judge:
        axes.plot(
            *zip(*held_out_judge, strict=True), "D--", color=VIOLET, markersize=4, linewidth=1, label="held-out judge"
        )
    return name_axes(axes, "Reward", "reward")


def _error_bar(estimate: dict) -> list[list[float]]:
    """Return the lengths of the error bar below and above the mean, in the form that `errorbar` takes."""
    low, high = estimate["ci95"] or (estimate["mean"], estimate["mean"])
    return [[max(0.0, estimate["mean"] - low)], [max(0.0, high - estimate["mean"])]]


def _criterion_label(criterion: Criterion) -> str:
    return criterion.label.lower() + ("" if criterion.top == 1 else f" / {criterion.top:g}")


def _parts(axes: "Axes", data: RunData) -> bool:
    """The judge's scores as shares of the highest score, and each reward if there are several."""
    parts = [
        (_criterion_label(criterion), [(x, y / criterion.top) for x, y in data.series(f"judge/{name}")])
        for name, criterion in judged_criteria(data.steps).items()
    ]
    rewards = dict.fromkeys(
        name for line in data.steps for name in line if name.startswith(_REWARD_PREFIX) and name.endswith("/mean")
    )
    if len(rewards) > 1:
        parts += [(name.removeprefix(_REWARD_PREFIX).removesuffix("/mean"), data.series(name)) for name in rewards]
    parts = [(label, points) for label, points in parts if points]
    for number, (label, points) in enumerate(parts):
        trend(axes, points, COLOURS[number % len(COLOURS)], label)
    return bool(parts) and name_axes(axes, "What the reward is made of", "mean of the batch")


def _held_out(axes: "Axes", data: RunData) -> bool:
    """The rewards before and after training, next to each other for each sampling."""
    estimates = {
        (sampling, when): measurement.metrics[sampling]["reward"]
        for when, measurement in data.measurements.items()
        for sampling in measurement.samplings
        if is_number(measurement.metrics[sampling]["reward"]["mean"])
    }
    samplings = list(dict.fromkeys(sampling for sampling, _ in estimates))
    for when, shift, colour in (("before", -0.17, GREY), ("after", 0.17, BLUE)):
        bars = [(index, estimates[name, when]) for index, name in enumerate(samplings) if (name, when) in estimates]
        if not bars:
            continue
        positions, heights = [index + shift for index, _ in bars], [estimate["mean"] for _, estimate in bars]
        error_bars = [sum((_error_bar(estimate)[side] for _, estimate in bars), []) for side in (0, 1)]
        axes.bar(positions, heights, 0.3, color=colour, label=f"{when} training")
        axes.errorbar(positions, heights, error_bars, fmt="none", ecolor=BLACK, capsize=4, linewidth=1.2)
        for position, height, top in zip(positions, heights, error_bars[1], strict=True):
            axes.annotate(
                f"{height:.3f}", (position, height + top), (0, 3), textcoords="offset points", ha="center", fontsize=9
            )
    axes.set_xticks(range(len(samplings)), samplings)
    axes.margins(y=0.15)
    return bool(estimates) and name_axes(axes, "Reward on held-out lessons, 95 % intervals", "reward", "sampling")


def _held_out_curve(axes: "Axes", data: RunData) -> bool:
    """The rewards of the evaluations during the training."""
    points = data.held_out_rewards() if data.evaluations else []
    for colour, sampling in zip(COLOURS, dict.fromkeys(name for name, *_ in points), strict=False):
        sampling_points = [(step, reward) for name, _, step, reward in points if name == sampling]
        error_bars = [sum((_error_bar(reward)[side] for _, reward in sampling_points), []) for side in (0, 1)]
        steps, means = [step for step, _ in sampling_points], [reward["mean"] for _, reward in sampling_points]
        axes.errorbar(steps, means, error_bars, fmt="o-", color=colour, markersize=4, capsize=3, label=sampling)
    return bool(points) and name_axes(axes, "Reward on held-out lessons during training, 95 % intervals", "reward")


# Engine, lengths, judge, signal ----------------------------------------------------------------------------------


def _mismatch(axes: "Axes", data: RunData) -> bool:
    is_drawn = False
    for colour, (name, label) in zip(
        (BLUE, ORANGE, GREEN),
        (
            ("mismatch/mean_abs_logprob_diff", "mean |Δ log-prob|"),
            ("sampling/sampling_logp_difference/max", "largest |Δ log-prob|"),
            ("mismatch/k3_kl", "KL(engine ‖ trainer), k3"),
        ),
        strict=True,
    ):
        points = [(step, value) for step, value in data.series(name) if value > 0]  # the axis is logarithmic
        if points:
            trend(axes, points, colour, label)
            is_drawn = True
    axes.set_yscale("log")
    return is_drawn and name_axes(axes, "Engine against trainer, on the sampled tokens", "nats")


def _tokens(axes: "Axes", data: RunData) -> bool:
    points = data.series("completions/mean_length")
    if not points:
        return False
    low, high = (dict(data.series(f"completions/{extreme}_length")) for extreme in ("min", "max"))
    steps = [step for step, _ in points if step in low and step in high]
    if steps:
        edges = [[edge[step] for step in steps] for edge in (low, high)]
        axes.fill_between(steps, *edges, color=BLUE, alpha=0.1, linewidth=0, label="shortest to longest")
    trend(axes, points, BLUE, "mean")
    axes.set_ylim(bottom=0)
    return name_axes(axes, "Teacher's tokens in a conversation", "tokens")


def _messages(axes: "Axes", data: RunData) -> bool:
    points = data.series("conversation/messages")
    if points:
        trend(axes, points, BLUE, "mean")
        axes.set_ylim(0, 1.1 * max(y for _, y in points))
    return bool(points) and name_axes(axes, "Messages in a conversation", "messages")


def _shares(axes: "Axes", data: RunData, lines: Sequence[tuple[str, str]], title: str, y: str) -> bool:
    series = [(label, points) for name, label in lines if (points := data.series(name))]
    for colour, (label, points) in zip(COLOURS, series, strict=False):
        trend(axes, points, colour, label)
    highest = max((y for _, points in series for _, y in points), default=0.0)
    top = min(1.04, max(0.1, 1.15 * highest))
    axes.set_ylim(-0.04 * top, top)
    return bool(series) and name_axes(axes, title, y)


def _judge_failures(axes: "Axes", data: RunData) -> bool:
    lines = (("judge/failed_share", "without a verdict"), ("conversation/rejected_share", "rejected"))
    return _shares(axes, data, lines, "Failed and rejecting judges", "share of conversations")


def _judge_checks(axes: "Axes", data: RunData) -> bool:
    lines = {"guard/gap": "judge − held-out judge"}
    names = dict.fromkeys(name for line in data.steps for name in line if name.startswith("guard/canary_"))
    lines |= {name: f"canary: {name.removeprefix('guard/canary_')}" for name in names}
    series = [(label, points) for name, label in lines.items() if (points := data.series(name))]
    for colour, (label, points) in zip(COLOURS, series, strict=False):
        axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, linewidth=1.5, label=label)
    axes.axhline(0, color=BLACK, linewidth=0.8)
    return bool(series) and name_axes(axes, "Is the judge being fooled?", "score, 0 to 1")


def _zero_variance(axes: "Axes", data: RunData) -> bool:
    lines = (("frac_reward_zero_std", "groups without variance"),)
    return _shares(axes, data, lines, "Groups whose rewards are all equal", "share of groups")


def _gradient_norm(axes: "Axes", data: RunData) -> bool:
    points = data.series("grad_norm")
    if points:
        trend(axes, points, BLUE, "norm")
        axes.set_ylim(bottom=0)
    return bool(points) and name_axes(axes, "Gradient's norm, before clipping", "L2 norm")


_PLOTS: dict[str, tuple[Panel, ...]] = {
    "reward": (_reward, _parts),
    "held_out": (_held_out, _held_out_curve),
    "mismatch": (_mismatch,),
    "lengths": (_tokens, _messages),
    "judge": (_judge_failures, _judge_checks),
    "signal": (_zero_variance, _gradient_norm),
    "supervision": SUPERVISION_PANELS,
    "ppo": PPO_PANELS,
}
