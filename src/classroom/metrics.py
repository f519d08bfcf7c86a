"""Metrics of a batch of conversations, for the training's log."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from src.classroom.record import ConversationRecord
from src.classroom.verdicts import CRITERIA
from src.rollout.tools import ERRORS


def batch_metrics(records: Sequence[ConversationRecord]) -> dict[str, float]:
    """Means over the conversations of a batch: messages, rejections, refusals, the judge's scores by criterion, and
    the calls of tools."""
    metrics = {
        "conversation/messages": fmean(len(record.turns) for record in records),
        "conversation/rejected_share": fmean(record.rejected for record in records),
        "judge/refused_share": fmean(record.refused for record in records),
    }
    scores = [verdict.scores for record in records for verdict in record.verdicts if verdict.scores is not None]
    if scores:
        metrics |= {f"judge/{name}": fmean(getattr(each, name) for each in scores) for name in CRITERIA}
    return metrics | tool_metrics(records)


def tool_metrics(records: Sequence[ConversationRecord]) -> dict[str, float]:
    """Calls of tools per conversation, those in rejected drafts included, the share that failed, by kind of error, and
    the seconds of a call; empty for a batch without calls."""
    messages = [message for record in records for turn in record.turns for message in (turn, *turn.drafts)]
    calls = [call for message in messages for call in message.tool_calls]
    if not calls:
        return {}
    failed = Counter(call.error for call in calls if call.error is not None)
    return {
        "tools/calls_per_conversation": len(calls) / len(records),
        "tools/error_share": failed.total() / len(calls),
        **{f"tools/error_share/{kind}": failed[kind] / len(calls) for kind in ERRORS},
        "tools/seconds_per_call": fmean(call.seconds for call in calls),
    }
