"""Metrics of the tool calls in a batch, for the training's log."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from classroom_rl.rollout.tools.tool import ERRORS
from classroom_rl.rollout.trajectory import Trajectory


def tool_metrics(records: Sequence[Trajectory]) -> dict[str, float]:
    """Tool calls per conversation (rejected drafts included), the share that failed, in total and by kind of error, and
    the mean seconds of a call; empty for a batch without calls."""
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
