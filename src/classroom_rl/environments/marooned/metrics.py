"""Metrics of a batch of games, for the training's log."""

from collections.abc import Sequence
from statistics import fmean

from classroom_rl.environments.marooned.episode import GameRecord
from classroom_rl.environments.marooned.messages import INVALID, REPAIRABLE, VALID
from classroom_rl.environments.marooned.things import COLONIST, DEAD, ESCAPED, TRAITOR


def batch_metrics(records: Sequence[GameRecord]) -> dict[str, float]:
    """Means over the games of a batch: outcomes, the ship, decisions, how they were written and whether they were
    possible, and the reward of each role."""
    decisions = [decision for record in records for decision in record.decisions]
    metrics = {
        "marooned/ship_progress": fmean(record.ship_progress for record in records),
        "marooned/escaped_share": fmean(record.outcome == ESCAPED for record in records),
        "marooned/dead_share": fmean(record.outcome == DEAD for record in records),
        "marooned/decisions": len(decisions) / len(records),
    }
    if decisions:
        metrics |= {f"marooned/{grade}_share": fmean(each.grade == grade for each in decisions) for grade in GRADES}
        metrics["marooned/possible_share"] = fmean(each.grade != INVALID and not each.fault for each in decisions)
    for role in (COLONIST, TRAITOR):
        rewards = [reward for record in records for own, reward in _rewards(record) if own == role]
        if rewards:
            metrics[f"marooned/reward_of_{role}"] = fmean(rewards)
    return metrics


def _rewards(record: GameRecord) -> list[tuple[str, float]]:
    """(role, reward) of the seat under training, or of all seats in self-play."""
    found = [(each.role, each.reward) for each in record.seats] or [(record.role, record.reward)]
    return [(role, reward) for role, reward in found if reward is not None]


GRADES = (VALID, REPAIRABLE, INVALID)
