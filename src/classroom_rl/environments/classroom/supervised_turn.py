"""The supervisor's part in a teacher turn: reviews, the hint before a retry, and the tokens of corrections."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from classroom_rl.config.base import SupervisionConfig
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.rollout.chat_template import Message, ReplyFrame, encode_further_text
from classroom_rl.rollout.reviews import MessageToReview, Review, reviewed
from classroom_rl.rollout.supervision import REPLACE, RETRY, ReviewedMessage, SampledDraft, decide, settle
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import approximate_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Target = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens before a correction (context), and the tokens of the correction (the training target)."""
_END_OF_THOUGHT = "</think>"


class SupervisedTurn:
    """Reviews the last draft of a conversation, and decides what becomes of it.

    Args:
        forced_ids: the tokens that begin every message of the teacher and are not sampled.
    """

    def __init__(self, supervision: SupervisionConfig, roles: Roles, forced_ids: Sequence[int]):
        self._supervision = supervision
        self._roles = roles
        self._forced_ids = tuple(forced_ids)

    async def review(self, conversation: Conversation) -> Review:
        """The review of the last draft, with its penalty.

        Raises:
            EngineFailure, ProviderFailure, StorageError: as `reviewed`.
        """
        draft = conversation.drafts[-1]
        message = MessageToReview(
            conversation.transcript(),
            visible_text(draft.turn.text),
            conversation.problem.text,
            conversation.problem.answer,
            conversation.facts,
            cut=not draft.turn.ended,
        )
        return await reviewed(self._roles.supervisor, message, self._supervision.penalties)

    def settle(self, conversation: Conversation, review: Review) -> ReviewedMessage | None:
        """The message that enters the conversation after the review of the last draft; None if the teacher has to
        retry."""
        decision = decide(review, self._supervision, len(conversation.drafts))
        if decision == RETRY and self._has_room_to_retry(conversation, review):
            return None
        buffer = conversation.buffer
        position = (len(conversation.turns), len(buffer.completion_ids) if buffer is not None else 0)
        target_of = partial(self._target_of, conversation)
        # A correction whose tokens do not fit into the context cannot replace the message: the draft is kept.
        replaced = decision == REPLACE and (
            buffer is None or target_of(conversation.drafts[-1], review.correction) is not None
        )
        return settle(conversation.drafts, review, replaced, position, target_of)

    # Retries -----------------------------------------------------------------------------------------------------

    def hint_ids(self, conversation: Conversation) -> tuple[int, ...]:
        """The tokens that follow the conversation's context in a retry: the rejected draft and its critique.

        Empty for a first draft, and unless `show_critique` is set.
        """
        if not conversation.drafts or not self._supervision.show_critique:
            return ()
        return retry_hint(conversation.drafts[-1], self._roles.teacher.frame, self._forced_ids)

    def hint_messages(self, conversation: Conversation) -> list[Message]:
        """The hint for a teacher that works on text: the rejected drafts, each with its critique. Empty as above."""
        if not self._supervision.show_critique:
            return []
        return _hint_messages(conversation.drafts)

    def _has_room_to_retry(self, conversation: Conversation, review: Review) -> bool:
        if not self._supervision.show_critique:
            return True
        *earlier, last = conversation.drafts
        last = replace(last, review=review)
        if conversation.buffer is None:
            hint_tokens = sum(approximate_tokens(message["content"]) for message in _hint_messages([*earlier, last]))
        else:
            hint_tokens = len(retry_hint(last, self._roles.teacher.frame, self._forced_ids))
        return conversation.turn_limit_after(hint_tokens) >= 1

    # Corrections -------------------------------------------------------------------------------------------------

    def _target_of(self, conversation: Conversation, draft: SampledDraft, correction: str) -> Target | None:
        """The target of a correction; None if the teacher works on text, or if the target does not fit into its
        context."""
        if conversation.buffer is None:
            return None
        frame, tokenizer = self._roles.teacher.frame, self._roles.teacher.tokenizer
        target = target_of(draft, correction, tokenizer, frame.turn_end_id)
        if target is None or sum(map(len, target)) > conversation.tokens_left:
            return None
        return target


