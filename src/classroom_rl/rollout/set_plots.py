"""Draws a set of rollouts as PNG files: rewards, steps, ends, and what happens from step to step."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from classroom_rl.errors import DataError
from classroom_rl.rollout.set_summary import UNFINISHED
from classroom_rl.rollout.step import FAILED, TERMINATED, TRUNCATED, Rollout
from classroom_rl.system.storage import storage_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {TERMINATED: "#2457b3", TRUNCATED: "#c2410c", FAILED: "#b91c1c", UNFINISHED: "#94a3b8"}
_DPI = 130


def draw(rollouts: Sequence[Rollout], folder: Path) -> list[Path]:
    """Draw rewards.png (if there are rewards), steps.png, ends.png and by_step.png; each is replaced atomically.

    Raises:
        DataError: if there are no rollouts.
        StorageError: if the disk is full or may not be written to.
    """
    from matplotlib.figure import Figure

    if not rollouts:
        raise DataError("There are no rollouts to draw.")
    written = []
    for name, panel in (("rewards", _rewards), ("steps", _steps), ("ends", _ends), ("by_step", _by_step)):
        figure = Figure(figsize=(6.4, 3.6), dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        if not panel(axes, rollouts):
            continue
        axes.grid(alpha=0.22, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        path = folder / f"{name}.png"
        unfinished = path.with_suffix(".unfinished")
        with storage_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(unfinished, format="png")
            unfinished.replace(path)
        written.append(path)
    return written


def _state(rollout: Rollout) -> str:
    return UNFINISHED if rollout.end is None else rollout.end.state


def _rewards(axes: "Axes", rollouts: Sequence[Rollout]) -> bool:
    found = {state: [r.reward for r in rollouts if _state(r) == state and r.reward is not None] for state in _COLOURS}
    found = {state: rewards for state, rewards in found.items() if rewards}
    if not found:
        return False
    everything = [reward for rewards in found.values() for reward in rewards]
    axes.hist(list(found.values()), bins=20, stacked=True, label=list(found), color=[_COLOURS[each] for each in found])
    axes.axvline(fmean(everything), color="#111827", linewidth=1, linestyle="--", label=f"mean {fmean(everything):.3g}")
    axes.set(title="Reward", xlabel="reward", ylabel="rollouts")
    axes.legend(frameon=False, fontsize=8)
    return True


def _steps(axes: "Axes", rollouts: Sequence[Rollout]) -> bool:
    below: Counter[int] = Counter()
    for state, colour in _COLOURS.items():
        counts = Counter(len(rollout.steps) for rollout in rollouts if _state(rollout) == state)
        if counts:
            places = sorted(counts)
            heights = [counts[place] for place in places]
            axes.bar(places, heights, bottom=[below[place] for place in places], color=colour, label=state)
            below += counts
    axes.set(title="Steps of a rollout", xlabel="steps", ylabel="rollouts")
    axes.legend(frameon=False, fontsize=8)
    return True


def _ends(axes: "Axes", rollouts: Sequence[Rollout]) -> bool:
    reasons = Counter((_state(each), "" if each.end is None else each.end.reason) for each in rollouts)
    found = reasons.most_common()[::-1]
    names = [": ".join(filter(None, each)) for each, _ in found]
    axes.barh(names, [n for _, n in found], color=[_COLOURS[state] for (state, _), _ in found])
    axes.set(title="How rollouts ended", xlabel="rollouts")
    return True


def _by_step(axes: "Axes", rollouts: Sequence[Rollout]) -> bool:
    """Tokens of a message, and the reward of a step if steps were scored, by the number of the step."""
    longest = max(len(rollout.steps) for rollout in rollouts)
    if not longest:
        return False
    at = [[(r, r.steps[place]) for r in rollouts if len(r.steps) > place] for place in range(longest)]
    numbers = range(1, longest + 1)
    axes.plot(numbers, [fmean(step.tokens for _, step in steps) for steps in at], color="#2457b3", marker=".")
    axes.set(title="From step to step", xlabel="step", ylabel="mean tokens of a message", ylim=(0, None))
    rewards = [[r.step_rewards[s.index] for r, s in steps if r.step_rewards] for steps in at]
    points = [(n, [x for x in found if x is not None]) for n, found in zip(numbers, rewards, strict=True)]
    points = [(n, fmean(found)) for n, found in points if found]
    if points:
        other = axes.twinx()
        other.plot(*zip(*points, strict=True), color="#0f766e", marker=".")
        other.set_ylabel("mean reward of a step", color="#0f766e")
    return True
