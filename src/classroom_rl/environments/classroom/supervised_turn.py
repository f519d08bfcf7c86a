"""The supervisor's part in a turn of the teacher: its review, what a teacher is shown that has to write its message
again, and the tokens of corrections."""

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
"""The tokens before a correction, and the correction's own."""
_END_OF_THOUGHT = "</think>"


class SupervisedTurn:
    """What the supervisor does with the last draft of a conversation.

    Args:
        forced_ids: the tokens that every message of the teacher begins with, which it does not sample.
    """

    def __init__(self, supervision: SupervisionConfig, roles: Roles, forced_ids: Sequence[int]):
        self._supervision = supervision
        self._roles = roles
        self._forced_ids = tuple(forced_ids)

    async def review(self, conversation: Conversation) -> Review:
        """The priced review of the last draft.

        Raises:
            EngineFailure, ProviderFailure, StorageError: as `reviewed`.
        """
        draft = conversation.drafts[-1]
        about = MessageToReview(
            conversation.transcript(),
            visible_text(draft.turn.text),
            conversation.problem.text,
            conversation.problem.answer,
            conversation.facts,
            cut=not draft.turn.ended,
        )
        return await reviewed(self._roles.supervisor, about, self._supervision.penalties)

    def settle(self, conversation: Conversation, review: Review) -> ReviewedMessage | None:
        """The message that enters the conversation after a review of its last draft; None if the teacher has to write
        it again."""
        decision = decide(review, self._supervision, len(conversation.drafts))
        if decision == RETRY and self._has_room_to_retry(conversation, review):
            return None
        buffer = conversation.buffer
        place = (len(conversation.turns), len(buffer.completion_ids) if buffer is not None else 0)
        target_of = partial(self._target_of, conversation)
        replaced = decision == REPLACE and (
            buffer is None or target_of(conversation.drafts[-1], review.correction) is not None
        )
        return settle(conversation.drafts, review, replaced, place, target_of)

    # Writing again -----------------------------------------------------------------------------------------------

    def hint_ids(self, conversation: Conversation) -> tuple[int, ...]:
        """What the teacher is shown after the conversation's context; nothing before its first draft is rejected, or
        unless `show_critique` is set."""
        if not conversation.drafts or not self._supervision.show_critique:
            return ()
        return retry_hint(conversation.drafts[-1], self._roles.teacher.frame, self._forced_ids)

    def hint_messages(self, conversation: Conversation) -> list[Message]:
        """The same for a teacher that works on text: the rejected drafts and what was said of each."""
        if not self._supervision.show_critique:
            return []
        return _hint_messages(conversation.drafts)

    def _has_room_to_retry(self, conversation: Conversation, review: Review) -> bool:
        if not self._supervision.show_critique:
            return True
        *earlier, last = conversation.drafts
        last = replace(last, review=review)
        if conversation.buffer is None:
            shown = sum(approximate_tokens(message["content"]) for message in _hint_messages([*earlier, last]))
        else:
            shown = len(retry_hint(last, self._roles.teacher.frame, self._forced_ids))
        return conversation.turn_limit_after(shown) >= 1

    # Corrections -------------------------------------------------------------------------------------------------

    def _target_of(self, conversation: Conversation, draft: SampledDraft, correction: str) -> Target | None:
        """The target of a correction; None for a teacher without tokens, and for one that does not fit into the
        teacher's context."""
        if conversation.buffer is None:
            return None
        frame, tokenizer = self._roles.teacher.frame, self._roles.teacher.tokenizer
        target = target_of(draft, correction, tokenizer, frame.turn_end_id)
        if target is None or sum(map(len, target)) > conversation.tokens_left:
            return None
        return target


def retry_hint(draft: SampledDraft, frame: ReplyFrame, forced_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens after the conversation's context with which the teacher writes a rejected message again: the draft,
    its critique as the other side's message, and the beginning of the new message."""
    return (*draft.hint_ids, *draft.ids, *draft.given, *frame.reply(_request(draft)), *forced_ids)


def _hint_messages(drafts: Sequence[SampledDraft]) -> list[Message]:
    """Rejected drafts and their critiques as messages."""
    shown = ((("assistant", draft.turn.text), ("user", _request(draft))) for draft in drafts)
    return [{"role": role, "content": content} for pair in shown for role, content in pair]


def _request(draft: SampledDraft) -> str:
    """What the teacher is told of a rejected draft."""
    return " ".join(part for part in ("(This message was not sent.", draft.review.critique, "Write it again.)") if part)


def target_of(draft: SampledDraft, correction: str, tokenizer: "PreTrainedTokenizerBase", end_id: int) -> Target | None:
    """The tokens before a correction, and the correction's own with the end of the message. The thoughts that a message
    begins with stay as context, and so do calls of tools with their results: the correction is of what was said.

    Returns None for a message whose only thought never ended: nothing was said that could be corrected.
    """
    known, rest = _silent_calls(draft)
    thoughts: tuple[int, ...] = ()
    if "<think>" in rest.turn.text:
        if _END_OF_THOUGHT not in rest.turn.text:
            return None
        thoughts = _first_thoughts(rest, tokenizer)
    return (*known, *thoughts), (*encode_further_text(tokenizer, correction), end_id)


def _silent_calls(draft: SampledDraft) -> tuple[tuple[int, ...], SampledDraft]:
    """The tokens up to the last result of a tool that came before the first word was said, and the draft after it: what
    is corrected is what was said with the result known."""
    stretches = [(bit, len(list(run))) for bit, run in groupby(draft.mask)]
    ends = list(accumulate(length for _, length in stretches))
    results = [end for (bit, _), end in zip(stretches, ends, strict=True) if not bit]
    end = at = 0
    for segment, after in enumerate(results):
        last = max((call.at for call in draft.turn.tool_calls if call.segment == segment), default=0)
        if visible_text(draft.turn.text[:last]):
            break
        end, at = after, last
    turn = replace(draft.turn, text=draft.turn.text[at:])
    return draft.ids[:end], replace(draft, turn=turn, ids=draft.ids[end:])


def _first_thoughts(draft: SampledDraft, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The tokens of the closed thoughts before the first word that was said, with the white space behind them."""
    pieces = draft.turn.text.split(_END_OF_THOUGHT)
    heads = (_END_OF_THOUGHT.join(pieces[:count]) + _END_OF_THOUGHT for count in range(1, len(pieces)))
    silent = 0
    for head in heads:
        if visible_text(head):
            break
        silent += 1
    if not silent:
        return ()

    def behind(end: int) -> list[str]:
        return tokenizer.decode(draft.ids[:end], skip_special_tokens=False).split(_END_OF_THOUGHT)[silent:]

    end = bisect_left(range(len(draft.ids)), True, key=lambda end: bool(behind(end)))
    while end < len(draft.ids) and not "".join(behind(end + 1)).strip():
        end += 1
    return tuple(draft.ids[:end])
