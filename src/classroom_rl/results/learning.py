"""Decides from a run's files whether the tutor learned, and writes the answer with reasons to `learning.json`.

A run counts as evidence of learning if the reward rose by more than chance (its 95 % interval is above 0, and a
permutation test has p < 0.05) and by at least LEAST_RISE, and the parameters moved. Held-out lessons, measured before
and after training, decide. Without them, the reward on the training problems decides: the last batches are compared
with the first, unless a curriculum chose their problems, or the two sides have different problems that may not have
been drawn at random. The intervals are over the lessons of this one run; another seed may give another answer.

LEAST_RISE is needed because the intervals cannot tell learning from random drift: random rewards change a policy too,
and with enough lessons any change is significant.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, Optional

import numpy as np

from classroom_rl.config.values import SAMPLED, SUPERVISED
from classroom_rl.results.rollout_files import ConversationReward, read_rewards
from classroom_rl.results.run_folder import LEARNING_NAME, RunData, has_score, load_run, look_up, read_json
from classroom_rl.results.statistics import is_clear, paired_change
from classroom_rl.rollout.intervals import BOOTSTRAP_SEED, LEAST_LESSONS, LEVEL, RESAMPLES, Estimate, mean_with_ci
from classroom_rl.system.storage import write_whole

LEARNED, NO_EVIDENCE = "learned", "no evidence of learning"

LEAST_RISE = 0.02
"""A smaller rise is no evidence: in five trainings of tiny models on shuffled rewards, the reward changed by −0.007 to
+0.010, with two of the intervals above 0 (`tests/trainer/test_learning_run.py`)."""

_CHOSEN_BY_CURRICULUM = "A curriculum chose them by their rewards, so this shows no learning: measure held-out lessons."
_DIFFERENT_PROBLEMS = (
    f"Fewer than {LEAST_LESSONS} were played on both sides, and whether chance dealt out the others is not known, so "
    "this shows no learning: measure held-out lessons."
)

_MAX_BATCHES = 10
_HIGH_SHARE_WITHOUT_VARIANCE = 0.5


@dataclass(frozen=True)
class Movement:
    """How far the parameters moved: the L2 norm of their change, relative to their L2 norm before training. Of the `of`
    trained parameters, `compared` were found in the initial model."""

    relative_norm: float
    compared: int
    of: int


@dataclass(frozen=True)
class Trend:
    """The mean reward of the conversations in the first and in the last batches of a training.

    Attributes:
        batches: the number of batches on each side.
        first, last: the mean rewards of the two sides.
        change: the difference, with an interval over problems and p; its n counts problems.
        decides_not: why the trend cannot show learning, whatever its value; "" if it can.
    """

    batches: int
    first: float
    last: float
    change: Estimate
    decides_not: str = ""


@dataclass(frozen=True)
class LearningEvidence:
    """The evidence from which `conclude` decides; None means unknown.

    Attributes:
        without_variance: the mean share of groups whose rewards were all equal.
        gradient_norm: the median over the steps of the gradient norm before clipping.
        held_out: sampling → the change of the held-out reward, paired by lesson.
        judge_checks: the number of checks of the judge during training that gave a score.
        judge_warnings: the number of checks that warned.
        judge_checks_failed: the number of checks that gave no score.
    """

    steps: int
    movement: Optional[Movement] = None
    without_variance: Optional[float] = None
    gradient_norm: Optional[float] = None
    held_out: Mapping[str, Estimate] = field(default_factory=dict)
    training: Optional[Trend] = None
    judge_checks: int = 0
    judge_warnings: int = 0
    judge_checks_failed: int = 0


@dataclass(frozen=True)
class Learning:
    """The conclusion: LEARNED or NO_EVIDENCE, and the reasons as sentences; the decisive reason is first. With
    `in_training` it rests on the training's own problems, because no held-out ones were measured."""

    verdict: str
    reasons: tuple[str, ...]
    in_training: bool = False

    @property
    def learned(self) -> bool:
        return self.verdict == LEARNED


