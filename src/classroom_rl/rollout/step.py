"""The record of one rollout: every message of the model, with its tokens, its thoughts and what the model saw."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.thoughts import CUT
from classroom_rl.rollout.tools.tool import ToolCall

WITH_THINKING, WITHOUT_THINKING = "with_thinking", "without_thinking"
HISTORIES = (WITH_THINKING, WITHOUT_THINKING)
"""What a model sees of its earlier messages: their whole text, or only their content without thoughts."""

STOP, LENGTH = "stop", "length"
"""Why a message ended: the model ended it, or it was cut at a token limit."""

TERMINATED, TRUNCATED, FAILED = "terminated", "truncated", "failed"
ENDS = (TERMINATED, TRUNCATED, FAILED)

BY_STOP, NO_NEXT_PROMPT, ONE_STEP = "stop", "no next prompt", "one step"
MAX_STEPS, CONTEXT_FULL, MAX_TOKENS = "max_steps", "context full", "max_tokens"
ERROR = "error"


@dataclass(frozen=True)
class End:
    """How a rollout ended.

    Attributes:
        state: `terminated` (it came to its end), `truncated` (it ran out of steps or tokens, so its last message is no
            answer), or `failed` (the engine could not answer).
        reason: for `terminated`: `stop` (the stop function said so), `no next prompt` (next_prompt returned None), or
            `one step` (there is no next_prompt function). For `truncated`: `max_steps`, `context full`, or `max_tokens`
            (the only message was cut). For `failed`: `error`.
        detail: the text of the stop function or of the error; may be empty.
    """

    state: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Step:
    """One prompt and the model's message that answers it.

    Attributes:
        index: its index in the rollout, from 0.
        prompt: the user message.
        messages: what the model saw, the prompt included: {"role", "content"}, in order.
        text: what the model wrote, with thoughts and special tokens, without the end token and tool calls.
        content: the text without thoughts, also without one that was never closed.
        thought: the thoughts, without tags; None if there are none.
        thought_state: `closed`, `opened` (by the prompt, closed by the model), `cut` (never closed), or `absent`.
        prompt_ids: the token ids of the model's prompt; empty for an engine without tokens.
        ids: the token ids after the prompt.
        mask: as long as `ids`: 1 for tokens that the model sampled, 0 for others, such as the results of tools.
        logprobs: as long as `ids`: the engine's log-probs of sampled tokens, 0.0 for others.
        tokens: the number of sampled tokens; for an engine without tokens, by the provider's count.
        finish_reason: `stop` if the model ended the message, `length` if it was cut.
        policy: the version of the weights; None if the engine has none.
        seed: the seed of its sampling.
        started, finished: times in seconds since 1970, UTC.
        tool_calls: its tool calls, in order.

    Raises:
        ValueError: if `ids`, `mask` and `logprobs` differ in length.
    """

    index: int
    prompt: str
    messages: tuple[Message, ...]
    text: str
    content: str
    thought: str | None
    thought_state: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    tokens: int
    finish_reason: str
    policy: PolicyVersion | None
    seed: int
    started: float
    finished: float
    tool_calls: tuple[ToolCall, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.ids), len(self.mask), len(self.logprobs)}
        if len(lengths) > 1:
            raise ValueError(
                f"step {self.index} has {len(self.ids)} ids, {len(self.mask)} mask values and {len(self.logprobs)} "
                "log-probs: each token needs one"
            )

    @property
    def cut(self) -> bool:
        """Whether the message is incomplete: it was cut at a token limit, or inside a thought."""
        return self.finish_reason == LENGTH or self.thought_state == CUT


@dataclass(frozen=True)
class Settings:
    """How a rollout was sampled; a replay needs these settings.

    Attributes:
        engine: the name of the engine's class, and the model's name.
        history: `with_thinking` or `without_thinking`.
        max_steps: the most steps of a rollout.
        temperature, top_p, top_k, max_tokens: as in `Sampling`; `max_tokens` is for one message.
    """

    engine: str
    history: str
    max_steps: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True)
class Rollout:
    """One rollout: prompts and the model's messages, alternating. The user's functions get the rollout so far.

    Attributes:
        id: "<prompt_index>-<copy>".
        prompt_index: the index of its first prompt among the prompts.
        copy: its number among the rollouts on this prompt, from 0.
        seed: the seed from which the seeds of its steps are derived.
        opening: the messages before the first prompt: the system message and earlier messages.
        first_prompt: the first user message.
        settings: how it was sampled.
        meta: the prompt's further entries, such as an answer.
        notes: a dict for the user's functions, such as for the state of a game; empty at first. Like `meta`, it can
            only be saved if it is JSON.
        steps: all steps so far.
        end: how it ended; None while it is played, and for one that was interrupted.
        unanswered: the next prompt at the time the rollout ended, which has no answer; None if there is none.
        step_rewards: a reward for each step, None for one that was not scored; empty if steps were not scored.
        reward: the reward of the rollout; the sum of the steps' rewards if steps were scored. None if not scored.
    """

    id: str
    prompt_index: int
    copy: int
    seed: int
    opening: tuple[Message, ...]
    first_prompt: str
    settings: Settings
    meta: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    end: End | None = None
    unanswered: str | None = None
    step_rewards: tuple[float | None, ...] = ()
    reward: float | None = None

    @property
    def last(self) -> Step | None:
        """The last step; None before the first."""
        return self.steps[-1] if self.steps else None

    @property
    def terminated(self) -> bool:
        """Whether it came to its own end."""
        return self.end is not None and self.end.state == TERMINATED

    @property
    def truncated(self) -> bool:
        """Whether it ran out of steps or tokens. Its return is unknown: value functions bootstrap here."""
        return self.end is not None and self.end.state == TRUNCATED

    @property
    def failed(self) -> bool:
        """Whether the engine could not answer."""
        return self.end is not None and self.end.state == FAILED

    @property
    def answer(self) -> str | None:
        """The content of the last message, if the rollout terminated and that message is complete; None otherwise. The
        last message of a truncated or failed rollout is not an answer."""
        if not self.terminated or self.last is None or self.last.cut:
            return None
        return self.last.content

    @property
    def tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(step.tokens for step in self.steps)

    def messages(self, thoughts: bool = False) -> list[Message]:
        """The whole rollout as messages, with the model's thoughts or without them."""
        messages = list(self.opening)
        for step in self.steps:
            messages += [
                {"role": "user", "content": step.prompt},
                {"role": "assistant", "content": step.text if thoughts else step.content},
            ]
        return messages

    def scored(self, value: Any) -> Self:
        """The rollout with the value that a reward function returned for it.

        Args:
            value: a number, None (not scored), or a sequence with a number or None for each step.

        Raises:
            ValueError: if it is something else, infinite, or has another length than the rollout has steps.
        """
        if value is None or _is_number(value):
            return replace(self, step_rewards=(), reward=None if value is None else finite(value))
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
            raise ValueError(f"a reward is a number, None, or a list of these for the steps, not {value!r}")
        rewards = tuple(None if reward is None else finite(reward) for reward in value)
        if len(rewards) != len(self.steps):
            raise ValueError(
                f"it gave {len(rewards)} rewards for {len(self.steps)} steps: each step needs one, or None"
            )
        known = [reward for reward in rewards if reward is not None]
        return replace(self, step_rewards=rewards, reward=sum(known) if known else None)


def finite(value: Any) -> float:
    """A number as float. Raises a `ValueError` if it is no number, or is infinite or NaN."""
    if not _is_number(value):
        raise ValueError(f"a reward is a number, not {value!r}")
    number = float(value)
    if number - number != 0:  # infinite or NaN
        raise ValueError(f"a reward is {number}; it must be finite, or None for what is not scored")
    return number


def _is_number(value: Any) -> bool:
    """Whether a value is a single number: Python's, NumPy's, or a tensor without dimensions."""
    return hasattr(value, "__float__") and not getattr(value, "shape", ())
