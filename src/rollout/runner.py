"""The runner: moves the episodes of a batch through their states, one coroutine each, all of them at once.

The engines merge whatever is ready to be sampled; an episode is scored the moment it ends, while others still go on.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic

from src.errors import PolicyMismatch
from src.models.policy_version import PolicyVersion
from src.rollout.engines import Completion
from src.rollout.environment import E, Environment, Play, R
from src.rollout.journal import Journal, conversation_id
from src.rollout.problem import Problem
from src.rollout.requests import SampleRequest, SampleResponse
from src.rollout.scheduler import ConcurrentSchedule, Schedule
from src.rollout.trajectory import TOKEN_FIELDS, Trajectory
from src.rollout.usage import BATCH

_REMEMBERED = 100_000
"""Episodes whose rewards stay in memory: a few hundred bytes each."""


class Runner(Generic[E, R]):
    """Plays batches of episodes.

    Args:
        environment: whose episodes they are.
        journal: where everything is written before it is used.
        reward_weights: which rewards are computed for each episode, and their weights in its `reward`.
        schedule: when episodes may do what.

    Attributes:
        running, finished: how many episodes are being played, and were since the start.
        rewards: of the last episodes that finished, by id and name.
    """

    def __init__(
        self,
        environment: Environment[E, R],
        journal: Journal,
        reward_weights: Mapping[str, float],
        schedule: Schedule | None = None,
    ):
        self.environment = environment
        self.schedule = schedule or ConcurrentSchedule()
        self._journal = journal
        self._reward_weights = dict(reward_weights)
        self.running = self.finished = 0
        self.rewards: dict[str, Mapping[str, float | None]] = {}

    async def sample(self, request: SampleRequest) -> SampleResponse:
        """Play and score one episode per entry of the request. What the journal holds of them from the same weights is
        not done again.

        Raises:
            PolicyMismatch: if other weights are loaded than the request names, now or before it is done, or others
                under the same name before it is done.
            DataError: if a problem does not fit into the policy's context. (If it is what was said that does not fit
                into some model's, that episode ends.)
            EngineFailure: if an engine died.
            ProviderFailure: if a model behind an API refuses every request, or does not answer until its deadline.
        """
        environment = self.environment
        BATCH.set(request.request_id)
        policy, weights = environment.seats.policy.policy, environment.seats.policy.weights
        check_policy(request, policy)
        self._journal.append(
            "batch",
            request=request.request_id,
            step=request.step,
            policy=policy,
            weights=weights,
            body=self._body(request),
            **_problems_once(request),
        )
        plays = self._open(request, weights)
        try:
            with self.schedule.register(len(plays)) as registration:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._play(replace(play, registration=registration))) for play in plays]
        except BaseExceptionGroup as failures:
            for api in environment.seats.apis.values():
                await api.drain()
            raise _first(failures) from None
        return SampleResponse(
            request_id=request.request_id,
            policy=policy,
            conversations=[task.result() for task in tasks],
            reward_weights=self._reward_weights,
            usage={seat: api.ledger.usage(request.request_id) for seat, api in environment.seats.apis.items()},
        )

    def _open(self, request: SampleRequest, weights: str) -> list[Play[E, R]]:
        seen: Counter[str] = Counter()
        plays = []
        asked = list(zip(request.problems, request.answers, strict=True))
        problems = {each: Problem.of(*each) for each in dict.fromkeys(asked)}
        for index, each in enumerate(asked):
            problem = problems[each]
            episode = self.environment.open(conversation_id(request.request_id, index), problem, request)
            replayed = self.environment.replay(episode, self._journal.events(episode.id), request.judge_again)
            plays.append(Play(episode, request, index, seen[problem.id], weights, replayed))
            seen[problem.id] += 1
        return plays

    async def _play(self, play: Play[E, R]) -> Trajectory:
        episode = play.episode
        self.running += 1
        try:
            while not episode.finished:
                await play.registration.wait_for_phase(episode.state)
                await self.environment.advance(play)
        finally:
            self.running -= 1
            play.registration.deregister_one()
        trajectory = self.environment.trajectory(play, weighted_sum(episode.rewards, self._reward_weights))
        if not self.environment.is_recorded(play.replayed):
            record = trajectory.model_dump(exclude=TOKEN_FIELDS)
            self._journal.append("conversation", conversation=trajectory.id, record=record)
        self.finished += 1
        self._remember(trajectory)
        return trajectory

    def _remember(self, trajectory: Trajectory) -> None:
        self.rewards[trajectory.id] = trajectory.rewards
        if len(self.rewards) > _REMEMBERED:
            del self.rewards[next(iter(self.rewards))]

    def _body(self, request: SampleRequest) -> str:
        """Stands for what is asked for under this configuration: another configuration begins a batch anew."""
        return hashlib.sha256(repr((request.digest, *self.environment.identity)).encode()).hexdigest()


def weighted_sum(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """The reward that is trained on, or None if any part of it is None."""
    parts = [rewards[name] for name in weights]
    if any(part is None for part in parts):
        return None
    return sum(weight * rewards[name] for name, weight in weights.items())


def check_policy(request: SampleRequest, loaded: PolicyVersion | None) -> None:
    """Raises:
    PolicyMismatch: if the request names other weights than are loaded.
    """
    wanted = request.wanted_policy
    if wanted is not None and wanted != loaded:
        raise PolicyMismatch(
            f"Request {request.request_id} asks for policy {wanted}, but {loaded} is loaded: publish the weights "
            "with POST /load_weights first."
        )


def check_answer(play: Play[Any, Any], answer: Completion) -> None:
    """Whether an answer is of the weights that its batch began with: a trainer that is started again may publish others
    under the version that its batch asked for.

    Raises:
        PolicyMismatch: if it is not.
    """
    check_policy(play.request, answer.policy)
    if play.request.wanted_policy is not None and answer.weights != play.weights:
        raise PolicyMismatch(
            f"Other weights were loaded as policy {answer.policy} while request {play.request.request_id} was "
            "being played. Ask for it again: it is then played with these alone."
        )


def _problems_once(request: SampleRequest) -> dict[str, list]:
    """What a batch is about, without the repeats of its groups: `problems` with their answers, and in `problem_of` the
    place in it of each episode's."""
    asked = list(zip(request.problems, request.answers, strict=True))
    places = {problem: place for place, problem in enumerate(dict.fromkeys(asked))}
    return {"problems": list(places), "problem_of": [places[problem] for problem in asked]}


def _first(failures: BaseExceptionGroup) -> BaseException:
    """The first error in a group, however deep."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
