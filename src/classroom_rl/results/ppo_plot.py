"""The panels of `plots/ppo.png`: what the critic explains, its loss, and how far the policy moves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from classroom_rl.results.panels import BLACK, BLUE, COLOURS, ORANGE, Panel, name_axes, trend
from classroom_rl.results.run_folder import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOWEST = -1.0
"""Explained variances below this are drawn at the edge: those of the first steps may be far below."""


def _lines(axes: "Axes", data: RunData, names: Sequence[tuple[str, str]]) -> bool:
    found = [(label, points) for name, label in names if (points := data.series(f"ppo/{name}"))]
    for colour, (label, points) in zip(COLOURS, found, strict=False):
        trend(axes, points, colour, label)
    return bool(found)


def _explained(axes: "Axes", data: RunData) -> bool:
    points = [(step, max(value, _LOWEST)) for step, value in data.series("ppo/explained_variance")]
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
    return _lines(axes, data, lines) and name_axes(axes, "Critic and advantages", "in units of the reward")


def _steps(axes: "Axes", data: RunData) -> bool:
    lines = (("clip_fraction", "policy clipped"), ("value_clip_fraction", "value clipped"))
    return _lines(axes, data, lines) and name_axes(axes, "Clipped tokens", "share of sampled tokens")


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


PPO_PANELS: tuple[Panel, ...] = (_explained, _critic, _steps, _movement, _entropy)
