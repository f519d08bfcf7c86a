"""The runner: plays the episodes of a batch concurrently, with one coroutine per episode. Its `play_all` also plays
the rollouts of the library.

The engines batch all requests that are ready. An episode is scored as soon as it ends, while others go on.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from classroom_rl.errors import PolicyMismatch
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.engine import BATCH, Completion
from classroom_rl.rollout.environment import E, Environment, Group, Play, R
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.scheduler import ConcurrentSchedule, Schedule, YieldGate
from classroom_rl.rollout.store.journal import Journal, conversation_id
from classroom_rl.rollout.trajectory import TOKEN_FIELDS, Trajectory

logger = logging.getLogger(__name__)

REMEMBERED = 8192
"""The number of episodes whose rewards stay in memory, at half a kilobyte each: twice the largest batch, since a
trainer may ask for the rewards of one batch while the next is played. All others are in the journal."""


P = TypeVar("P")


class Runner(Generic[E, R]):
    """Plays batches of episodes.

    Args:
        environment: the environment that they are played in.
        journal: every event is written to it before it is used.
        reward_weights: the weight of each reward in an episode's `reward`.
        schedule: decides when episodes may go on; None lets each go on at once.

    Attributes:
        running, finished: the number of episodes in play, and of those that finished since the start.
        rewards: the rewards of the last finished episodes: by id, then by name.
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
        self._yield_gate = YieldGate()
        self.reward_weights = dict(reward_weights)
        self.running = self.finished = 0
        self.rewards: dict[str, Mapping[str, float | None]] = {}

    async def sample(self, request: SampleRequest, when_played: Callable[[], None] = lambda: None) -> SampleResponse:
        """Play and score one episode per entry of the request. Events that the journal holds from the same weights are
        replayed, not repeated.

        Args:
            when_played: called once the policy is no longer needed: from then on other weights may be loaded.

        Raises:
            PolicyMismatch: if the loaded weights are not those that the request names, or if they change while it is
                played, even if the new ones have the same policy version.
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
        awaiting_policy = _AwaitingPolicy(environment, plays, when_played)
        if awaiting_policy.indices:
            # `policy` may be the one that was loaded before, which can no longer be called.
            check_policy(request, environment.roles.policy.policy)
        played: list[Trajectory | None] = [None] * len(plays)
        try:
            with self.schedule.register(len(plays)) as registration:

                async def play_one(play: Play[E, R]) -> None:
                    played[play.index] = await self._play(replace(play, registration=registration), awaiting_policy)

                await play_all(plays, play_one, self._yield_gate)
        except Exception:
            for api in environment.roles.apis.values():
                await api.drain()  # requests in flight are paid for: let them end
            raise
        return SampleResponse(
            request_id=request.request_id,
            policy=policy,
            conversations=played,
            reward_weights=self.reward_weights,
            usage={role: api.ledger.usage(request.request_id) for role, api in environment.roles.apis.items()},
            seconds_after_policy=asyncio.get_running_loop().time() - awaiting_policy.ended,
        )

    def weights_for(self, request: SampleRequest) -> tuple[PolicyVersion | None, str]:
        """The policy that a request is played with, and the fingerprint of its weights: those that are loaded now, or
        those that were loaded before if the request began with them."""
        batch = self._journal.begun(request.request_id)
        if batch is not None and batch["body"] == self._body(request) and self.began_before(request, batch["weights"]):
            return request.wanted_policy, batch["weights"]
        return self.environment.roles.policy.policy, self.environment.roles.policy.weights

    def began_before(self, request: SampleRequest, weights: str) -> bool:
        """Whether a request asks for the policy that was loaded before the current one, and these were its weights.
        Such a request may still wait for its judge, but the policy is not called any more."""
        wanted_policy = request.wanted_policy
        if wanted_policy is None or wanted_policy == self.environment.roles.policy.policy:
            return False
        return self._journal.earlier_weights() == (wanted_policy, weights)

    async def _open(self, request: SampleRequest, weights: str) -> list[Play[E, R]]:
        groups: dict[str, Group] = {}
        plays = []
        for index, problem in enumerate(request.all_problems()):
            await self._yield_gate.go_through()
            episode = self.environment.open(conversation_id(request.request_id, index), problem, request)
            self.rewards.pop(episode.id, None)  # from an earlier try, perhaps with other weights
            replayed = self.environment.replay(episode, self._journal.events(episode.id), request.judge_again)
            group = groups.setdefault(problem.id, Group())
            play = Play(episode, request, index, len(group.episodes), weights, replayed, group=group)
            group.episodes.append(episode)
            plays.append(play)
        return plays

    async def _play(self, play: Play[E, R], awaiting_policy: "_AwaitingPolicy") -> Trajectory:
        episode = play.episode
        self.running += 1
        try:
            while not episode.finished:
                await play.registration.wait_for_phase(episode.state)
                await self._yield_gate.go_through()
                await self.environment.advance(play)
                awaiting_policy.update(play)
        finally:  # it ended, or failed
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
        """A hash of the request and the environment's identity: if it changes, the batch is played again from the
        start."""
        return hashlib.sha256(repr((request.digest, *self.environment.identity)).encode()).hexdigest()


async def play_all(plays: list[P | None], play: Callable[[P], Coroutine[Any, Any, None]], gate: YieldGate) -> None:
    """Play episodes concurrently, each in a coroutine of its own: `play(entry)`.

    Args:
        plays: its entries become None, so that each play is freed as it ends, not all at once.

    Raises:
        Exception: the first error of an episode. All others are cancelled, and their own errors are logged.
    """
    errors: list[BaseException] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(plays)):
                await gate.go_through()
                entry, plays[index] = plays[index], None
                tasks.create_task(play(entry))
                del entry  # otherwise this name would keep the last play alive until all have ended
    except BaseExceptionGroup as failures:
        errors = _errors_in(failures)
    if errors:  # raised here, where it keeps its own cause
        first, *others = errors
        for message in dict.fromkeys(str(error) for error in others if str(error) != str(first)):
            logger.warning("another episode failed, too: %s", message)
        raise first


class _AwaitingPolicy:
    """The episodes of a request in which the policy may still be called.

    Args:
        when_played: called once, when no such episode is left.

    Attributes:
        indices: their indices in the request.
        ended: when the last of them left, by the event loop's clock; without any, when the request began.
    """

    def __init__(self, environment: Environment, plays: Sequence[Play], when_played: Callable[[], None]):
        self._needs_policy, self._when_played = environment.needs_policy, when_played
        self.indices = {play.index for play in plays if environment.needs_policy(play.episode)}
        self.ended = asyncio.get_running_loop().time()
        if not self.indices:
            when_played()

    def update(self, play: Play) -> None:
        """Check an episode again after one of its steps."""
        if play.index in self.indices and not self._needs_policy(play.episode):
            self.indices.discard(play.index)
            self.ended = asyncio.get_running_loop().time()
            if not self.indices:
                self._when_played()


def weighted_sum(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """The reward to train on; None if any of the weighted rewards is None."""
    parts = [rewards[name] for name in weights]
    if any(part is None for part in parts):
        return None
    return sum(weight * rewards[name] for name, weight in weights.items())


def check_policy(request: SampleRequest, loaded: PolicyVersion | None) -> None:
    """Raise a `PolicyMismatch` if the request names another policy than the loaded one."""
    wanted_policy = request.wanted_policy
    if wanted_policy is not None and wanted_policy != loaded:
        raise PolicyMismatch(
            f"Request {request.request_id} asks for policy {wanted_policy}, but {loaded} is loaded. While a training "
            "uses this server, wait for its end; otherwise publish the weights with POST /load_weights."
        )


def check_answer(play: Play[Any, Any], answer: Completion) -> None:
    """Check that an answer was sampled with the weights that its batch began with: a restarted trainer may publish
    other weights under the same policy version. Raises a `PolicyMismatch` if it was not."""
    check_policy(play.request, answer.policy)
    if play.request.wanted_policy is not None and answer.weights != play.weights:
        raise PolicyMismatch(
            f"Other weights were loaded as policy {answer.policy} while request {play.request.request_id} was "
            "being played. Ask for it again: it is then played with these alone."
        )


def _problems_once(request: SampleRequest) -> dict[str, list]:
    """The distinct (problem, answer) pairs of a batch in `problems`, and the index of each episode's pair in
    `problem_of`."""
    pairs = list(zip(request.problems, request.answers, strict=True))
    index_of = {pair: index for index, pair in enumerate(dict.fromkeys(pairs))}
    return {"problems": list(index_of), "problem_of": [index_of[pair] for pair in pairs]}


def _errors_in(failures: BaseExceptionGroup) -> list[BaseException]:
    """The errors in an exception group, at any depth, in order."""
    errors: list[BaseException] = []
    for failure in failures.exceptions:
        errors += _errors_in(failure) if isinstance(failure, BaseExceptionGroup) else [failure]
    return errors