def conclude(evidence: LearningEvidence) -> Learning:
    """Decide whether the evidence shows learning. Held-out lessons played with a supervisor decide nothing, because
    their reward measures the supervisor too."""
    unmoved = evidence.movement is not None and evidence.movement.relative_norm == 0
    held_out = {name: estimate for name, estimate in evidence.held_out.items() if estimate["n"]}
    large_enough = {name: estimate for name, estimate in held_out.items() if estimate["n"] >= LEAST_LESSONS}
    unsupervised = {name: estimate for name, estimate in large_enough.items() if name != SUPERVISED}
    deciding = unsupervised.get(SAMPLED) or next(iter(unsupervised.values()), None)
    trend = evidence.training
    if not unsupervised and trend is not None and not trend.decides_not:
        deciding = trend.change
    above_chance = deciding is not None and deciding["mean"] > 0 and is_clear(deciding)
    rose = above_chance and deciding["mean"] >= LEAST_RISE
    # "sampled" comes first, because it decides
    reasons = [_held_out_reason(name, held_out[name]) for name in sorted(held_out, key="sampled".__ne__)]
    if not evidence.held_out:
        reasons += ["The reward was not measured on held-out lessons before and after."]
    elif not held_out:
        reasons += ["No held-out lesson has a reward both before and after."]
    reasons += [_trend_reason(trend)] if trend else []
    if above_chance and not rose:
        reasons += [f"A rise of less than {LEAST_RISE} is no evidence: weights pushed about at random bring as much."]
    if deciding is None and trend is None:
        reasons += ["There are too few batches to tell whether the reward rose in training."]
    reasons = (
        [_movement_reason(evidence.movement), *reasons] if unmoved else [*reasons, _movement_reason(evidence.movement)]
    )
    reasons += _signal_reasons(evidence)
    learned = rose and not unmoved
    return Learning(LEARNED if learned else NO_EVIDENCE, tuple(reasons), learned and not unsupervised)


def _held_out_reason(sampling: str, change: Estimate) -> str:
    return f"On held-out lessons ({sampling}) the reward {_describe_change(change)}, {change['n']} lessons."


def _trend_reason(trend: Trend) -> str:
    batches = "batch" if trend.batches == 1 else f"{trend.batches} batches"
    return (
        f"In training the reward {_describe_change(trend.change)} from the first {batches} ({trend.first:.3f}) to the "
        f"last ({trend.last:.3f}), {trend.change['n']} problems.{trend.decides_not and ' ' + trend.decides_not}"
    )


def _describe_change(change: Estimate) -> str:
    mean, interval, p = change["mean"], change["ci95"], change.get("p")
    details = [] if interval is None else [f"95 % interval {signed(interval[0])} to {signed(interval[1])}"]
    if p is not None and p >= LEVEL:
        details.append(f"p = {p:.2f}")
    suffix = f" ({', '.join(details)})" if details else ""
    if interval is None:
        return f"changed by {signed(mean)}{suffix}, in too few lessons, or too equal ones, to tell it from chance"
    if p is None:
        return f"changed by {signed(mean)}{suffix}, which was not tested against chance: measure it again"
    if not is_clear(change):
        return f"did not change by more than chance: {signed(mean)}{suffix}"
    return f"{'rose' if mean > 0 else 'fell'} by {abs(mean):.3f}{suffix}"


def signed(value: float) -> str:
    """Format a change with its sign: +0.250, −0.184."""
    return f"{value:+.3f}".replace("-", "−")


def _movement_reason(movement: Optional[Movement]) -> str:
    if movement is None:
        return "How far the parameters moved is not known."
    if movement.relative_norm == 0:
        return "The parameters did not move at all: every one is what it was at the beginning."
    coverage = "" if movement.compared == movement.of else f" ({movement.compared:,} of {movement.of:,} compared)"
    return f"The parameters moved by {100 * movement.relative_norm:.3g} % of their norm{coverage}."


