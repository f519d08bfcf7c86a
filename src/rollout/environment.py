"""What an environment is: the protocol between it and the runner, which plays its episodes.

An environment is one folder and one line in `ENVIRONMENTS`. It says which states its episodes go through, whom it asks
in each, what is written into the journal, and what an episode is worth. Everything else (requests, restarts, weights,
schedules, tokens to tensors) is the same for all.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Generic, Protocol, TypeVar

from src.rollout.datasets import Problem
from src.rollout.engines import Api, Sampling, Teacher
from src.rollout.requests import SampleRequest
from src.rollout.scheduler import Attendance, Concurrent, Phase
from src.rollout.trajectory import Trajectory


class Episode(Protocol):
    """One of what an environment plays: a conversation, a game."""

    id: str
    problem: Problem
    rewards: Mapping[str, float | None]

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
H = TypeVar("H")


@dataclass(frozen=True)
class Play(Generic[E, H]):
    """One episode of a request: its position, the how-many-th on its problem it is, what the policy's weights contain
    that it is played with, and what the journal holds of it from before; `attendance` says when it may go on.
    """

    episode: E
    request: SampleRequest
    index: int
    occurrence: int
    weights: str
    history: H
    attendance: Attendance = field(default_factory=Concurrent)

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


class Environment(Protocol[E, H]):
    """Plays episodes, one state at a time.

    Attributes:
        phases: which states may be in work at a time, and with which seats, where the engines take turns.
        policy: the seat under training.
        apis: what the seats behind an API are asked through, by seat.
    """

    phases: Sequence[Phase]

    @property
    def policy(self) -> Teacher: ...

    @property
    def apis(self) -> Mapping[str, Api]: ...

    @property
    def identity(self) -> tuple[Any, ...]:
        """Everything that an episode depends on besides its request; with another `repr` a batch begins anew."""

    def open(self, id: str, problem: Problem, request: SampleRequest) -> E:
        """An episode before its first state."""

    def take_up(self, episode: E, events: Iterable[dict[str, Any]], judge_again: bool) -> H:
        """Bring an episode to where the journal's events leave it, and return what else they tell."""

    def is_recorded(self, history: H) -> bool:
        """Whether the journal holds the finished episode."""

    async def advance(self, play: Play[E, H]) -> None:
        """Do what its state asks for, write it into the journal, and put it into the next state."""

    def trajectory(self, play: Play[E, H], reward: float | None) -> Trajectory:
        """A finished episode for whoever asked for it."""