def retry_hint(draft: SampledDraft, frame: ReplyFrame, forced_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens that follow the conversation's context when the teacher retries: the rejected draft, its critique as a
    user message, and the beginning of the new message."""
    return (*draft.hint_ids, *draft.ids, *draft.given, *frame.reply(_retry_request(draft)), *forced_ids)


def _hint_messages(drafts: Sequence[SampledDraft]) -> list[Message]:
    """Rejected drafts and their critiques as messages."""
    pairs = ((("assistant", draft.turn.text), ("user", _retry_request(draft))) for draft in drafts)
    return [{"role": role, "content": content} for pair in pairs for role, content in pair]


def _retry_request(draft: SampledDraft) -> str:
    """The message that tells the teacher to rewrite a rejected draft, with its critique if there is one."""
    return " ".join(part for part in ("(This message was not sent.", draft.review.critique, "Write it again.)") if part)


def target_of(draft: SampledDraft, correction: str, tokenizer: "PreTrainedTokenizerBase", end_id: int) -> Target | None:
    """The tokens before a correction, and the tokens of the correction with the end of the message.

    Thoughts at the beginning of a message stay as context, and so do tool calls with their results: the correction
    replaces only the visible text.

    Returns None for a message whose only thought never ended: it has no visible text to correct.
    """
    call_ids, rest = _split_silent_calls(draft)
    thoughts: tuple[int, ...] = ()
    if "<think>" in rest.turn.text:
        if _END_OF_THOUGHT not in rest.turn.text:
            return None
        thoughts = _first_thoughts(rest, tokenizer)
    return (*call_ids, *thoughts), (*encode_further_text(tokenizer, correction), end_id)


def _split_silent_calls(draft: SampledDraft) -> tuple[tuple[int, ...], SampledDraft]:
    """Split a draft after the last tool result that precedes its first visible word.

    Returns the tokens before the split, and the rest of the draft. Only the rest is corrected: the teacher wrote it
    when it knew the result.
    """
    # In the mask, sampled tokens are 1 and tool results 0. Each run of zeros is the result of one segment's calls.
    runs = [(is_sampled, len(list(run))) for is_sampled, run in groupby(draft.mask)]
    run_ends = list(accumulate(length for _, length in runs))
    result_ends = [end for (is_sampled, _), end in zip(runs, run_ends, strict=True) if not is_sampled]
    split_token = split_char = 0
    for segment, result_end in enumerate(result_ends):
        call_at = max((call.at for call in draft.turn.tool_calls if call.segment == segment), default=0)
        if visible_text(draft.turn.text[:call_at]):
            break
        split_token, split_char = result_end, call_at
    turn = replace(draft.turn, text=draft.turn.text[split_char:])
    return draft.ids[:split_token], replace(draft, turn=turn, ids=draft.ids[split_token:])


def _first_thoughts(draft: SampledDraft, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The tokens of the closed thoughts before the first visible word, with the white space after them."""
    pieces = draft.turn.text.split(_END_OF_THOUGHT)
    prefixes = (_END_OF_THOUGHT.join(pieces[:count]) + _END_OF_THOUGHT for count in range(1, len(pieces)))
    thoughts = 0
    for prefix in prefixes:
        if visible_text(prefix):
            break
        thoughts += 1
    if not thoughts:
        return ()

    def after_thoughts(end: int) -> list[str]:
        """The pieces of text after the last of these thoughts in the first `end` tokens; empty if it is still open."""
        return tokenizer.decode(draft.ids[:end], skip_special_tokens=False).split(_END_OF_THOUGHT)[thoughts:]

    # Once the last thought is closed it stays closed, so the first such prefix can be found by bisection.
    end = bisect_left(range(len(draft.ids)), True, key=lambda end: bool(after_thoughts(end)))
    while end < len(draft.ids) and not "".join(after_thoughts(end + 1)).strip():
        end += 1
    return tuple(draft.ids[:end])
