"""The runner: moves the episodes of a batch through their states concurrently, with one coroutine per episode.

The engines batch whatever is ready to be sampled. An episode is scored as soon as it ends, while others go on.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic

from classroom_rl.errors import PolicyMismatch
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.engine import BATCH, Completion
from classroom_rl.rollout.environment import E, Environment, Play, R, Siblings
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.scheduler import ConcurrentSchedule, Schedule, Turnstile
from classroom_rl.rollout.store.journal import Journal, conversation_id
from classroom_rl.rollout.trajectory import TOKEN_FIELDS, Trajectory

logger = logging.getLogger(__name__)

REMEMBERED = 8192
"""The number of episodes whose rewards stay in memory, at half a kilobyte each: the largest batch twice, since the
next one may be played while a trainer asks for this one's. The journal has the others."""


class Runner(Generic[E, R]):
    """Plays batches of episodes.

    Args:
        environment: the environment that they are played in.
        journal: every event is written to it before it is used.
        reward_weights: the weight of each reward in an episode's `reward`.
        schedule: decides when episodes may go on; None lets each go on at once.

    Attributes:
        running, finished: the numbers of episodes that are being played, and that finished since the start.
        rewards: the rewards of the last finished episodes, by id and name.
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
        self._turnstile = Turnstile()
        self.reward_weights = dict(reward_weights)
        self.running = self.finished = 0
        self.rewards: dict[str, Mapping[str, float | None]] = {}

    async def sample(self, request: SampleRequest, when_played: Callable[[], None] = lambda: None) -> SampleResponse:
        """Play and score one episode per entry of the request. Events that the journal holds from the same weights are
        replayed, not repeated.

        Args:
            when_played: called once the policy is not needed any more: other weights may be loaded from then on.

        Raises:
            PolicyMismatch: if the loaded weights are not those that the request names, or change while it is played,
                also if other weights get the same policy version.
            DataError: if a problem does not fit into the policy's context. (If an episode's messages outgrow a model's
                context, only that episode ends.)
            EngineFailure: if an engine died.
            ProviderFailure: if a model behind an API refuses every request, or does not answer before its deadline.
        """
        environment = self.environment
        BATCH.set(request.request_id)
        policy, weights = self.weights_for(request)
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
        plays = await self._open(request, weights)
        dialogues = _UnfinishedDialogues(environment, plays, when_played)
        if dialogues.open:
            check_policy(request, environment.roles.policy.policy)
        played: list[Trajectory | None] = [None] * len(plays)
        try:
            with self.schedule.register(len(plays)) as registration:
                async with asyncio.TaskGroup() as group:
                    for index in range(len(plays)):
                        await self._turnstile.go_through()
                        play, plays[index] = plays[index], None  # so that each is freed as it ends, not all at once
                        own = replace(play, registration=registration)
                        group.create_task(self._play_into(played, own, dialogues))
                        del play, own
        except BaseExceptionGroup as failures:
            for api in environment.roles.apis.values():
                await api.drain()
            first, *others = _errors_in(failures)
            for message in dict.fromkeys(str(each) for each in others if str(each) != str(first)):
                logger.warning("another episode of request %s failed, too: %s", request.request_id, message)
            raise first from None
        return SampleResponse(
            request_id=request.request_id,
            policy=policy,
            conversations=played,
            reward_weights=self.reward_weights,
            usage={role: api.ledger.usage(request.request_id) for role, api in environment.roles.apis.items()},
        )

    def weights_for(self, request: SampleRequest) -> tuple[PolicyVersion | None, str]:
        """The policy that a request is played with, and the fingerprint of its weights: what is loaded, or what was
        loaded before, if the request began with that."""
        begun = self._journal.begun(request.request_id)
        if begun is not None and begun["body"] == self._body(request) and self.began_before(request, begun["weights"]):
            return request.wanted_policy, begun["weights"]
        return self.environment.roles.policy.policy, self.environment.roles.policy.weights

    def began_before(self, request: SampleRequest, weights: str) -> bool:
        """Whether a request asks for the policy that was loaded before the present one, and these were its weights. It
        may still wait for its judge; the policy answers no more in it."""
        wanted = request.wanted_policy
        if wanted is None or wanted == self.environment.roles.policy.policy:
            return False
        return self._journal.earlier_weights() == (wanted, weights)

    async def _open(self, request: SampleRequest, weights: str) -> list[Play[E, R]]:
        siblings: dict[str, Siblings] = {}
        plays = []
        for index, problem in enumerate(request.all_problems()):
            await self._turnstile.go_through()
            episode = self.environment.open(conversation_id(request.request_id, index), problem, request)
            self.rewards.pop(episode.id, None)  # it is played again, perhaps with other weights
            replayed = self.environment.replay(episode, self._journal.events(episode.id), request.judge_again)
            group = siblings.setdefault(problem.id, Siblings())
            play = Play(episode, request, index, len(group.episodes), weights, replayed, siblings=group)
            group.episodes.append(episode)
            plays.append(play)
        return plays

    async def _play_into(
        self, played: list[Trajectory | None], play: Play[E, R], dialogues: "_UnfinishedDialogues"
    ) -> None:
        played[play.index] = await self._play(play, dialogues)

    async def _play(self, play: Play[E, R], dialogues: "_UnfinishedDialogues") -> Trajectory:
        episode = play.episode
        self.running += 1
        try:
            while not episode.finished:
                await play.registration.wait_for_phase(episode.state)
                await self._turnstile.go_through()
                await self.environment.advance(play)
                dialogues.update(play)
        finally:
            self.running -= 1
            play.registration.deregister_one()
        trajectory = self.environment.trajectory(play, weighted_sum(episode.rewards, self.reward_weights))
        if not self.environment.is_recorded(play.replayed):
            record = trajectory.model_dump(exclude=TOKEN_FIELDS)
            self._journal.append("conversation", conversation=trajectory.id, record=record)
        self.finished += 1
        self._remember(trajectory)
        return trajectory

    def _remember(self, trajectory: Trajectory) -> None:
        self.rewards[trajectory.id] = trajectory.rewards
        if len(self.rewards) > REMEMBERED:
            del self.rewards[next(iter(self.rewards))]

    def _body(self, request: SampleRequest) -> str:
        """A hash of the request and the environment's identity: if it changes, the batch begins anew."""
        return hashlib.sha256(repr((request.digest, *self.environment.identity)).encode()).hexdigest()


