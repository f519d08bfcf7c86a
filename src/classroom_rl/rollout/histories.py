"""What a model sees at each step of a rollout, as tokens or as messages, with or without its earlier thoughts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from classroom_rl.rollout.chat_template import Message, encode_chat
from classroom_rl.rollout.engine import Sampling, TokenEngine
from classroom_rl.rollout.step import WITH_THINKING, Rollout, Step
from classroom_rl.rollout.tokens import TokenBuffer
from classroom_rl.rollout.tools.formats import ToolFrame
from classroom_rl.rollout.tools.tool import Toolbox
from classroom_rl.rollout.tools.turn import SampledMessage, chat_with_tools, sample_with_tools, without_tools

_UNLIMITED = 1_000_000


@dataclass(frozen=True)
class ToolUse:
    """The tools of a runner, and how its engine's chat template presents them; `frame` is None for an engine without
    tokens."""

    toolbox: Toolbox
    frame: ToolFrame | None

    @classmethod
    def of(cls, engine: Any, toolbox: Toolbox) -> "ToolUse":
        """The tools for this engine; raises as `ToolFrame` does."""
        if not has_tokens(engine):
            return cls(toolbox, None)
        return cls(toolbox, ToolFrame(engine.tokenizer, engine.frame, toolbox.schemas()))


class History(ABC):
    """The history of one rollout.

    Attributes:
        opens_thought: whether the prompt ends with `<think>`.
    """

    opens_thought = False

    def __init__(self, engine: Any, rollout: Rollout, tools: ToolUse | None = None):
        self._engine = engine
        self._tools = tools
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

    def __init__(self, engine: Any, rollout: Rollout, tools: ToolUse | None = None):
        super().__init__(engine, rollout, tools)
        self.opens_thought = bool(getattr(engine, "opens_thought", False))

    def prompt_ids(self, prompt: str) -> list[int]:
        """No ids."""
        return []

    async def sample(self, prompt: str, prompt_ids: Sequence[int], sampling: Sampling) -> SampledMessage:
        """The model's next message, with its tool calls; raises the engine's errors."""
        if self._tools is None:
            return without_tools(await self._engine.chat(self.messages(prompt), sampling))
        return await chat_with_tools(self._engine, self.messages(prompt), sampling, self._tools.toolbox)


class RenderedHistory(History):
    """A history without thoughts: each prompt is rendered anew from the messages."""

    def __init__(self, engine: Any, rollout: Rollout, tools: ToolUse | None = None):
        super().__init__(engine, rollout, tools)
        self.opens_thought = engine.frame.opens_thought

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids of all messages and of the generation prompt."""
        if self._tools is not None:
            return self._tools.frame.encode_chat(self.messages(prompt))
        return encode_chat(self._engine.tokenizer, self.messages(prompt))

    async def sample(self, prompt: str, prompt_ids: Sequence[int], sampling: Sampling) -> SampledMessage:
        """The model's next message, with its tool calls; raises the engine's errors."""
        if self._tools is None:
            return without_tools(await self._engine.generate(prompt_ids, sampling))
        limit = getattr(self._engine, "max_length", _UNLIMITED)
        room = max(1, limit - len(prompt_ids) - 1)  # one token is reserved for an end token that the model may omit
        frame, toolbox = self._tools.frame, self._tools.toolbox
        return await sample_with_tools(self._engine, frame, prompt_ids, sampling, toolbox, room)


class ContinuedHistory(RenderedHistory):
    """A history with thoughts: one buffer of tokens that only grows. Sampled tokens are never tokenized again."""

    def __init__(self, engine: Any, rollout: Rollout, tools: ToolUse | None = None):
        super().__init__(engine, rollout, tools)
        self._buffer: TokenBuffer | None = None

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids of the rollout so far, and those of the framed prompt."""
        if self._buffer is None:
            self._buffer = TokenBuffer(super().prompt_ids(prompt))
        else:
            self._buffer.append_given(self._engine.frame.reply(prompt))
        return self._buffer.ids

    def add(self, step: Step) -> None:
        """Add a finished step, and its end token if the model did not write one."""
        super().add(step)
        for sampled, run in groupby(zip(step.ids, step.mask, step.logprobs, strict=True), key=lambda token: token[1]):
            ids, _, logprobs = zip(*run, strict=True)
            if sampled:
                self._buffer.append_sampled(ids, logprobs)
            else:
                self._buffer.append_given(ids)
        end = self._engine.frame.turn_end_id
        if step.ids[-1:] != (end,):
            self._buffer.append_given([end])


def history_of(engine: Any, rollout: Rollout, tools: ToolUse | None = None) -> History:
    """The history of a rollout with this engine and these tools."""
    if not has_tokens(engine):
        return ChatHistory(engine, rollout, tools)
    kind = ContinuedHistory if rollout.settings.history == WITH_THINKING else RenderedHistory
    return kind(engine, rollout, tools)


def has_tokens(engine: Any) -> bool:
    """Whether an engine works on token ids: it has `generate`, `tokenizer` and `frame`."""
    return isinstance(engine, TokenEngine) and hasattr(engine, "tokenizer") and hasattr(engine, "frame")
