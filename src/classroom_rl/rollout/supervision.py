"""Supervision of the policy's messages: which episodes are supervised, what a review leads to, and which tokens of a
reviewed message enter the policy's context or become auxiliary samples. Pure functions: no model, no tokenizer, no
I/O."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import Draft, Review
from classroom_rl.rollout.text import left_out_when_empty
from classroom_rl.rollout.tokens import AuxSample, Turn

OnInvalid = Literal["observe", "retry", "replace"]
OBSERVE, RETRY, REPLACE = ON_INVALID = get_args(OnInvalid)
"""What an invalid message may lead to."""
ACCEPT = "accept"
THE_TURN = -1
"""The index of the message itself, among the drafts of a turn."""


class SupervisionOptions(Protocol):
    """How an environment is supervised (`classroom_rl.config.base.SupervisionConfig`).

    Attributes:
        on_invalid: what an invalid message leads to: one of `ON_INVALID`.
        max_retries: how often a message may be written again.
        share: the share of problems whose episodes are supervised.
        anneal_steps: the number of training steps over which the share falls to 0; 0 for a constant share.
    """

    on_invalid: str
    max_retries: int
    share: float
    anneal_steps: int


@left_out_when_empty("mask", "prompt_ids")
@dataclass(frozen=True)
class SampledDraft:
    """A message that the policy sampled and that has not entered the episode yet.

    Attributes:
        turn: the message.
        ids, logprobs: its tokens, all of them sampled except the results of tools.
        given: the tokens that the program adds after them.
        hint_ids: tokens between the episode's context and the message: a critique of an earlier draft.
        review: the supervisor's review; None before it.
        mask, prompt_ids: as in `AuxSample`.
    """

    turn: Turn
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    given: tuple[int, ...] = ()
    hint_ids: tuple[int, ...] = ()
    review: Review | None = None
    mask: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()

    @property
    def rejected(self) -> Draft:
        """The draft as it is stored with the turn, for people to read."""
        return Draft(self.turn.text, self.turn.tokens, self.review, self.turn.tool_calls)


@dataclass(frozen=True)
class ReviewedMessage:
    """A message as it enters the episode.

    Attributes:
        turn: the message; its `span` is set when its tokens are appended.
        ids: all tokens that it adds to the policy's context; the first `len(logprobs)` of them count as sampled.
        branches: its auxiliary samples: tokens outside of the context that are trained on.
        in_context: whether the policy sampled it in the episode's own context.
        mask: as in `AuxSample`, for the tokens that count as sampled.
    """

    turn: Turn
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    branches: tuple[AuxSample, ...] = ()
    in_context: bool = True
    mask: tuple[int, ...] = ()


def is_supervised(supervision: SupervisionOptions, problem: Problem, seed: int, step: int) -> bool:
    """Whether the episodes of a problem are supervised in this step. Drawn once for the whole group, so that only the
    policy makes its episodes differ. The share falls linearly to 0 over `anneal_steps`."""
    share = supervision.share
    if supervision.anneal_steps > 0:
        share *= max(0.0, 1 - step / supervision.anneal_steps)
    return random.Random(f"{seed}|{problem.id}|{step}|supervisor").random() < share


def decide(review: Review, supervision: SupervisionOptions, drafts: int) -> str:
    """What a review leads to: `accept`, `retry` or `replace`. Without a verdict, a message is accepted. `drafts` is the
    number of drafts of this message so far, including the reviewed one."""
    if review.valid is not False:
        return ACCEPT
    if supervision.on_invalid == RETRY and drafts <= supervision.max_retries:
        return RETRY
    if supervision.on_invalid == REPLACE and review.correction is not None:
        return REPLACE
    return ACCEPT


def unreviewed(draft: SampledDraft, position: tuple[int, int]) -> ReviewedMessage:
    """A message as it enters an episode without supervision; `position` as for `settle`."""
    message = settle([draft], Review(), False, position, lambda *_: None)
    return replace(message, turn=replace(message.turn, review=None))


def settle(
    drafts: Sequence[SampledDraft],
    review: Review,
    replaced: bool,
    position: tuple[int, int],
    encode: Callable[[SampledDraft, str], tuple[tuple[int, ...], tuple[int, ...]] | None],
) -> ReviewedMessage:
    """The message that enters the episode after a review.

    Args:
        drafts: all drafts of the message, in order; the review is that of the last one.
        replaced: whether the correction replaces the last draft.
        position: the index of the message among the turns, and the number of completion tokens before it.
        encode: (draft, correction) → the correction's hint ids and target ids; None if it cannot be a target.
    """
    turn_index, start = position
    *earlier, last = [*drafts[:-1], replace(drafts[-1], review=review)]

    def sampled(kind: str, draft: SampledDraft, index: int) -> AuxSample:
        tokens = (draft.ids, draft.logprobs, draft.hint_ids)
        return AuxSample(kind, turn_index, start, *tokens, draft.review.penalty, index, draft.mask, draft.prompt_ids)

    rejected = [*earlier, last] if replaced else earlier
    aux_samples = [sampled("draft", draft, index) for index, draft in enumerate(rejected) if draft.ids]
    targets: dict[tuple, AuxSample] = {}  # by their tokens, so that equal corrections of two drafts count once
    for index, draft in [*enumerate(rejected), *([] if replaced else [(THE_TURN, last)])]:
        encoded = encode(draft, draft.review.correction) if draft.review.correction is not None else None
        if encoded is not None:
            hint, target = encoded
            target_sample = AuxSample(
                "correction", turn_index, start, target, (), hint, None, index, prompt_ids=draft.prompt_ids
            )
            targets.setdefault(encoded, target_sample)
    turn = replace(last.turn, review=review, drafts=tuple(draft.rejected for draft in rejected))
    if replaced:
        hint, target = encode(last, review.correction) or ((), ())
        turn = replace(turn, text=review.correction, tokens=0, ended=True, replaced=True, tool_calls=())
        return ReviewedMessage(turn, (*hint, *target), (), (*aux_samples, *targets.values()), in_context=False)
    # Sampled in another context, the message enters the episode's context without a policy gradient (no log-probs), and
    # is trained on in an auxiliary sample, behind the context that it was sampled in.
    in_context = not (last.hint_ids or last.prompt_ids)
    if not in_context and last.ids:
        aux_samples.append(sampled("policy", last, THE_TURN))
    logprobs, mask = (last.logprobs, last.mask) if in_context else ((), ())
    aux_samples += targets.values()
    return ReviewedMessage(turn, (*last.ids, *last.given), logprobs, tuple(aux_samples), in_context, mask)
