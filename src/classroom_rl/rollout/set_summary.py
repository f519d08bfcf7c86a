"""The summary of a set of rollouts: counts and means with 95 % intervals, and plots as PNG files."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from classroom_rl.errors import DataError
from classroom_rl.rollout.intervals import Estimate, mean_with_ci, share_interval
from classroom_rl.rollout.step import BY_STOP, ENDS, ERROR, FAILED, TERMINATED, TRUNCATED, Rollout
from classroom_rl.system.storage import storage_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes


UNFINISHED = "unfinished"
_MOST_LINES = 8


@dataclass(frozen=True)
class RolloutSummary:
    """Statistics of a set of rollouts; `str` gives them as text.

    Rollouts on the same prompt are not independent of each other, so intervals are over prompts; over rollouts if there
    is only one prompt. With fewer than six of these there is no interval (None).

    Attributes:
        rollouts, prompts: their numbers.
        ends: state → {"share", "ci95", "n"}; `unfinished` rollouts were interrupted.
        reasons: "state: reason" → number of rollouts.
        steps: {"mean", "ci95", "n", "min", "max", "total", "distribution"}; `distribution` maps a number of steps to
            the number of rollouts with so many.
        rewards: {"mean", "ci95", "n", "min", "max"} over scored rollouts.
        not_scored: the number of rollouts without a reward.
        tokens: {"total", "per_step", "per_rollout"} of sampled tokens, the last two with intervals.
        cut: {"share", "ci95", "n"} of steps that were cut at a token limit.
        thoughts: state of the thought → number of steps.
        seconds: the mean time of a step, with its interval.
    """

    rollouts: int
    prompts: int
    ends: dict[str, dict[str, Any]]
    reasons: dict[str, int]
    steps: dict[str, Any]
    rewards: dict[str, Any]
    not_scored: int
    tokens: dict[str, Any]
    cut: dict[str, Any]
    thoughts: dict[str, int]
    seconds: Estimate

    def __str__(self) -> str:
        unit = "prompts" if self.prompts > 1 else "rollouts"
        rollouts, prompts = _counted(self.rollouts, "rollout"), _counted(self.prompts, "prompt")
        lines = [f"{rollouts} on {prompts}; 95 % intervals over {unit}"]
        for state, share in self.ends.items():
            lines.append(_line(state, f"{_share_text(share['share'], share['ci95'])}, {share['n']}"))
            reasons = [(reason, count) for reason, count in self.reasons.items() if reason.startswith(f"{state}: ")]
            lines += [_line("", f"{count} {reason.partition(': ')[2]}") for reason, count in reasons[:_MOST_LINES]]
        lines.append(_line("steps", f"{_mean_text(self.steps)}, min {self.steps['min']}, max {self.steps['max']}"))
        distribution = ", ".join(f"{steps}: {count}" for steps, count in self.steps["distribution"].items())
        lines.append(_line("", f"rollouts by steps: {distribution}"))
        least, most = _number_text(self.rewards["min"]), _number_text(self.rewards["max"])
        rewards = f"{_mean_text(self.rewards)}, min {least}, max {most}"
        lines.append(_line("reward", rewards if self.rewards["n"] else "none was scored"))
        if self.not_scored and self.rewards["n"]:
            lines.append(_line("", f"{self.not_scored} not scored"))
        lines.append(_line("tokens", f"{self.tokens['total']} sampled; per step {_mean_text(self.tokens['per_step'])}"))
        lines.append(_line("cut steps", f"{_share_text(self.cut['share'], self.cut['ci95'])}, {self.cut['n']}"))
        lines.append(_line("thoughts", ", ".join(f"{count} {state}" for state, count in self.thoughts.items()) or "–"))
        return "\n".join([*lines, _line("seconds", f"{_mean_text(self.seconds)} per step")])

    __repr__ = __str__


def sum_up(rollouts: Sequence[Rollout]) -> RolloutSummary:
    """Summarise rollouts; a mean of no values is None."""
    steps = list(chain.from_iterable(rollout.steps for rollout in rollouts))
    counts = Counter(len(rollout.steps) for rollout in rollouts)
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    states = Counter(_state(rollout) for rollout in rollouts)
    reasons = Counter(f"{rollout.end.state}: {_reason(rollout)}" for rollout in rollouts if rollout.end is not None)
    return RolloutSummary(
        rollouts=len(rollouts),
        prompts=len({rollout.prompt_index for rollout in rollouts}),
        ends={
            state: _share(rollouts, lambda rollout, state=state: [_state(rollout) == state])
            for state in (*ENDS, UNFINISHED)
            if states[state]
        },
        reasons=dict(reasons.most_common()),
        steps={
            **_mean(rollouts, lambda rollout: [len(rollout.steps)]),
            **_extremes(counts),
            "total": len(steps),
            "distribution": dict(sorted(counts.items())),
        },
        rewards={
            **_mean(scored, lambda rollout: [rollout.reward]),
            **_extremes([rollout.reward for rollout in scored]),
        },
        not_scored=len(rollouts) - len(scored),
        tokens={
            "total": sum(step.tokens for step in steps),
            "per_step": _mean(rollouts, lambda rollout: [step.tokens for step in rollout.steps]),
            "per_rollout": _mean(rollouts, lambda rollout: [rollout.tokens]),
        },
        cut=_share(rollouts, lambda rollout: [step.cut for step in rollout.steps]),
        thoughts=dict(sorted(Counter(step.thought_state for step in steps).items())),
        seconds=_mean(rollouts, lambda rollout: [step.finished - step.started for step in rollout.steps]),
    )


def _state(rollout: Rollout) -> str:
    return UNFINISHED if rollout.end is None else rollout.end.state


def _reason(rollout: Rollout) -> str:
    end = rollout.end
    return f"{end.reason} ({end.detail})" if end.detail and end.reason in (BY_STOP, ERROR) else end.reason


def _extremes(values: Iterable[float]) -> dict[str, float | None]:
    numbers = list(values)
    return {"min": min(numbers, default=None), "max": max(numbers, default=None)}


def _mean(rollouts: Sequence[Rollout], values: Callable[[Rollout], Iterable[float]]) -> Estimate:
    """The mean of the values that a function returns for each rollout, with its interval."""
    by_prompt = len({rollout.prompt_index for rollout in rollouts}) > 1
    groups: dict[str, list[float]] = defaultdict(list)
    for index, rollout in enumerate(rollouts):
        groups[str(rollout.prompt_index if by_prompt else index)] += values(rollout)
    return mean_with_ci(groups)


def _share(rollouts: Sequence[Rollout], hits: Callable[[Rollout], Iterable[bool]]) -> dict[str, Any]:
    """The share of True among the values that a function returns for each rollout; `n` is the number of True."""
    hits_by_rollout = [list(hits(rollout)) for rollout in rollouts]
    total, n = sum(map(len, hits_by_rollout)), sum(map(sum, hits_by_rollout))
    # One rollout per prompt and one value per rollout: the values are independent of each other.
    if len({rollout.prompt_index for rollout in rollouts}) == len(rollouts) == total:
        interval = share_interval(n, total)
        return {"share": n / total if total else None, "ci95": interval, "n": n}
    estimate = _mean(rollouts, lambda rollout: map(float, hits(rollout)))
    return {"share": estimate["mean"], "ci95": estimate["ci95"], "n": n}


# As text -------------------------------------------------------------------------------------------------------------


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _line(label: str, text: str) -> str:
    return f"  {label:<12}{text}"


def _number_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _mean_text(estimate: Estimate) -> str:
    if estimate["ci95"] is None:
        return _number_text(estimate["mean"])
    low, high = map(_number_text, estimate["ci95"])
    return f"{_number_text(estimate['mean'])} [{low}, {high}]"


def _share_text(share: float | None, interval: Sequence[float] | None) -> str:
    if share is None:
        return "–"
    ends = "" if interval is None else f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
    return f"{100 * share:.1f} %{ends}"


_COLOURS = {TERMINATED: "#2457b3", TRUNCATED: "#c2410c", FAILED: "#b91c1c", UNFINISHED: "#94a3b8"}
_DPI = 130


def draw(rollouts: Sequence[Rollout], folder: Path) -> list[Path]:
    """Draw rewards.png (if there are rewards), steps.png, ends.png and by_step.png; each is replaced atomically. Raises
    a `DataError` if there are no rollouts, and a `StorageError` if the disk is full or may not be written to."""
    from matplotlib.figure import Figure

    if not rollouts:
        raise DataError("There are no rollouts to draw.")
    written = []
    panels = (("rewards", _draw_rewards), ("steps", _draw_steps), ("ends", _draw_ends), ("by_step", _draw_by_step))
    for name, draw_panel in panels:
        figure = Figure(figsize=(6.4, 3.6), dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        if not draw_panel(axes, rollouts):
            continue
        axes.grid(alpha=0.22, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        path = folder / f"{name}.png"
        unfinished = path.with_suffix(".unfinished")  # renamed once it is whole
        with storage_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(unfinished, format="png")
            unfinished.replace(path)
        written.append(path)
    return written


# Panels: each draws into the axes, and returns whether there was anything to draw.


def _draw_rewards(axes: "Axes", rollouts: Sequence[Rollout]) -> bool:
    by_state = {
        state: [rollout.reward for rollout in rollouts if _state(rollout) == state and rollout.reward is not None]
        for state in _COLOURS
    }
    by_state = {state: rewards for state, rewards in by_state.items() if rewards}
    if not by_state:
        return False
    mean = fmean(reward for rewards in by_state.values() for reward in rewards)
    colours = [_COLOURS[state] for state in by_state]
    axes.hist(list(by_state.values()), bins=20, stacked=True, label=list(by_state), color=colours)
    axes.axvline(mean, color="#111827", linewidth=1, linestyle="--", label=f"mean {mean:.3g}")
    axes.set(title="Reward", xlabel="reward", ylabel="rollouts")
    axes.legend(frameon=False, fontsize=8)
    return True


def _draw_steps(axes: "Axes", rollouts: Sequence[Rollout]) -> bool:
    below: Counter[int] = Counter()  # the height of the stacked bars so far
    for state, colour in _COLOURS.items():
        counts = Counter(len(rollout.steps) for rollout in rollouts if _state(rollout) == state)
        if counts:
            numbers = sorted(counts)
            heights = [counts[number] for number in numbers]
            axes.bar(numbers, heights, bottom=[below[number] for number in numbers], color=colour, label=state)
            below += counts
    axes.set(title="Steps of a rollout", xlabel="steps", ylabel="rollouts")
    axes.legend(frameon=False, fontsize=8)
    return True


def _draw_ends(axes: "Axes", rollouts: Sequence[Rollout]) -> bool:
    reasons = Counter((_state(rollout), "" if rollout.end is None else rollout.end.reason) for rollout in rollouts)
    rarest_first = reasons.most_common()[::-1]
    names = [": ".join(filter(None, end)) for end, _ in rarest_first]
    axes.barh(names, [count for _, count in rarest_first], color=[_COLOURS[state] for (state, _), _ in rarest_first])
    axes.set(title="How rollouts ended", xlabel="rollouts")
    return True


def _draw_by_step(axes: "Axes", rollouts: Sequence[Rollout]) -> bool:
    """Mean tokens of a message by step, counted from 0, and the mean reward of a step if steps were scored."""
    longest = max(len(rollout.steps) for rollout in rollouts)
    if not longest:
        return False
    by_index = [
        [(rollout, rollout.steps[index]) for rollout in rollouts if len(rollout.steps) > index]
        for index in range(longest)
    ]
    numbers = range(longest)
    axes.plot(numbers, [fmean(step.tokens for _, step in steps) for steps in by_index], color="#2457b3", marker=".")
    axes.set(
        title="From step to step", xlabel="step (the first is 0)", ylabel="mean tokens of a message", ylim=(0, None)
    )
    rewards = [
        [rollout.step_rewards[step.index] for rollout, step in steps if rollout.step_rewards] for steps in by_index
    ]
    points = [
        (number, [reward for reward in values if reward is not None])
        for number, values in zip(numbers, rewards, strict=True)
    ]
    points = [(number, fmean(values)) for number, values in points if values]
    if points:
        reward_axes = axes.twinx()
        reward_axes.plot(*zip(*points, strict=True), color="#0f766e", marker=".")
        reward_axes.set_ylabel("mean reward of a step", color="#0f766e")
    return True
