"""Metrics of maths conversations: solve rates before and after the dialogue, rejections by rule, pedagogical reward.

Pure functions. Estimates and intervals are those of `results/statistics.py`, bootstrapped over problems.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Optional

from classroom_rl.config.values import SCORING_RULES
from classroom_rl.environments.classroom.conversation import Solution
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.results.statistics import judgement_of, lacks_verdict
from classroom_rl.rollout.intervals import Estimate, mean_with_ci, share

SOLVED, SCORED = "solve_rate", "solution_score"
"""Keys of metrics.json for the grades of solutions: the share of right answers, or the mean score of a reward model."""


def summarise_maths(
    records: Sequence[ConversationRecord],
    initial: Optional[Mapping[str, Sequence[Solution]]],
    message_scores: Optional[Sequence[Sequence[float]]],
    by_answer: bool,
) -> dict[str, Any]:
    """Compute the part of metrics.json that only maths conversations have.

    Conversations without a verdict are used only for the pedagogical reward and the initial grades; `without_verdict`
    is their share. Conversations with a verdict but no solutions (rejected in hard mode) are left out of the final
    solve rate and of the gain; `without_solutions` is their share.

    Args:
        initial: the student's graded solutions before the dialogue, by problem id; None if there are none.
        message_scores: for each record the pedagogical reward of each teacher message; None if not measured.
        by_answer: True if grades are 1 or 0 (right or wrong), False if they are a reward model's scores.
    """
    judged = [record for record in records if not lacks_verdict(record)]
    without, _ = share(not record.solutions for record in judged)
    metrics: dict[str, Any] = {
        SOLVED if by_answer else SCORED: solving(records, initial),
        "without_solutions": {"share": without, "n": len(judged)},
        **rejections(judged),
    }
    if message_scores is not None:
        metrics["pedagogical_reward"] = pedagogical_reward(records, message_scores)
    return metrics


def solving(
    records: Sequence[ConversationRecord], initial: Optional[Mapping[str, Sequence[Solution]]]
) -> dict[str, Estimate]:
    """Mean grades; n counts conversations.

    `final`: after the dialogue. `initial`: before it, over all conversations whatever their outcome. `gain`: the
    difference of the two in each conversation. `initial` and `gain` cover the problems that have initial solutions.
    """
    solved = [record for record in records if record.solutions and not lacks_verdict(record)]
    estimates = {"final": _estimate(solved, _final_grade)}
    if initial is not None:
        before = {problem: fmean(solution.grade for solution in solutions) for problem, solutions in initial.items()}
        known, gained = ([record for record in group if record.problem_id in before] for group in (records, solved))
        estimates["initial"] = _estimate(known, lambda record: before[record.problem_id])
        estimates["gain"] = _estimate(gained, lambda record: _final_grade(record) - before[record.problem_id])
    return estimates


def rejections(records: Sequence[ConversationRecord]) -> dict[str, dict[str, Estimate]]:
    """For each rule that accepts or rejects: `rejected_by` is the share of conversations that at least one of its
    attempts rejected, `rejecting_attempts` the mean share of its valid attempts that rejected."""
    judged = [record for record in records if record.verdicts]
    names = dict.fromkeys(verdict.rule for record in judged for verdict in record.verdicts)
    rules = [name for name in names if name not in SCORING_RULES]
    return {
        "rejected_by": {rule: _estimate(judged, lambda record, rule=rule: _rejects(record, rule)) for rule in rules},
        "rejecting_attempts": {
            rule: _estimate(judged, lambda record, rule=rule: _rejecting_share(record, rule)) for rule in rules
        },
    }


def pedagogical_reward(
    records: Sequence[ConversationRecord], message_scores: Sequence[Sequence[float]]
) -> dict[str, Estimate]:
    """`micro`: the mean over all teacher messages; n counts messages. `macro`: the mean over conversations of each
    conversation's mean; n counts conversations. Conversations without a teacher message are left out of both."""
    micro: dict[str, list[float]] = {}
    macro: dict[str, list[float]] = {}
    for record, scores in zip(records, message_scores, strict=True):
        if scores:
            micro.setdefault(record.problem_id, []).extend(scores)
            macro.setdefault(record.problem_id, []).append(fmean(scores))
    return {"micro": mean_with_ci(micro), "macro": mean_with_ci(macro)}


def _estimate(records: Sequence[ConversationRecord], measure: Callable[[ConversationRecord], float]) -> Estimate:
    values: dict[str, list[float]] = {}
    for record in records:
        values.setdefault(record.problem_id, []).append(float(measure(record)))
    return mean_with_ci(values)


def _final_grade(record: ConversationRecord) -> float:
    return fmean(solution.grade for solution in record.solutions)


def _rejects(record: ConversationRecord, rule: str) -> bool:
    return rule in judgement_of(record).rejecting_rules


def _rejecting_share(record: ConversationRecord, rule: str) -> float:
    return fmean(verdict.accepted is False for verdict in record.verdicts if verdict.rule == rule and verdict.valid)