class _UnfinishedDialogues:
    """The episodes of a request in which the policy may still be asked.

    Args:
        when_played: called once, when there are none.

    Attributes:
        open: their positions in the request.
    """

    def __init__(self, environment: Environment, plays: Sequence[Play], when_played: Callable[[], None]):
        self._needs_policy, self._when_played = environment.needs_policy, when_played
        self.open = {play.index for play in plays if environment.needs_policy(play.episode)}
        if not self.open:
            when_played()

    def update(self, play: Play) -> None:
        """Look at an episode again."""
        if play.index in self.open and not self._needs_policy(play.episode):
            self.open.discard(play.index)
            if not self.open:
                self._when_played()


def weighted_sum(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """The reward to train on; None if any of the weighted rewards is None."""
    parts = [rewards[name] for name in weights]
    if any(part is None for part in parts):
        return None
    return sum(weight * rewards[name] for name, weight in weights.items())


def check_policy(request: SampleRequest, loaded: PolicyVersion | None) -> None:
    """Raise a `PolicyMismatch` if the request names another policy than the loaded one."""
    wanted = request.wanted_policy
    if wanted is not None and wanted != loaded:
        raise PolicyMismatch(
            f"Request {request.request_id} asks for policy {wanted}, but {loaded} is loaded: publish the weights "
            "with POST /load_weights first."
        )


def check_answer(play: Play[Any, Any], answer: Completion) -> None:
    """Check that an answer was sampled with the weights that its batch began with. A restarted trainer may publish
    other weights under the same policy version.

    Raises:
        PolicyMismatch: if it was not.
    """
    check_policy(play.request, answer.policy)
    if play.request.wanted_policy is not None and answer.weights != play.weights:
        raise PolicyMismatch(
            f"Other weights were loaded as policy {answer.policy} while request {play.request.request_id} was "
            "being played. Ask for it again: it is then played with these alone."
        )


def _problems_once(request: SampleRequest) -> dict[str, list]:
    """The distinct (problem, answer) pairs of a batch in `problems`, and the index of each episode's pair in
    `problem_of`."""
    asked = list(zip(request.problems, request.answers, strict=True))
    places = {problem: place for place, problem in enumerate(dict.fromkeys(asked))}
    return {"problems": list(places), "problem_of": [places[problem] for problem in asked]}


def _errors_in(failures: BaseExceptionGroup) -> list[BaseException]:
    """The errors in an exception group, at any depth, in order."""
    found: list[BaseException] = []
    for each in failures.exceptions:
        found += _errors_in(each) if isinstance(each, BaseExceptionGroup) else [each]
    return found
