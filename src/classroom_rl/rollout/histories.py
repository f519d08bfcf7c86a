"""What a model sees at each step of a rollout, as tokens or as messages, with or without its earlier thoughts."""

from collections.abc import Sequence

from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.policy_turn import PolicyModel, has_tokens
from classroom_rl.rollout.step import WITH_THINKING, Rollout, Step
from classroom_rl.rollout.tokens import TokenBuffer, add_tokens
from classroom_rl.rollout.tools.turn import SampledMessage

_UNLIMITED = 1_000_000


class History:
    """The history of one rollout. Each prompt is rendered anew from the messages, unless thoughts are kept and the
    engine has tokens: then one buffer of tokens only grows, and sampled tokens are never tokenized again.

    Attributes:
        opens_thought: whether the prompt ends with `<think>`.
    """

    def __init__(self, model: PolicyModel, rollout: Rollout):
        engine = model.engine
        self._model = model
        self._messages: list[Message] = list(rollout.opening)
        self._keeps_thoughts = rollout.settings.history == WITH_THINKING
        self._frame = engine.frame if has_tokens(engine) else None
        self._buffer: TokenBuffer | None = None
        self.opens_thought = bool(
            getattr(engine, "opens_thought", False) if self._frame is None else self._frame.opens_thought
        )

    def messages(self, prompt: str) -> tuple[Message, ...]:
        """What the model sees if this is the next prompt."""
        return *self._messages, {"role": "user", "content": prompt}

    def prompt_ids(self, prompt: str) -> list[int]:
        """The model's token ids up to and including the next prompt; empty for an engine without tokens. Must be called
        exactly once for each step."""
        if self._frame is None:
            return []
        if self._buffer is not None:
            self._buffer.append_given(self._frame.reply(prompt))
            return self._buffer.ids
        prompt_ids = self._model.encode_chat(self.messages(prompt))
        if self._keeps_thoughts:
            self._buffer = TokenBuffer(prompt_ids)
        return prompt_ids

    async def sample(self, prompt: str, prompt_ids: Sequence[int], sampling: Sampling) -> SampledMessage:
        """The model's next message, with its tool calls; raises the engine's errors."""
        if self._frame is None:
            return await self._model.chat(self.messages(prompt), sampling)
        limit = getattr(self._model.engine, "max_length", _UNLIMITED)
        room = max(1, limit - len(prompt_ids) - 1)  # one token is reserved for an end token that the model may omit
        return await self._model.sample(prompt_ids, sampling, room)

    def add(self, step: Step) -> None:
        """Add a finished step; to the buffer with its end token, if the model did not write one."""
        content = step.text if self._keeps_thoughts else step.content
        self._messages = [*step.messages, {"role": "assistant", "content": content}]
        if self._buffer is not None:
            end = self._frame.turn_end_id
            end_ids = () if step.ids[-1:] == (end,) else (end,)
            add_tokens(self._buffer, (*step.ids, *end_ids), step.logprobs, step.mask)