def _signal_reasons(evidence: LearningEvidence) -> list[str]:
    reasons, share = [], evidence.without_variance
    if share is not None:
        remark = ": little to learn from" if share > _HIGH_SHARE_WITHOUT_VARIANCE else ""
        reasons.append(f"{100 * share:.3g} % of the groups had equal rewards throughout{remark}.")
    if evidence.gradient_norm is not None:
        remark_on_norm = ": nothing was to be learned" if evidence.gradient_norm == 0 else ""
        reasons.append(f"The gradient's norm was {evidence.gradient_norm:.3g} in the median step{remark_on_norm}.")
    if evidence.judge_checks:
        warnings = (
            f"{evidence.judge_warnings} of {evidence.judge_checks} checks of the judge warned that it can be fooled"
        )
        doubt = ", so what its rewards show is in doubt: see judge_checks.jsonl" if evidence.judge_warnings else ""
        reasons.append(f"{warnings}{doubt}.")
    if evidence.judge_checks_failed:
        attempts = evidence.judge_checks_failed + evidence.judge_checks
        reasons.append(f"{evidence.judge_checks_failed} of {attempts} attempts to check the judge brought no score.")
    return reasons


# Where the evidence comes from -------------------------------------------------------------------------------------


def evidence_of(data: RunData, movement: Optional[Movement]) -> LearningEvidence:
    """Collect the evidence from a run folder."""
    before_selection = data.series("groups/without_variance")  # measured before groups are left out or replaced
    without_variance = [value for _, value in before_selection or data.series("frac_reward_zero_std")]
    gradient_norms = [value for _, value in data.series("grad_norm")]
    return LearningEvidence(
        steps=len(data.steps),
        movement=movement,
        without_variance=fmean(without_variance) if without_variance else None,
        gradient_norm=median(gradient_norms) if gradient_norms else None,
        held_out=data.reward_changes(),
        training=trend_of(read_rewards(data.folder), look_up(data.config, "dataset", "curriculum")),
        judge_checks=sum(map(has_score, data.judge_checks)),
        judge_warnings=sum(bool(check["warnings"]) for check in data.judge_checks),
        judge_checks_failed=sum(not has_score(check) for check in data.judge_checks),
    )


