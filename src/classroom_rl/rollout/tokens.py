"""Tokens of a conversation: token in, token out.

`TokenBuffer` is the only way tokens enter the policy's context. Sampled tokens are appended exactly as the engine
sampled them. Tokens that the program adds (the student's message, the chat template's markup around it, an end token
that the policy did not write) are appended as given. A transcript is never tokenized again.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic import TypeAdapter

from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.reviews import Draft, Review
from classroom_rl.rollout.text import left_out_when_empty
from classroom_rl.rollout.tools.tool import ToolCall

_BYTES_PER_TOKEN = 4


@left_out_when_empty("tool_calls")
@dataclass(frozen=True)
class Turn:
    """One message of a conversation.

    Attributes:
        role: "teacher" or "student".
        text: the message, with special tokens but without the end-of-turn token.
        persona: the student's persona drawn for this turn; None for the policy.
        tokens: the number of tokens that the model sampled for it, its end token included.
        ended: True if the model ended the turn itself, False if it was cut at its token limit.
        span: [start, end) of its tokens among the completion tokens of the policy's context. All of them were sampled
            except the results of tools. None for student turns.
        policy: the policy version that sampled it; None for student turns.
        given: True for a message from the policy's prompt template, which was not sampled.
        review: the supervisor's review of the message; None without a supervisor. For a replaced message, the review
            of the draft that it replaces.
        drafts: the policy's earlier drafts of the message, which the supervisor rejected, in order.
        replaced: True if the message is the supervisor's correction, which the policy did not sample.
        tool_calls: the policy's tool calls in the message, and their results; only the policy sees them.
    """

    role: str
    text: str
    persona: str | None = None
    tokens: int = 0
    ended: bool = True
    span: tuple[int, int] | None = None
    policy: PolicyVersion | None = None
    given: bool = False
    review: Review | None = None
    drafts: tuple[Draft, ...] = ()
    replaced: bool = False
    tool_calls: tuple[ToolCall, ...] = ()


@left_out_when_empty("mask", "prompt_ids")
@dataclass(frozen=True)
class AuxSample:
    """An auxiliary sample: tokens that are trained on in a sample of their own, since they branch off from the policy's
    context.

    Attributes:
        kind: `draft` (sampled and rejected), `policy` (sampled and accepted, but in another context than the
            conversation's, for example after a critique), or `correction` (a checked target that nobody sampled).
        turn: the index of its message among the conversation's messages.
        start: the number of the conversation's completion tokens before it; 0 if it has a prompt of its own.
        hint_ids: tokens between those and its own, such as a critique; they are not trained on.
        ids, logprobs: its tokens, and the engine's log-prob of each; a correction has no log-probs.
        reward: the process reward of the message; None without one.
        draft: the index of its message among the drafts of the turn; -1 for the message itself.
        mask: 0 for results of tools among its tokens, whose log-probs are 0.0, and 1 for all others; () if no tool was
            called.
        prompt_ids: its own prompt, in environments that write a new prompt for every message; () if it continues the
            conversation's prompt.
    """

    kind: str
    turn: int
    start: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    hint_ids: tuple[int, ...] = ()
    reward: float | None = None
    draft: int = -1
    mask: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()


def __getattr__(name: str) -> Any:
    if name != "Branch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Branch is called AuxSample now; the old name goes with version 0.3", FutureWarning, stacklevel=2)
    return AuxSample


def approximate_tokens(text: str) -> int:
    """An estimate of a text's token count, for models whose tokenizer is not available: a quarter of its UTF-8 bytes,
    rounded up. For most languages the real count differs by at most a third, for some by more."""
    return -(-len(text.encode()) // _BYTES_PER_TOKEN)


class TokenBuffer:
    """The policy's context as token ids: a prompt, then completion ids with a mask and log-probs of equal length.

    `mask` is 1 for tokens that the policy sampled and 0 for all others; `logprobs` are the engine's, 0.0 where the
    mask is 0. `branches` are the auxiliary samples, which branch off from this context.
    """

    def __init__(self, prompt_ids: Sequence[int]):
        self.prompt_ids = list(prompt_ids)
        self.branches: list[AuxSample] = []
        self.completion_ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def ids(self) -> list[int]:
        """All ids in order: the engine's next prompt."""
        return self.prompt_ids + self.completion_ids

    def append_sampled(self, ids: Sequence[int], logprobs: Sequence[float]) -> tuple[int, int]:
        """Append tokens that the policy sampled, with the engine's log-probs; return their completion span. Raises a
        `ValueError` if the two do not have the same length."""
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} sampled tokens came with {len(logprobs)} log-probs: each needs one")
        start = len(self.completion_ids)
        self._extend(ids, logprobs, 1)
        return start, len(self.completion_ids)

    def append_given(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample. They are context only, and never trained on."""
        self._extend(ids, [0.0] * len(ids), 0)

    def _extend(self, ids: Sequence[int], logprobs: Sequence[float], mask: int) -> None:
        self.completion_ids.extend(int(token_id) for token_id in ids)
        self.logprobs.extend(float(logprob) for logprob in logprobs)
        self.mask.extend([mask] * len(ids))


_AUX_SAMPLES = TypeAdapter(list[AuxSample])


def replay_tokens(events: Iterable[dict[str, Any]]) -> TokenBuffer | None:
    """Rebuild the policy's context from an episode's events; None if the policy never had one."""
    buffer = None
    for event in events:
        if event["event"] == "failure" and event["prompt_ids"]:  # it failed before the policy's first message
            buffer = TokenBuffer(event["prompt_ids"])
            buffer.append_given(event["end_ids"])
        if event["event"] == "turn":
            buffer = after_event(buffer, event)
    return buffer


def after_event(buffer: TokenBuffer | None, event: Mapping[str, Any]) -> TokenBuffer | None:
    """The policy's context after a `turn` event: opened if the event holds its prompt, with the event's tokens and
    auxiliary samples appended; None if it is not open yet."""
    if "prompt_ids" in event:
        buffer = TokenBuffer(event["prompt_ids"])
    if buffer is not None:
        buffer.branches += _AUX_SAMPLES.validate_python(event.get("branches", []))
        add_tokens(buffer, event["ids"], event["logprobs"], event.get("mask", ()))
    return buffer


def add_tokens(buffer: TokenBuffer, ids: Sequence[int], logprobs: Sequence[float], mask: Sequence[int] = ()) -> None:
    """Append a turn's tokens: the first `len(logprobs)` ids as sampled, except where `mask` is 0, and the others as
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
