"""Environments in which code answers the policy's messages until it ends the episode.

A subclass of `DialogueEnvironment` defines the first messages, the replies, the rewards, and what tools the policy may
call. This module handles tokens, journal, restarts, limits and schedules.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from classroom_rl.errors import DataError
from classroom_rl.rollout.chat_template import Message, ReplyFrame
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.environment import POLICY_ROLE, Environment, Play, Roles
from classroom_rl.rollout.own_rewards import own_reward, own_turn_reward
from classroom_rl.rollout.policy_turn import PolicyModel, add_policy_message, replay_event, sample_draft
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.scheduler import Phase
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.rollout.supervision import unreviewed
from classroom_rl.rollout.tokens import TokenBuffer, Turn
from classroom_rl.rollout.tools.formats import ToolFrame
from classroom_rl.rollout.tools.tool import Tool, Toolbox, ToolLimits
from classroom_rl.rollout.tools.turn import tool_metrics
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.system.functions import is_function

POLICY_TURN, REPLY, END = "POLICY_TURN", "REPLY", "END"
PROGRAM = "program"
"""The role of the code's replies."""


@dataclass
class DialogueEpisode:
    """One episode: its messages, and the policy's context as tokens."""

    id: str
    problem: Problem
    turns: list[Turn] = field(default_factory=list)
    buffer: TokenBuffer | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    state: str = POLICY_TURN
    failure: str | None = None
    overflow: str | None = None
    rejected: bool = False

    @property
    def finished(self) -> bool:
        """Whether the episode has ended."""
        return self.state == END

    @property
    def answers(self) -> int:
        """The number of the policy's messages so far."""
        return len(self.messages)

    @property
    def messages(self) -> list[str]:
        """The policy's messages."""
        return [turn.text for turn in self.turns if turn.role == POLICY_ROLE]

    @property
    def said(self) -> list[str]:
        """The former name of `messages`."""
        warnings.warn("said is called messages now; the old name goes with version 0.3", FutureWarning, stacklevel=2)
        return self.messages


def __getattr__(name: str) -> Any:
    if name != "Dialogue":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Dialogue is called DialogueEpisode now; the old name goes with version 0.3", FutureWarning, 2)
    return DialogueEpisode