def trend_of(outcomes: Sequence[ConversationReward], curriculum: Optional[bool] = None) -> Optional[Trend]:
    """Compare the reward in the first quarter of a training's batches (at most ten) with that in as many last batches.
    None with fewer than two batches. Conversations without a verdict are left out.

    Args:
        curriculum: True if a curriculum chose the problems, False if their order was random, None if that is unknown.
            Then only problems that were played on both sides are compared, if there are enough, because other problems
            may be harder or easier.
    """
    rewarded = [outcome for outcome in outcomes if outcome.reward is not None]
    steps = sorted({outcome.step for outcome in rewarded})
    if len(steps) < 2:
        return None
    batches = max(1, min(_MAX_BATCHES, len(steps) // 4))
    first = _rewards_by_problem(rewarded, steps[:batches])
    last = _rewards_by_problem(rewarded, steps[-batches:])
    means = [fmean([reward for group in side.values() for reward in group]) for side in (first, last)]
    common = first.keys() & last.keys()
    if common == first.keys() == last.keys() or (curriculum is None and len(common) >= LEAST_LESSONS):
        return Trend(batches, *means, paired_change(first, last), _CHOSEN_BY_CURRICULUM if curriculum else "")
    return Trend(
        batches,
        *means,
        _difference_of_means(first, last),
        {True: _CHOSEN_BY_CURRICULUM, None: _DIFFERENT_PROBLEMS, False: ""}[curriculum],
    )


def _rewards_by_problem(outcomes: Sequence[ConversationReward], steps: Sequence[int]) -> dict[str, list[float]]:
    """Return problem id → the rewards of its conversations in these steps."""
    rewards: dict[str, list[float]] = {}
    for outcome in outcomes:
        if outcome.step in steps:
            rewards.setdefault(outcome.problem_id, []).append(outcome.reward)
    return rewards


def _difference_of_means(first: Mapping[str, Sequence[float]], last: Mapping[str, Sequence[float]]) -> Estimate:
    """Compute mean(last) − mean(first) of two sides whose problems differ, at least in part. The interval is that of a
    difference of two independent means (Zou and Donner, 2008). It is too wide if some problems are on both sides and
    have similar rewards there."""
    before, after = mean_with_ci(first), mean_with_ci(last)
    mean, interval = after["mean"] - before["mean"], None
    if before["ci95"] and after["ci95"]:
        lower_margin = math.hypot(after["mean"] - after["ci95"][0], before["ci95"][1] - before["mean"])
        upper_margin = math.hypot(after["ci95"][1] - after["mean"], before["mean"] - before["ci95"][0])
        interval = [mean - lower_margin, mean + upper_margin]
    return {"mean": mean, "ci95": interval, "n": len(first.keys() | last.keys()), "p": _permutation_p(first, last)}


def _permutation_p(first: Mapping[str, Sequence[float]], last: Mapping[str, Sequence[float]]) -> float:
    """Compute the two-sided p of a permutation test: the probability of a change of the problems' means at least as
    large if the problems had been assigned to the sides at random. A problem on both sides swaps its two means; the
    other problems are shuffled among each other."""
    paired_means = [(fmean(first[name]), fmean(last[name])) for name in first if name in last]
    pairs = np.array(paired_means, dtype=float).reshape(-1, 2)
    first_means, last_means = (
        [fmean(group) for name, group in side.items() if name not in other]
        for side, other in ((first, last), (last, first))
    )
    unpaired = np.array(first_means + last_means)
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    shuffled = generator.permuted(np.tile(unpaired, (RESAMPLES, 1)), axis=1)
    swaps = generator.integers(0, 2, size=(RESAMPLES, len(pairs)))

    def change(unpaired_means: np.ndarray, swapped: np.ndarray) -> np.ndarray:
        before = (
            unpaired_means[..., : len(first_means)].sum(axis=-1)
            + pairs[:, 0].sum()
            + swapped @ (pairs[:, 1] - pairs[:, 0])
        )
        after = (
            unpaired_means[..., len(first_means) :].sum(axis=-1)
            + pairs[:, 1].sum()
            + swapped @ (pairs[:, 0] - pairs[:, 1])
        )
        return after / len(last) - before / len(first)

    observed = abs(float(change(unpaired, np.zeros(len(pairs)))))
    # the tolerance counts equal changes that differ by a rounding error; + 1 counts the observed assignment itself
    hits = int(np.sum(np.abs(change(shuffled, swaps)) >= observed - 1e-9))
    return (hits + 1) / (RESAMPLES + 1)


# learning.json ---------------------------------------------------------------------------------------------------


def learning_of(data: RunData, movement: Optional[Movement] = None) -> tuple[Learning, LearningEvidence]:
    """Return the conclusion about a run folder, and its evidence. Without `movement`, how far the parameters moved is
    what the trainer wrote to `learning.json`."""
    if movement is None:
        recorded = read_json(data.folder / LEARNING_NAME).get("figures", {}).get("movement")
        movement = Movement(**recorded) if recorded else None
    evidence = evidence_of(data, movement)
    return conclude(evidence), evidence


def write_learning(run_folder: Path, movement: Optional[Movement] = None) -> Learning:
    """Write `learning.json` from the measurements so far, and return the conclusion. Raises `DataError` if the run was
    not trained."""
    learning, evidence = learning_of(load_run(Path(run_folder)), movement)
    content: dict[str, Any] = {**asdict(learning), "figures": asdict(evidence)}
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(Path(run_folder) / LEARNING_NAME, text)
    return learning


def describe_learning(learning: Learning) -> str:
    """Format the conclusion and its reasons for the terminal."""
    where = " in training" if learning.in_training else ""
    conclusion = f"Did the tutor learn? {learning.verdict.capitalize()}{where}."
    return "\n".join([conclusion, *(f"  {reason}" for reason in learning.reasons)])
