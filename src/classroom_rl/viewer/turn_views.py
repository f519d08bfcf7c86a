"""A conversation's messages as the page shows them, with their drafts and reviews."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from classroom_rl.errors import JudgeOutputError
from classroom_rl.judges.json_answer import find_object
from classroom_rl.viewer.schemas import DraftView, ReviewView, ToolCallView, TurnView
from classroom_rl.viewer.text_spans import split_thoughts


def turn_view(turn: Mapping[str, Any], mask: Sequence[int] = (), score: float | None = None) -> TurnView:
    """A message from its plain data.

    Args:
        mask: the mask of the conversation's tokens; empty if none are stored.
        score: the score of the pedagogical reward model.
    """
    span, policy, review = turn.get("span"), turn.get("policy"), turn.get("review")
    trained = 0 if mask else None
    if span and mask:
        trained = sum(mask[span[0] : span[1]])
    return TurnView(
        role=turn["role"],
        parts=split_thoughts(turn["text"]),
        persona=turn["persona"],
        tokens=turn["tokens"],
        trained=trained,
        ended=turn["ended"],
        given=turn.get("given", False),
        policy=f"{policy['run_id'] or 'initial weights'} v{policy['version']}" if policy else None,
        score=score,
        review=review_view(review) if review is not None else None,
        drafts=[_draft_view(draft) for draft in turn.get("drafts") or ()],
        replaced=turn.get("replaced", False),
        tool_calls=_call_views(turn),
    )


def _draft_view(draft: Mapping[str, Any]) -> DraftView:
    return DraftView(
        parts=split_thoughts(draft["text"]),
        tokens=draft.get("tokens", 0),
        review=review_view(draft["review"]),
        tool_calls=_call_views(draft),
    )


def _call_views(message: Mapping[str, Any]) -> list[ToolCallView]:
    """The tools that were called for a message or a draft."""
    return [
        ToolCallView(
            name=call["name"],
            arguments=json.dumps(call["arguments"], ensure_ascii=False) if call["name"] else call["raw"],
            result=call["result"],
            error=call.get("error"),
            seconds=call.get("seconds", 0.0),
        )
        for call in message.get("tool_calls") or ()
    ]


def review_view(review: Mapping[str, Any]) -> ReviewView:
    """A review from its plain data."""
    refused = review.get("refused_correction")
    return ReviewView(
        valid=review.get("valid"),
        category=review.get("category", ""),
        penalty=review.get("penalty"),
        critique=review.get("critique", ""),
        correction=review.get("correction"),
        refused_correction=refused,
        refused_text=_correction_in(review.get("raw", "")) if refused is not None else None,
        source=review.get("source", ""),
        error=review.get("error"),
        raw=review.get("raw", ""),
    )


def _correction_in(answer: str) -> str | None:
    """The correction in a supervisor's whole answer; None if it shows none."""
    try:
        found = find_object(answer).get("correction") if answer else None
    except JudgeOutputError:
        return None
    return found if isinstance(found, str) and found.strip() else None
