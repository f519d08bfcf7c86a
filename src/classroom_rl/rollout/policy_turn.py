"""One message of the policy, in every environment and in the library: it is sampled with its tool calls, added to the
episode's context, and replayed from the journal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from classroom_rl.rollout.chat_template import Message, encode_chat
from classroom_rl.rollout.engine import Sampling, TokenEngine
from classroom_rl.rollout.environment import POLICY_ROLE, Play
from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.runner import check_answer
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.rollout.supervision import ReviewedMessage, SampledDraft
from classroom_rl.rollout.tokens import TokenBuffer, Turn, add_tokens, after_event
from classroom_rl.rollout.tools.formats import ToolFrame
from classroom_rl.rollout.tools.tool import Toolbox
from classroom_rl.rollout.tools.turn import SampledMessage, chat_with_tools, sample_with_tools, without_tools

_TURN, _DRAFT, _REVIEW = TypeAdapter(Turn), TypeAdapter(SampledDraft), TypeAdapter(Review)


class PolicyModel:
    """A model with the tools that it may call.

    Args:
        engine: a `TokenEngine` with `tokenizer` and `frame`, or a `ChatEngine`.
        toolbox: None for no tools; prompts are then encoded as usual.

    Raises:
        ValueError: if the engine's chat template cannot present the tools, as `ToolFrame` does.
    """

    def __init__(self, engine: Any, toolbox: Toolbox | None = None):
        self.engine = engine
        self._toolbox = toolbox
        self._frame: ToolFrame | None = None
        if toolbox is not None and has_tokens(engine):
            self._frame = ToolFrame(engine.tokenizer, engine.frame, toolbox.schemas())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a prompt, with the tools."""
        if self._frame is None:
            return encode_chat(self.engine.tokenizer, messages)
        return self._frame.encode_chat(messages)

    async def sample(
        self, context_ids: Sequence[int], sampling: Sampling, room: int, opened: str = ""
    ) -> SampledMessage:
        """The next message of a model that works on token ids; raises the engine's errors.

        Args:
            room: how many tokens it may add to the context, results of tools included.
            opened: an opening `<think>` at the end of the context that belongs to the message.
        """
        if self._toolbox is None:
            message = without_tools(await self.engine.generate(context_ids, sampling))
            return replace(message, text=opened + message.text) if opened else message
        return await sample_with_tools(self.engine, self._frame, context_ids, sampling, self._toolbox, room, opened)

    async def chat(self, messages: Sequence[Message], sampling: Sampling, prompt_first: bool = False) -> SampledMessage:
        """The next message of a model that works on text; raises the engine's errors. `prompt_first` as in
        `chat_with_tools`."""
        if self._toolbox is None:
            return without_tools(await self.engine.chat(messages, sampling))
        return await chat_with_tools(self.engine, messages, sampling, self._toolbox, prompt_first)


def has_tokens(engine: Any) -> bool:
    """Whether an engine works on token ids: it has `generate`, `tokenizer` and `frame`."""
    return isinstance(engine, TokenEngine) and hasattr(engine, "tokenizer") and hasattr(engine, "frame")


def policy_sampling(play: Play[Any, Any], sampling: Sampling, max_tokens: int) -> Sampling:
    """The sampling of the policy's next message: with its own draw and seed, at temperature 0 if the request asks for
    it."""
    sampling = replace(play.sampled_with(sampling), max_tokens=max_tokens)
    return replace(sampling, temperature=0.0) if play.request.greedy else sampling


async def sample_draft(
    play: Play[Any, Any],
    model: PolicyModel,
    context_ids: Sequence[int],
    sampling: Sampling,
    room: int,
    *,
    hint_ids: Sequence[int] = (),
    prompt_ids: tuple[int, ...] = (),
    opened: str = "",
) -> SampledDraft:
    """The policy's next message, which has not entered the episode yet. A message without its end token gets it as a
    given token.

    Args:
        sampling: how all of the policy's messages are sampled; its `max_tokens` is the limit of each.
        room: how many tokens still fit into the context, without the reserved one for an end token.
        hint_ids: tokens between the context and the message, such as a critique of an earlier draft.
        prompt_ids: the message's own prompt, as in `AuxSample`.
        opened: as in `PolicyModel.sample`.

    Raises:
        PolicyMismatch: if a part of it was sampled with other weights than those that its batch began with.
        ContextOverflow, EngineFailure: as the engine does.
    """
    sampling = policy_sampling(play, sampling, min(sampling.max_tokens, room))
    message = await model.sample([*context_ids, *hint_ids], sampling, room, opened)
    for answer in message.answers:
        check_answer(play, answer)
    end = model.engine.frame.turn_end_id
    given = () if message.ids[-1:] == (end,) else (end,)
    mask = () if all(message.mask) else message.mask  # an empty mask means that all tokens were sampled
    turn = policy_turn_of(message)
    return SampledDraft(turn, message.ids, message.logprobs, given, tuple(hint_ids), mask=mask, prompt_ids=prompt_ids)


def policy_turn_of(message: SampledMessage) -> Turn:
    """A message of the policy as a turn; its `span` is set when its tokens enter a context."""
    details = {"policy": message.policy, "tool_calls": message.calls}
    return Turn(POLICY_ROLE, message.text, None, message.sampled, message.ended, **details)


def add_policy_message(
    journal: Journal, episode: Any, message: ReviewedMessage, opening: Mapping[str, Any] | None = None
) -> Turn:
    """Write a message of the policy to the journal, and then add its tokens and auxiliary samples to the episode's
    context, if it has one. Returns the turn, with its span.

    Args:
        opening: further fields of the event; the event of the first message holds the prompt as `prompt_ids`.
    """
    turn, buffer = message.turn, episode.buffer
    if buffer is not None and message.in_context:
        start = len(buffer.completion_ids)
        turn = replace(turn, span=(start, start + len(message.logprobs)))
    extra = {name: value for name in ("branches", "mask") if (value := getattr(message, name))} | dict(opening or {})
    tokens = {"ids": message.ids, "logprobs": message.logprobs}
    journal.append("turn", conversation=episode.id, turn=turn, **tokens, **extra)
    if buffer is not None:
        buffer.branches += message.branches
        add_tokens(buffer, message.ids, message.logprobs, message.mask)
    return turn


def replay_event(episode: Any, event: Mapping[str, Any]) -> Turn | None:
    """Replay an event of the journal: a draft, a review, or a message that enters the policy's context. Returns the
    message, which the environment adds to the episode; None for all other events."""
    match event["event"]:
        case "draft":
            if "prompt_ids" in event and episode.buffer is None:
                episode.buffer = TokenBuffer(event["prompt_ids"])
            episode.add_draft(_DRAFT.validate_python(event["draft"]))
        case "review":
            episode.reject_draft(_REVIEW.validate_python(event["review"]))
        case "turn":
            episode.buffer = after_event(episode.buffer, event)
            return _TURN.validate_python(event["turn"])
    return None
