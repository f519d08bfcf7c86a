"""What a set of rollouts was like: counts and means with 95 % intervals."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from classroom_rl.rollout.intervals import Estimate, mean_with_ci, share_interval
from classroom_rl.rollout.step import BY_STOP, ENDS, ERROR, Rollout, Step

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
