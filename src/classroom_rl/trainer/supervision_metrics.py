"""Metrics of a batch's reviews, for every environment with a supervisor."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from classroom_rl.config.base import default_penalties
from classroom_rl.config.values import SUPERVISOR_REWARD
from classroom_rl.results.supervision_summary import reviewed_messages
from classroom_rl.rollout.rows import message_numbers
from classroom_rl.rollout.trajectory import Trajectory


def supervision_metrics(records: Sequence[Trajectory]) -> dict[str, float]:
    """Shares of valid and unreviewed messages, of categories, retries and replacements, the mean process reward, and
    the messages per dialogue (penalties reward ending early: watch it); empty for a batch without reviews."""
    turns = [record.turns[place] for record in records for place in message_numbers(record)]
    reviews = [review for turn in turns for _, review in reviewed_messages(turn)]
    if not reviews:
        return {}
    known = [review for review in reviews if review.valid is not None]
    metrics = {
        "supervision/reviewed_share": len(known) / len(reviews),
        "supervision/no_verdict_share": 1 - len(known) / len(reviews),
        "supervision/messages_per_dialogue": len(turns) / len(records),
        "supervision/replaced_share": fmean(turn.replaced for turn in turns),
        "supervision/retried_share": fmean(bool(turn.drafts) and not turn.replaced for turn in turns),
        "supervision/corrections": sum(review.correction is not None for review in reviews) / len(records),
        "supervision/refused_corrections": fmean(review.refused_correction is not None for review in reviews),
    }
    if known:
        metrics["supervision/valid_share"] = fmean(review.valid for review in known)
        named = Counter(review.category for review in known if not review.valid)
        for category in dict.fromkeys([*default_penalties(), *named]):
            metrics[f"supervision/category/{category}"] = named[category] / len(known)
    means = [fmean(values) for record in records if (values := _penalties(record))]
    if means:
        metrics["supervision/process_reward"] = fmean(means)
    return metrics


def _penalties(record: Trajectory) -> list[float]:
    return [value for value in record.turn_rewards.get(SUPERVISOR_REWARD, []) if value is not None]
