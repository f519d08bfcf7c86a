"""What a model sees at each step of a rollout, as tokens or as messages, with or without its earlier thoughts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.policy_turn import PolicyModel, has_tokens
from classroom_rl.rollout.step import WITH_THINKING, Rollout, Step
from classroom_rl.rollout.tokens import TokenBuffer, add_tokens
from classroom_rl.rollout.tools.turn import SampledMessage

_UNLIMITED = 1_000_000


class History(ABC):
    """The history of one rollout.

    Attributes:
        opens_thought: whether the prompt ends with `<think>`.
    """

    opens_thought = False

    def __init__(self, model: PolicyModel, rollout: Rollout):
        self._model = model
        self._messages: list[Message] = list(rollout.opening)
        self._keeps_thoughts = rollout.settings.history == WITH_THINKING

    def messages(self, prompt: str) -> tuple[Message, ...]:
        """What the model sees if this is the next prompt."""
        return *self._messages, {"role": "user", "content": prompt}

    @abstractmethod
    def prompt_ids(self, prompt: str) -> list[int]:
        """The model's token ids up to and including the next prompt; empty for an engine without tokens. Must be called
        exactly once for each step."""

    @abstractmethod
    async def sample(self, prompt: str, prompt_ids: Sequence[int], sampling: Sampling) -> SampledMessage:
        """The model's next message, with its tool calls; raises the engine's errors."""

    def add(self, step: Step) -> None:
        """Add a finished step."""
        content = step.text if self._keeps_thoughts else step.content
        self._messages = [*step.messages, {"role": "assistant", "content": content}]


class ChatHistory(History):
    """The history of an engine without tokens."""

    def __init__(self, model: PolicyModel, rollout: Rollout):
        super().__init__(model, rollout)
        self.opens_thought = bool(getattr(model.engine, "opens_thought", False))

    def prompt_ids(self, prompt: str) -> list[int]:
        """No ids."""
        return []

    async def sample(self, prompt: str, prompt_ids: Sequence[int], sampling: Sampling) -> SampledMessage:
        """The model's next message, with its tool calls; raises the engine's errors."""
        return await self._model.chat(self.messages(prompt), sampling)


class RenderedHistory(History):
    """A history without thoughts: each prompt is rendered anew from the messages."""

    def __init__(self, model: PolicyModel, rollout: Rollout):
        super().__init__(model, rollout)
        self.opens_thought = model.engine.frame.opens_thought

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids of all messages and of the generation prompt."""
        return self._model.encode_chat(self.messages(prompt))

    async def sample(self, prompt: str, prompt_ids: Sequence[int], sampling: Sampling) -> SampledMessage:
        """The model's next message, with its tool calls; raises the engine's errors."""
        limit = getattr(self._model.engine, "max_length", _UNLIMITED)
        room = max(1, limit - len(prompt_ids) - 1)  # one token is reserved for an end token that the model may omit
        return await self._model.sample(prompt_ids, sampling, room)


class ContinuedHistory(RenderedHistory):
    """A history with thoughts: one buffer of tokens that only grows. Sampled tokens are never tokenized again."""

    def __init__(self, model: PolicyModel, rollout: Rollout):
        super().__init__(model, rollout)
        self._buffer: TokenBuffer | None = None

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids of the rollout so far, and those of the framed prompt."""
        if self._buffer is None:
            self._buffer = TokenBuffer(super().prompt_ids(prompt))
        else:
            self._buffer.append_given(self._model.engine.frame.reply(prompt))
        return self._buffer.ids

    def add(self, step: Step) -> None:
        """Add a finished step, and its end token if the model did not write one."""
        super().add(step)
        end = self._model.engine.frame.turn_end_id
        end_ids = () if step.ids[-1:] == (end,) else (end,)
        add_tokens(self._buffer, (*step.ids, *end_ids), step.logprobs, step.mask)


def history_of(model: PolicyModel, rollout: Rollout) -> History:
    """The history of a rollout of this model."""
    if not has_tokens(model.engine):
        return ChatHistory(model, rollout)
    kind = ContinuedHistory if rollout.settings.history == WITH_THINKING else RenderedHistory
    return kind(model, rollout)
