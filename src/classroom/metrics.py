"""Metrics of a batch of conversations, for the training's log."""

from collections.abc import Sequence
from statistics import fmean

from src.classroom.record import ConversationRecord
from src.classroom.verdicts import CRITERIA


def batch_metrics(records: Sequence[ConversationRecord]) -> dict[str, float]:
    """Means over the conversations of a batch: messages, rejections, refusals, and the judge's scores by criterion."""
    metrics = {
        "conversation/messages": fmean(len(record.turns) for record in records),
        "conversation/rejected_share": fmean(record.rejected for record in records),
        "judge/refused_share": fmean(record.refused for record in records),
    }
    scores = [verdict.scores for record in records for verdict in record.verdicts if verdict.scores is not None]
    if scores:
        metrics |= {f"judge/{name}": fmean(getattr(each, name) for each in scores) for name in CRITERIA}
    return metrics
