"""The record of one rollout: every message of the model with the tokens, thoughts and history that belong to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.thoughts import CUT
from classroom_rl.rollout.tools.tool import ToolCall

WITH_THINKING, WITHOUT_THINKING = "with_thinking", "without_thinking"
HISTORIES = (WITH_THINKING, WITHOUT_THINKING)
"""What a model sees of its earlier messages: all of them, or their content without thoughts."""

STOP, LENGTH = "stop", "length"
"""Why a message ended: the model ended it, or it was cut at a limit of tokens."""

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
        reason: of `terminated`: `stop` (the stop function said so), `no next prompt` (there was none after the last
            message), `one step` (there is no next_prompt function). Of `truncated`: `max_steps`, `context full`, or
            `max_tokens` (the only message was cut). Of `failed`: `error`.
        detail: what the stop function or the error said; may be empty.
    """

    state: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Step:
    """One prompt and the model's message that answers it.

    Attributes:
        index: its position in the rollout, from 0.
        prompt: the user message.
        messages: what the model saw, the prompt included: {"role", "content"}, in order.
        text: what the model wrote, with thoughts and special tokens, without the end token and the calls of tools.
        content: what it said: the text without thoughts. A thought that was never closed is no part of it.
        thought: what it thought, without tags; None if it did not think.
        thought_state: `closed`, `opened` (by the prompt, closed by the model), `cut` (never closed), or `absent`.
        prompt_ids: the token ids that the model was given; empty for an engine without tokens.
        ids: the token ids after them; `mask` is 1 for those that the model sampled, 0 for others, such as the results
            of tools; `logprobs` are the engine's log-probs of sampled tokens, 0.0 for others. Equal lengths.
        tokens: the number of sampled tokens; by the provider's count for an engine without tokens.
        finish_reason: `stop` if the model ended the message, `length` if it was cut.
        policy: the version of the weights; None if the engine has none.
        seed: the seed that it was sampled with.
        started, finished: in seconds since 1970, UTC.
        tool_calls: the calls of tools in it, in order.
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
        """Whether the message was cut at a limit of tokens, or inside of a thought: it is no whole answer."""
        return self.finish_reason == LENGTH or self.thought_state == CUT


@dataclass(frozen=True)
class Settings:
    """How a rollout was sampled: what replaying it needs.

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
    """One rollout: prompts and the model's messages in turn. Functions of a user get the rollout so far.

    Attributes:
        id: its name in the set: the number of its prompt and of its copy.
        prompt_index: the position of its first prompt among the prompts.
        copy: its number among the rollouts on this prompt, from 0.
        seed: the seed that those of its steps are derived from.
        opening: the messages before the first prompt: the system message, earlier messages.
        first_prompt: the first user message.
        settings: how it was sampled.
        meta: what the prompt brought besides its text, such as an answer.
        notes: what the user's functions note about the rollout, such as the state of a game; empty at first. Like
            `meta` it must be JSON to be saved.
        steps: all steps so far.
        end: how it ended; None while it is played, and for one that was interrupted.
        unanswered: the prompt that was next when the rollout ended, and that no message answers; None if there is none.
        step_rewards: a reward for each step, None for one that was not scored; empty if steps were not scored.
        reward: the reward; with rewards for steps their sum. None if it was not scored.
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
        """Whether it came to its end."""
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
        """What the last message said, if the rollout terminated with a message that is whole; None otherwise. The last
        message of a truncated or failed rollout is not an answer."""
        if not self.terminated or self.last is None or self.last.cut:
            return None
        return self.last.content

    @property
    def tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(step.tokens for step in self.steps)

    def messages(self, thoughts: bool = False) -> list[Message]:
        """The whole rollout as messages, with the model's thoughts or without them."""
        found = list(self.opening)
        for step in self.steps:
            found += [
                {"role": "user", "content": step.prompt},
                {"role": "assistant", "content": step.text if thoughts else step.content},
            ]
        return found

    def scored(self, value: Any) -> Self:
        """The rollout with what a reward function returned for it.

        Args:
            value: a number, None (not scored), or a sequence with a number or None for each step.

        Raises:
            ValueError: if it is something else, infinite, or has another length than the rollout has steps.
        """
        if value is None or _is_number(value):
            return replace(self, step_rewards=(), reward=None if value is None else finite(value))
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
            raise ValueError(f"a reward is a number, None, or a list of these for the steps, not {value!r}")
        rewards = tuple(None if each is None else finite(each) for each in value)
        if len(rewards) != len(self.steps):
            raise ValueError(
                f"it gave {len(rewards)} rewards for {len(self.steps)} steps: each step needs one, or None"
            )
        given = [each for each in rewards if each is not None]
        return replace(self, step_rewards=rewards, reward=sum(given) if given else None)


def finite(value: Any) -> float:
    """A number as float.

    Raises:
        ValueError: if it is no number, or is infinite or NaN.
    """
    if not _is_number(value):
        raise ValueError(f"a reward is a number, not {value!r}")
    number = float(value)
    if number - number != 0:
        raise ValueError(f"a reward is {number}; it must be finite, or None for what is not scored")
    return number


def _is_number(value: Any) -> bool:
    """Whether it is one number: Python's, NumPy's, or a tensor of one element without a dimension."""
    return hasattr(value, "__float__") and not getattr(value, "shape", ())