class DialogueEnvironment(Environment[DialogueEpisode, bool]):
    """An environment with the policy as its only model, and code that answers it.

    Args:
        generation: the limits and the environment's own keys, an `EnvironmentConfig`.
        context: the context length of the policy's model, in tokens.
        sampling: how the policy's messages are sampled.
        rewards: the names of the rewards to compute.
        turn_rewards: the names of the turn rewards to compute.

    Attributes:
        tools: what the policy may call while it writes a message: tools, or functions to make tools of.
        tool_limits: the limits of the calls in one message.
    """

    takes_own_rewards = True
    tools: ClassVar[Sequence[Tool | Callable[..., Any]]] = ()
    tool_limits: ClassVar[ToolLimits] = ToolLimits()
    phases = (Phase("dialogue", (POLICY_TURN, REPLY), (POLICY_ROLE,)),)

    def __init__(
        self,
        generation: Any,
        context: int,
        sampling: Sampling,
        roles: Roles,
        journal: Journal,
        rewards: Sequence[str],
        turn_rewards: Sequence[str] = (),
    ):
        self.generation = generation
        self.roles = roles
        self._limit = min(generation.max_tokens_in_conversation, context)
        self._sampling = sampling
        self._journal = journal
        self._rewards, self._turn_rewards = tuple(rewards), tuple(turn_rewards)
        self._toolbox = Toolbox(self.tools, self.tool_limits)
        self._policy = PolicyModel(roles.policy, self._toolbox if self.tools else None)

    # To be defined by a subclass ---------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def first_messages(cls, problem: Problem, generation: Any) -> list[Message]:
        """The messages of the policy's first prompt, in order."""

    @abstractmethod
    def reply(self, episode: DialogueEpisode) -> str | None:
        """The reply to the policy's last message; None ends the episode. It must depend on the episode only."""

    @abstractmethod
    def reward(self, name: str, episode: DialogueEpisode) -> float:
        """One reward of a finished episode."""

    def turn_rewards(self, name: str, episode: DialogueEpisode) -> Sequence[float | None]:
        """One turn reward of a finished episode: a number for each of the policy's messages, in order, or None for one
        that it cannot score. Its names are `TURN_REWARD_NAMES` in `config`, weighed by `train.turn_credit.rewards`."""
        raise NotImplementedError(f"{type(self).__name__} names the turn reward {name}, but has no turn_rewards")

    # The same for all subclasses ---------------------------------------------------------------------------------

    @classmethod
    def open_with(cls, config: Any, roles: Roles, journal: Journal, reward_weights: Mapping[str, float]) -> Self:
        """Open the environment of a configuration."""
        options, generation = config.teacher_model.vllm, config.generation
        sampling = Sampling.of(options, generation.max_tokens_per_turn)
        names = (list(reward_weights), list(config.train.turn_credit.weights))
        return cls(generation, options.max_length, sampling, roles, journal, *names)

    @classmethod
    def check_problems(cls, config: Any, problems: Sequence[Problem], tokenizer: Any, limit: int) -> None:
        """Refuse a problem whose first messages leave no room for a message of the policy."""
        frame = ToolFrame(tokenizer, ReplyFrame(tokenizer), Toolbox(cls.tools).schemas())
        for problem in problems:
            length = len(frame.encode_chat(cls.first_messages(problem, config.generation)))
            if length + 1 >= limit:
                raise DataError(
                    f"Problem {problem.id} ({problem.text[:60]!r}) opens with {length} tokens, but the policy's "
                    f"context has {limit}: raise generation.max_tokens_in_conversation and "
                    "teacher_model.vllm.max_length, or leave the problem out."
                )

    @property
    def identity(self) -> tuple[Any, ...]:
        """The environment's class, `generation` without the server's keys, the context, the sampling, the rewards, and
        what the policy is told of its tools."""
        identity = (type(self).__qualname__, self.generation.identity(), self._limit, self._sampling, self._rewards)
        tools = (self._toolbox.schemas(), self._toolbox.limits) if self._toolbox.tools else ()
        return (*identity, *([self._turn_rewards] if self._turn_rewards else []), *tools)

    def open(self, id: str, problem: Problem, request: SampleRequest) -> DialogueEpisode:
        """Create an episode, in its state before the policy's first message."""
        return DialogueEpisode(id, problem)

    def replay(self, episode: DialogueEpisode, events: Iterable[dict[str, Any]], judge_again: bool) -> bool:
        """Replay an episode's events; returns whether the journal holds its finished record."""
        recorded = False
        for event in events:
            turn = replay_event(episode, event)
            if turn is not None:
                self._add(episode, turn)
            recorded = recorded or event["event"] == "conversation"
        return recorded

    def is_recorded(self, replayed: bool) -> bool:
        """Whether the journal holds the finished episode."""
        return replayed

    async def advance(self, play: Play[DialogueEpisode, bool]) -> None:
        """Sample the policy's next message, or add the code's reply."""
        episode = play.episode
        if episode.state == POLICY_TURN:
            await self._policy_turn(play)
            return
        may_continue = len(episode.turns) < self.generation.max_turns and self._room(episode) >= 1
        text = self.reply(episode) if may_continue else None
        if text is None:
            episode.rewards = {name: self._reward_of(name, episode) for name in self._rewards}
            episode.state = END
            return
        ids = self.roles.policy.frame.reply(text)
        turn = Turn(PROGRAM, text)
        self._journal.append("turn", conversation=episode.id, turn=turn, ids=ids, logprobs=())
        episode.buffer.append_given(ids)
        self._add(episode, turn)

    async def _policy_turn(self, play: Play[DialogueEpisode, bool]) -> None:
        episode, opening = play.episode, {}  # the event of the first message holds the prompt, too
        if episode.buffer is None:
            messages = self.first_messages(episode.problem, self.generation)
            episode.buffer = TokenBuffer(self._policy.encode_chat(messages))
            opening = {"prompt_ids": episode.buffer.prompt_ids}
        draft = await sample_draft(play, self._policy, episode.buffer.ids, self._sampling, self._room(episode))
        message = unreviewed(draft, (len(episode.turns), len(episode.buffer.completion_ids)))
        self._add(episode, add_policy_message(self._journal, episode, message, opening))

    def _add(self, episode: DialogueEpisode, turn: Turn) -> None:
        episode.turns.append(turn)
        episode.state = REPLY if turn.role == POLICY_ROLE or self._room(episode) < 1 else POLICY_TURN

    def _room(self, episode: DialogueEpisode) -> int:
        """How many tokens the policy's next message may have; one is reserved for an end token that it may omit."""
        return self._limit - len(episode.buffer) - 1

    def trajectory(self, play: Play[DialogueEpisode, bool], reward: float | None) -> Trajectory:
        """The record of a finished episode."""
        turn_rewards = {name: self._turn_rewards_of(name, play.episode) for name in self._turn_rewards}
        return self.Record(**play.common_fields(reward), turn_rewards=turn_rewards)

    def _reward_of(self, name: str, episode: DialogueEpisode) -> float | None:
        return own_reward(name)(episode) if is_function(name) else self.reward(name, episode)

    def _turn_rewards_of(self, name: str, episode: DialogueEpisode) -> list[float | None]:
        if is_function(name):
            return own_turn_reward(name, lambda finished: finished.answers)(episode)
        values, messages = list(self.turn_rewards(name, episode)), len(episode.messages)
        if len(values) != messages:
            raise DataError(
                f"turn_rewards({name!r}) returned {len(values)} values for {episode.id}, which has {messages} messages "
                "of the policy; it must return a number or None for each."
            )
        return values

    @classmethod
    def batch_metrics(cls, records: Sequence[Trajectory]) -> dict[str, float]:
        """The tool calls of a batch, if there are any."""
        return tool_metrics(records)
