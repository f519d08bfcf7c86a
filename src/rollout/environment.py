"""What an environment is: how a server opens it, how the runner plays its episodes, and what is told of them afterwards.

An environment is one folder and one line in `ENVIRONMENTS` (src/rollout/registry.py). It says which states its episodes
go through, which seat it asks in each, what it writes into the journal, and what an episode is worth. Requests,
restarts, weights, schedules, and the way from tokens to tensors are the same for all. docs/environments.md shows one.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from src.errors import UnknownConversation
from src.rollout.engines import Sampling
from src.rollout.problem import Problem
from src.rollout.requests import SampleRequest
from src.rollout.scheduler import ConcurrentSchedule, Phase, Registration
from src.rollout.seats import POLICY_SEAT, LoadedModels, Seats
from src.rollout.tokens import TokenBuffer, Turn
from src.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from src.rollout.journal import Journal


class Episode(Protocol):
    """One of what an environment plays: a conversation, a game.

    Attributes:
        turns: its messages.
        buffer: the policy's context; None before it is open.
        rewards: the value of each reward; None for an episode that cannot be scored.
        rejected, failure, overflow: as in `Trajectory`.
    """

    id: str
    problem: Problem
    turns: Sequence[Turn]
    buffer: TokenBuffer | None
    rewards: Mapping[str, float | None]
    rejected: bool
    failure: str | None
    overflow: str | None

    @property
    def state(self) -> Hashable:
        """What comes next; one of the states in the environment's phases, unless it is finished."""

    @property
    def finished(self) -> bool:
        """Whether nothing comes next."""

    @property
    def answers(self) -> int:
        """How many answers of models it holds so far."""


E = TypeVar("E", bound=Episode)
R = TypeVar("R")


@dataclass(frozen=True)
class Play(Generic[E, R]):
    """One episode of a request, while it is played.

    Attributes:
        index: its position in the request.
        occurrence: how many episodes on the same problem stand before it in the request.
        weights: a fingerprint of the policy's weights when the request began.
        replayed: what the journal held of it from before.
        registration: the episode's place in the schedule, which says when it may go on.
    """

    episode: E
    request: SampleRequest
    index: int
    occurrence: int
    weights: str
    replayed: R
    registration: Registration = field(default_factory=ConcurrentSchedule)

    def sampled_with(self, sampling: Sampling) -> Sampling:
        """The sampling of the next answer, with a name of its own, and with a seed of its own where the request fixes
        seeds."""
        answers = self.episode.answers
        sampling = replace(sampling, draw=(self.episode.id, answers))
        if not self.request.fixed_seeds:
            return sampling
        parts = (self.request.seed, self.episode.problem.id, self.request.step, self.occurrence, answers)
        digest = sha256("|".join(map(str, parts)).encode()).digest()
        return replace(sampling, seed=int.from_bytes(digest[:4]))

    def common_fields(self, reward: float | None) -> dict[str, Any]:
        """The fields of the episode's trajectory that every environment fills alike.

        Args:
            reward: the weighted sum of its rewards.
        """
        episode, request, buffer = self.episode, self.request, self.episode.buffer
        return {
            "id": episode.id,
            "request_id": request.request_id,
            "step": request.step,
            "index": self.index,
            "problem_id": episode.problem.id,
            "problem": episode.problem.text,
            "answer": episode.problem.answer,
            "rewards": dict(episode.rewards),
            "reward": reward,
            "turns": episode.turns,
            "state": str(episode.state),
            "rejected": episode.rejected,
            "failure": episode.failure,
            "overflow": episode.overflow,
            "prompt_ids": buffer.prompt_ids if buffer else [],
            "completion_ids": buffer.completion_ids if buffer else [],
            "mask": buffer.mask if buffer else [],
            "logprobs": buffer.logprobs if buffer else [],
            "meta": request.meta[self.index] if request.meta is not None else {},
        }


class Environment(ABC, Generic[E, R]):
    """Plays episodes, one state at a time.

    `config` is everywhere the whole configuration of the program: a `TrainRLConfig` or an `EvalConfig`.

    Attributes:
        Record: the trajectory that a finished episode becomes; a subclass adds what its episodes have besides.
        phases: which states may be in work at a time, and with which seats, where the engines take turns.
        seats: the models in the seats.
    """

    Record: ClassVar[type[Trajectory]] = Trajectory
    phases: ClassVar[Sequence[Phase]]
    seats: LoadedModels

    # Opening -----------------------------------------------------------------------------------------------------

    @classmethod
    def models(cls, config: Any, reward_weights: Mapping[str, float]) -> dict[str, Any]:
        """The models that the seats need under this configuration, by seat, in the order in which they are loaded."""
        return {POLICY_SEAT: config.teacher_model}

    @classmethod
    def check(cls, config: Any, judge_reads_templates: bool) -> None:
        """Look over what an episode needs besides models, before any is loaded.

        Args:
            judge_reads_templates: whether the judge is a model, which is asked with prompt templates.

        Raises:
            DataError: if a prompt template is missing or wrong.
        """

    @classmethod
    @abstractmethod
    def open_with(cls, config: Any, seats: Seats, journal: "Journal", reward_weights: Mapping[str, float]) -> Self:
        """The environment of a configuration, with the models that `models` asked for."""

    @classmethod
    def check_problems(
        cls, config: Any, problems: Sequence[Problem], tokenizer: "PreTrainedTokenizerBase", limit: int
    ) -> None:
        """Look over the problems of a training before its first step.

        Args:
            limit: how many tokens the policy's context has.

        Raises:
            DataError: if a problem does not fit.
        """

    # Playing -----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def identity(self) -> tuple[Any, ...]:
        """Everything that an episode depends on besides its request; with another `repr` a batch begins anew."""

    @abstractmethod
    def open(self, id: str, problem: Problem, request: SampleRequest) -> E:
        """An episode before its first state."""

    @abstractmethod
    def replay(self, episode: E, events: Iterable[dict[str, Any]], judge_again: bool) -> R:
        """Bring an episode to where the journal's events leave it, and return what else they tell."""

    @abstractmethod
    def is_recorded(self, replayed: R) -> bool:
        """Whether the journal holds the finished episode."""

    @abstractmethod
    async def advance(self, play: Play[E, R]) -> None:
        """Do what the episode's state asks for, write it into the journal, and put the episode into the next state."""

    @abstractmethod
    def trajectory(self, play: Play[E, R], reward: float | None) -> Trajectory:
        """The record of a finished episode; `reward` is the weighted sum of its rewards."""

    # Afterwards --------------------------------------------------------------------------------------------------

    def reward_of(self, name: str, record: Trajectory) -> float | None:
        """One reward of a finished episode, also one that the configuration gives no weight.

        Raises:
            UnknownConversation: if there is no reward of this name.
            DataError: if the episode lacks what the reward is computed from.
        """
        if name not in record.rewards:
            raise UnknownConversation(f"There is no reward {name}. There are: {', '.join(record.rewards)}.")
        return record.rewards[name]

    @classmethod
    def batch_metrics(cls, records: Sequence[Trajectory]) -> dict[str, float]:
        """What a batch was like, as means over its episodes, besides what every environment's have."""
        return {}
