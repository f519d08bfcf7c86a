"""Environments in which code answers the policy's messages until it ends the episode.

A subclass of `DialogueEnvironment` defines the first messages, the replies and the rewards. This module handles tokens,
journal, restarts, limits and schedules.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from pydantic import TypeAdapter

from classroom_rl.errors import DataError
from classroom_rl.rollout.chat_template import Message, encode_chat
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.environment import POLICY_ROLE, Environment, Play, Roles
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.runner import check_answer
from classroom_rl.rollout.scheduler import Phase
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.rollout.tokens import TokenBuffer, Turn, add_tokens
from classroom_rl.rollout.trajectory import Trajectory

POLICY_TURN, REPLY, END = "POLICY_TURN", "REPLY", "END"
PROGRAM = "program"
"""The role of the code's replies."""

_TURN = TypeAdapter(Turn)


@dataclass
class Dialogue:
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
        return len(self.said)

    @property
    def said(self) -> list[str]:
        """The policy's messages."""
        return [turn.text for turn in self.turns if turn.role == POLICY_ROLE]


class DialogueEnvironment(Environment[Dialogue, bool]):
    """An environment with the policy as its only model, and code that answers it.

    Args:
        generation: the limits and the environment's own keys, an `EnvironmentConfig`.
        context: the context length of the policy's model, in tokens.
        sampling: how the policy's messages are sampled.
        rewards: the names of the rewards to compute.
    """

    phases = (Phase("dialogue", (POLICY_TURN, REPLY), (POLICY_ROLE,)),)

    def __init__(
        self, generation: Any, context: int, sampling: Sampling, roles: Roles, journal: Journal, rewards: Sequence[str]
    ):
        self.generation = generation
        self.roles = roles
        self._limit = min(generation.max_tokens_in_conversation, context)
        self._sampling = sampling
        self._journal = journal
        self._rewards = tuple(rewards)

    # To be defined by a subclass ---------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def first_messages(cls, problem: Problem, generation: Any) -> list[Message]:
        """The messages of the policy's first prompt, in order."""

    @abstractmethod
    def reply(self, dialogue: Dialogue) -> str | None:
        """The reply to the policy's last message; None ends the episode. It must depend on the dialogue only."""

    @abstractmethod
    def reward(self, name: str, dialogue: Dialogue) -> float:
        """One reward of a finished episode."""

    # The same for all subclasses ---------------------------------------------------------------------------------

    @classmethod
    def open_with(cls, config: Any, roles: Roles, journal: Journal, reward_weights: Mapping[str, float]) -> Self:
        """Open the environment of a configuration."""
        options, generation = config.teacher_model.vllm, config.generation
        sampling = Sampling.of(options, generation.max_tokens_per_turn)
        return cls(generation, options.max_length, sampling, roles, journal, list(reward_weights))

    @classmethod
    def check_problems(cls, config: Any, problems: Sequence[Problem], tokenizer: Any, limit: int) -> None:
        """Refuse a problem whose first messages leave no room for a message of the policy."""
        for problem in problems:
            needed = len(encode_chat(tokenizer, cls.first_messages(problem, config.generation)))
            if needed + 1 >= limit:
                raise DataError(
                    f"Problem {problem.id} ({problem.text[:60]!r}) opens with {needed} tokens, but the policy's "
                    f"context has {limit}: raise generation.max_tokens_in_conversation and "
                    "teacher_model.vllm.max_length, or leave the problem out."
                )

    @property
    def identity(self) -> tuple[Any, ...]:
        """The environment's class, `generation` without the server's keys, the context, the sampling, and the
        rewards."""
        return (type(self).__qualname__, self.generation.identity(), self._limit, self._sampling, self._rewards)

    def open(self, id: str, problem: Problem, request: SampleRequest) -> Dialogue:
        """Create an episode, in its state before the policy's first message."""
        return Dialogue(id, problem)

    def replay(self, episode: Dialogue, events: Iterable[dict[str, Any]], judge_again: bool) -> bool:
        """Replay an episode's events; returns whether the journal holds its finished record."""
        recorded = False
        for event in events:
            if event["event"] == "turn":
                if "prompt_ids" in event:
                    episode.buffer = TokenBuffer(event["prompt_ids"])
                add_tokens(episode.buffer, event["ids"], event["logprobs"])
                self._add(episode, _TURN.validate_python(event["turn"]))
            recorded = recorded or event["event"] == "conversation"
        return recorded

    def is_recorded(self, replayed: bool) -> bool:
        """Whether the journal holds the finished episode."""
        return replayed

    async def advance(self, play: Play[Dialogue, bool]) -> None:
        """Sample the policy's next message, or add the code's reply."""
        dialogue = play.episode
        if dialogue.state == POLICY_TURN:
            await self._policy_turn(play)
            return
        text = self.reply(dialogue) if self._may_continue(dialogue) else None
        if text is None:
            dialogue.rewards = {name: self.reward(name, dialogue) for name in self._rewards}
            dialogue.state = END
            return
        ids = self.roles.policy.frame.reply(text)
        turn = Turn(PROGRAM, text)
        self._journal.append("turn", conversation=dialogue.id, turn=turn, ids=ids, logprobs=())
        dialogue.buffer.append_given(ids)
        self._add(dialogue, turn)

    async def _policy_turn(self, play: Play[Dialogue, bool]) -> None:
        dialogue, policy = play.episode, self.roles.policy
        prompt_field = {}  # the event of the first message holds the prompt, too
        if dialogue.buffer is None:
            messages = self.first_messages(dialogue.problem, self.generation)
            dialogue.buffer = TokenBuffer(encode_chat(policy.tokenizer, messages))
            prompt_field = {"prompt_ids": dialogue.buffer.prompt_ids}
        sampling = replace(play.sampled_with(self._sampling), max_tokens=self._room(dialogue))
        if play.request.greedy:
            sampling = replace(sampling, temperature=0.0)
        answer = await policy.generate(dialogue.buffer.ids, sampling)
        check_answer(play, answer)
        end = policy.frame.turn_end_id
        missing_end = [] if answer.ids[-1:] == (end,) else [end]  # the policy did not write it itself
        span = dialogue.buffer.append_sampled(answer.ids, answer.logprobs)
        dialogue.buffer.append_given(missing_end)
        turn = Turn(POLICY_ROLE, answer.text, None, len(answer.ids), answer.ended, span, answer.policy)
        ids, logprobs = [*answer.ids, *missing_end], answer.logprobs
        self._journal.append("turn", conversation=dialogue.id, turn=turn, ids=ids, logprobs=logprobs, **prompt_field)
        self._add(dialogue, turn)

    def _add(self, dialogue: Dialogue, turn: Turn) -> None:
        dialogue.turns.append(turn)
        dialogue.state = REPLY if turn.role == POLICY_ROLE or self._room(dialogue) < 1 else POLICY_TURN

    def _room(self, dialogue: Dialogue) -> int:
        """The token limit of the policy's next message; one token is reserved for an end token that it may omit."""
        return min(self.generation.max_tokens_per_turn, self._limit - len(dialogue.buffer) - 1)

    def _may_continue(self, dialogue: Dialogue) -> bool:
        return len(dialogue.turns) < self.generation.max_turns and self._room(dialogue) >= 1

    def trajectory(self, play: Play[Dialogue, bool], reward: float | None) -> Trajectory:
        """The record of a finished episode."""
        return self.Record(**play.common_fields(reward))
