"""The effect of a supervisor on a tutor: figures of its reviews, and the tutor's reward with and without it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from classroom_rl.config.values import SAMPLED, SUPERVISED
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.results.evaluation_files import group_by_problem
from classroom_rl.results.statistics import differences, rewards_by_lesson
from classroom_rl.results.supervision_summary import reviewed_messages
from classroom_rl.rollout.intervals import Estimate, mean_with_ci
from classroom_rl.rollout.tokens import Turn

T = TypeVar("T")
DIFFERENCE = "supervised_minus_sampled"
"""The key of the difference in metrics.json."""


def supervision_figures(records: Sequence[ConversationRecord]) -> dict[str, Any]:
    """The entry `supervision` of a sampling in metrics.json; {} if nothing was reviewed.

    `valid`: the share of valid messages among those that the tutor wrote and that got a verdict, including rejected
    drafts. `retried`: the share of its turns that it wrote more than once. `replaced`: the share of its turns that the
    supervisor's correction replaced. `no_verdict`: the share of reviews without a verdict.
    """
    turns: dict[str, list[Turn]] = {
        lesson: [turn for record in group for turn in record.turns if turn.review is not None]
        for lesson, group in group_by_problem(records).items()
    }
    if not any(turns.values()):
        return {}
    verdicts = {
        lesson: [review.valid for turn in group for _, review in reviewed_messages(turn)]
        for lesson, group in turns.items()
    }
    valid = {lesson: [verdict for verdict in group if verdict is not None] for lesson, group in verdicts.items()}
    return {
        "valid": _share(valid, bool),
        "no_verdict": _share(verdicts, lambda verdict: verdict is None),
        # `drafts` of a replaced message include the last one, which alone is no retry
        "retried": _share(turns, lambda turn: len(turn.drafts) > int(turn.replaced)),
        "replaced": _share(turns, lambda turn: turn.replaced),
    }


def _share(values: Mapping[str, Sequence[T]], is_hit: Callable[[T], bool]) -> Estimate:
    return mean_with_ci({lesson: [float(is_hit(value)) for value in group] for lesson, group in values.items()})


def supervised_difference(by_sampling: Mapping[str, Sequence[ConversationRecord]]) -> dict[str, Any]:
    """The reward with the supervisor minus the one without it, paired by lesson: `{"reward": …}` with the fields of
    `classroom_rl.results.statistics.Difference`. {} unless both samplings were played."""
    if not {SAMPLED, SUPERVISED} <= set(by_sampling):
        return {}
    rewards = {name: rewards_by_lesson(by_sampling[name]) for name in (SAMPLED, SUPERVISED)}
    return {"reward": asdict(differences(rewards)[0])}
