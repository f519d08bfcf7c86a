"""What a set of rollouts was like: counts and means with 95 % intervals, and plots as PNG files."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from classroom_rl.errors import DataError
from classroom_rl.rollout.intervals import Estimate, mean_with_ci, share_interval
from classroom_rl.rollout.step import BY_STOP, ENDS, ERROR, FAILED, TERMINATED, TRUNCATED, Rollout, Step
from classroom_rl.system.storage import storage_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes


UNFINISHED = "unfinished"
_MOST_LINES = 8


@dataclass(frozen=True)
class RolloutSummary:
    """A summary; `str` gives it as text.

    Intervals are over prompts, since rollouts on one prompt resemble each other; over rollouts if there is one prompt
    only. Of fewer than six there is none.

    Attributes:
        rollouts, prompts: how many there are.
        ends: state → {"share", "ci95", "n"}; `unfinished` are rollouts that were interrupted.
        reasons: "state: reason" → number of rollouts.
        steps: {"mean", "ci95", "n", "min", "max", "total", "distribution"}; the last maps a number of steps to that of
            rollouts.
        rewards: {"mean", "ci95", "n", "min", "max"} over scored rollouts; `not_scored` counts the others.
        tokens: {"total", "per_step", "per_rollout"}, the last two with intervals, of sampled tokens.
        cut: {"share", "ci95", "n"} of steps that were cut at a limit of tokens.
        thoughts: state → number of steps.
        seconds: mean time of a step, with its interval.
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
        played, on = _counted(self.rollouts, "rollout"), _counted(self.prompts, "prompt")
        lines = [f"{played} on {on}; 95 % intervals over {unit}"]
        for state, found in self.ends.items():
            lines.append(_line(state, f"{_percent(found['share'], found['ci95'])}, {found['n']}"))
            reasons = [(reason, n) for reason, n in self.reasons.items() if reason.startswith(f"{state}: ")]
            lines += [_line("", f"{n} {reason.partition(': ')[2]}") for reason, n in reasons[:_MOST_LINES]]
        lines.append(_line("steps", f"{_figure(self.steps)}, min {self.steps['min']}, max {self.steps['max']}"))
        distribution = ", ".join(f"{steps}: {n}" for steps, n in self.steps["distribution"].items())
        lines.append(_line("", f"rollouts by steps: {distribution}"))
        scored = f"{_figure(self.rewards)}, min {_number(self.rewards['min'])}, max {_number(self.rewards['max'])}"
        lines.append(_line("reward", scored if self.rewards["n"] else "none was scored"))
        if self.not_scored and self.rewards["n"]:
            lines.append(_line("", f"{self.not_scored} not scored"))
        lines.append(_line("tokens", f"{self.tokens['total']} sampled; per step {_figure(self.tokens['per_step'])}"))
        lines.append(_line("cut steps", f"{_percent(self.cut['share'], self.cut['ci95'])}, {self.cut['n']}"))
        lines.append(_line("thoughts", ", ".join(f"{n} {state}" for state, n in self.thoughts.items()) or "–"))
        return "\n".join([*lines, _line("seconds", f"{_figure(self.seconds)} per step")])

    __repr__ = __str__


def sum_up(rollouts: Sequence[Rollout]) -> RolloutSummary:
    """The summary of rollouts; means of nothing are None."""
    steps = list(chain.from_iterable(rollout.steps for rollout in rollouts))
    counts = Counter(len(rollout.steps) for rollout in rollouts)
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    states = Counter(_state(rollout) for rollout in rollouts)
    reasons = Counter(f"{each.end.state}: {_reason(each)}" for each in rollouts if each.end is not None)
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
            **_ends_of(counts),
            "total": len(steps),
            "distribution": dict(sorted(counts.items())),
        },
        rewards={
            **_mean(scored, lambda rollout: [rollout.reward]),
            **_ends_of([rollout.reward for rollout in scored]),
        },
        not_scored=len(rollouts) - len(scored),
        tokens={
            "total": sum(step.tokens for step in steps),
            "per_step": _mean(rollouts, lambda rollout: [step.tokens for step in rollout.steps]),
            "per_rollout": _mean(rollouts, lambda rollout: [rollout.tokens]),
        },
        cut=_share(rollouts, lambda rollout: [step.cut for step in rollout.steps]),
        thoughts=dict(sorted(Counter(step.thought_state for step in steps).items())),
        seconds=_mean(rollouts, lambda rollout: [_seconds(step) for step in rollout.steps]),
    )


def _state(rollout: Rollout) -> str:
    return UNFINISHED if rollout.end is None else rollout.end.state


def _reason(rollout: Rollout) -> str:
    end = rollout.end
    return f"{end.reason} ({end.detail})" if end.detail and end.reason in (BY_STOP, ERROR) else end.reason


def _seconds(step: Step) -> float:
    return step.finished - step.started


def _ends_of(values: Iterable[float]) -> dict[str, float | None]:
    found = list(values)
    return {"min": min(found, default=None), "max": max(found, default=None)}


def _mean(rollouts: Sequence[Rollout], values: Callable[[Rollout], Iterable[float]]) -> Estimate:
    """The mean of the values that a function finds in each rollout, with its interval."""
    by_prompt = len({rollout.prompt_index for rollout in rollouts}) > 1
    groups: dict[str, list[float]] = defaultdict(list)
    for place, rollout in enumerate(rollouts):
        groups[str(rollout.prompt_index if by_prompt else place)] += values(rollout)
    return mean_with_ci(groups)


def _share(rollouts: Sequence[Rollout], hits: Callable[[Rollout], Iterable[bool]]) -> dict[str, Any]:
    """The share of True among what a function finds in each rollout; `n` counts them."""
    found = [list(hits(rollout)) for rollout in rollouts]
    total, n = sum(map(len, found)), sum(map(sum, found))
    if len({rollout.prompt_index for rollout in rollouts}) == len(rollouts) == total:  # they are independent
        interval = share_interval(n, total)
        return {"share": n / total if total else None, "ci95": interval, "n": n}
    estimate = _mean(rollouts, lambda rollout: map(float, hits(rollout)))
    return {"share": estimate["mean"], "ci95": estimate["ci95"], "n": n}


# As text -------------------------------------------------------------------------------------------------------------


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _line(name: str, says: str) -> str:
    return f"  {name:<12}{says}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _figure(estimate: Estimate) -> str:
    if estimate["ci95"] is None:
        return _number(estimate["mean"])
    low, high = map(_number, estimate["ci95"])
    return f"{_number(estimate['mean'])} [{low}, {high}]"


def _percent(share: float | None, interval: Sequence[float] | None) -> str:
    if share is None:
        return "–"
    within = "" if interval is None else f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
    return f"{100 * share:.1f} %{within}"


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
