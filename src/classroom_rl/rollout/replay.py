"""Restores the policy's tokens from the journal."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from pydantic import TypeAdapter

from classroom_rl.rollout.tokens import Branch, TokenBuffer

_BRANCHES = TypeAdapter(list[Branch])


def replay_tokens(events: Iterable[dict[str, Any]]) -> TokenBuffer | None:
    """The policy's context after an episode's events; None if the policy never had one."""
    buffer = None
    for event in events:
        if event["event"] == "failure" and event["prompt_ids"]:
            buffer = TokenBuffer(event["prompt_ids"])
            buffer.append_given(event["end_ids"])
        if event["event"] == "turn":
            if "prompt_ids" in event:
                buffer = TokenBuffer(event["prompt_ids"])
            if buffer is not None:
                add_turn(buffer, event)
    return buffer


def add_turn(buffer: TokenBuffer, event: dict[str, Any]) -> None:
    """Append the tokens of a `turn` event, and what branches off before it."""
    buffer.branches += _BRANCHES.validate_python(event.get("branches", []))
    add_tokens(buffer, event["ids"], event["logprobs"], event.get("mask", ()))


def add_tokens(buffer: TokenBuffer, ids: Sequence[int], logprobs: Sequence[float], mask: Sequence[int] = ()) -> None:
    """Append a turn's tokens: the first `len(logprobs)` ids as sampled, save where `mask` is 0, and the others as
    given.

    Args:
        mask: one entry per log-prob; () if all of these tokens were sampled.
    """
    start = 0
    for sampled, run in groupby(mask or [1] * len(logprobs)):
        end = start + len(list(run))
        if sampled:
            buffer.append_sampled(ids[start:end], logprobs[start:end])
        else:
            buffer.append_given(ids[start:end])
        start = end
    buffer.append_given(ids[start:])
