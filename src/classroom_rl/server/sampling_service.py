"""Runs sample requests by id. While the teacher's weights stay the same, each request runs only once, no matter how
often and over how many connections it is sent.

The last responses stay in memory. The journal holds all conversations, including those of earlier servers.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from classroom_rl.config.values import LARGEST_BATCH
from classroom_rl.errors import DataError, EngineFailure, PolicyMismatch, RequestConflict, UnknownConversation
from classroom_rl.models.policy_folder import check_policy, inside_run_folder, moved_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.weight_transfer import TensorInfo, TransferGroup
from classroom_rl.rollout.environment import Environment, environment_of, phases_of
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.scheduler import ConcurrentSchedule, PhasedSchedule, Schedule
from classroom_rl.rollout.store.journal import Journal, request_of
from classroom_rl.rollout.tokens import replay_tokens
from classroom_rl.rollout.trajectory import TOKEN_FIELDS, Trajectory
from classroom_rl.server.engine_sleep import EngineSleep
from classroom_rl.server.open_models import open_roles
from classroom_rl.server.schemas import PlayedResponse

if TYPE_CHECKING:
    from classroom_rl.config.evaluation import EvalConfig
    from classroom_rl.config.train_rl import TrainRLConfig

logger = logging.getLogger(__name__)

_RECORDS_FREED_AT_ONCE = 64


@dataclass
class _Batch:
    """The run of one request, finished or not.

    Attributes:
        digest: a fingerprint of the request.
        task: plays the conversations.
        weights: a fingerprint of the weights that it began with; None if it has not begun.
        given_up: whether it was cancelled because other weights were loaded.
        played: set once the policy is not needed any more.
        waiting: the number of connections that wait for the response.
        body: serialises the response, once for all waiting connections; None if none waits.
    """

    digest: str
    task: "asyncio.Task[SampleResponse]"
    weights: str | None = None
    given_up: bool = False
    played: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    body: "asyncio.Task[bytes] | None" = None

    async def as_json(self) -> bytes:
        self.waiting += 1
        try:
            response = await asyncio.shield(self.task)
            if self.body is None:
                self.body = asyncio.create_task(response.as_json())
            return await asyncio.shield(self.body)
        finally:
            self.waiting -= 1
            if self.waiting == 0:
                self.body = None


class SamplingService:
    """Runs sample requests with the runner, and keeps their answers.

    Args:
        keep: the number of responses that stay in memory; older ones are restored from the journal.

    Attributes:
        plays: a fingerprint of the configuration, sent with every response.
        runner: plays the batches.
        environment: the environment that is played.
        journal: the journal of this server.
        engine_sleep: puts the engines to sleep and wakes them.
    """

    plays = ""

    def __init__(self, runner: Runner, journal: Journal, keep: int = 8, engine_sleep: EngineSleep | None = None):
        self.runner = runner
        self.environment = runner.environment
        self.journal = journal
        self.engine_sleep = engine_sleep or EngineSleep({}, timeout_s=0.0)
        self._keep = keep
        self._batches: OrderedDict[str, _Batch] = OrderedDict()
        self._failure: EngineFailure | None = None
        self._receiving: asyncio.Future[None] | None = None

    async def sample(self, request: SampleRequest) -> SampleResponse:
        """Run a request and return its response. A request that ran or is running with the teacher's current weights
        does not run again; nor does one with the previous weights, if it asks for their policy. Turns that these
        weights played and the journal holds are replayed, not sampled again.

        Raises:
            RequestConflict: if the id was used with another body.
            DataError: if the request asks for more conversations than a server holds.
            PolicyMismatch: if it was cancelled because the same request came again after other weights were loaded.
            ClassroomError: any error of the environment; the id can be used again afterwards.
        """
        return await asyncio.shield((await self._batch(request)).task)

    async def sample_as_json(self, request: SampleRequest) -> bytes:
        """Run a request as `sample` does, and return its response as JSON. Raises as `sample` does."""
        return await (await self._batch(request)).as_json()

    async def play_as_json(self, request: SampleRequest) -> bytes:
        """Run a request as `sample` does, but respond as soon as the policy is not needed any more, perhaps long before
        the conversations are judged. Raises as `sample` does."""
        batch = await self._batch(request)
        played_task = asyncio.create_task(batch.played.wait())
        try:
            await asyncio.wait((played_task, batch.task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            played_task.cancel()
        if batch.task.done():
            batch.task.result()  # raises the error of a batch that failed
        return PlayedResponse(request_id=request.request_id).model_dump_json().encode()

    async def _batch(self, request: SampleRequest) -> _Batch:
        if len(request.problems) > LARGEST_BATCH:
            raise DataError(
                f"Request {request.request_id} asks for {len(request.problems)} conversations, but a server holds "
                f"{LARGEST_BATCH} at once: split the request."
            )
        digest = request.digest
        while (batch := self._batches.get(request.request_id)) is not None:
            if batch.digest != digest:
                raise RequestConflict(f"Request id {request.request_id} was used with another body: choose a new id.")
            if batch.weights in (None, self.environment.roles.policy.weights):
                break
            if self.runner.began_before(request, batch.weights):
                break
            # Other weights have been loaded since: play the batch again. Meanwhile another connection may have started
            # it, so look again.
            await self._give_up(request.request_id, batch)
        if batch is None or (request.judge_again and _lacks_verdicts(batch.task)):
            task = asyncio.create_task(self._run(request))
            batch = self._batches[request.request_id] = _Batch(digest, task)
        return batch

    async def _give_up(self, request_id: str, batch: _Batch) -> None:
        """Cancel a batch of other weights and wait for its end, so that it writes nothing more to the journal."""
        logger.warning("request %s is asked for again under other weights: it is played anew", request_id)
        batch.given_up = True
        batch.task.cancel()
        await asyncio.gather(batch.task, return_exceptions=True)
        self._forget(request_id, batch)

    def _forget(self, request_id: str, batch: _Batch) -> None:
        if self._batches.get(request_id) is batch:
            del self._batches[request_id]

    async def wait_as_json(self, request_id: str) -> bytes:
        """Return the response to an earlier request, as JSON. Raises an `UnknownConversation` if there was no request
        with this id, or it failed, or its response was dropped."""
        batch = self._batches.get(request_id)
        if batch is None:
            raise UnknownConversation(f"No request {request_id} runs here: send it with POST /sample_conversations.")
        return await batch.as_json()

    def record(self, conversation_id: str) -> Trajectory:
        """Return the record of a conversation that finished in this run folder. Raises an `UnknownConversation` if no
        conversation with this id did."""
        events = self.journal.events(conversation_id)
        records = [event["record"] for event in events if event["event"] == "conversation"]
        if not records:
            raise UnknownConversation(
                f"There is no finished conversation {conversation_id}. Ids come from /sample_conversations."
            )
        buffer = replay_tokens(events)
        tokens = {name: getattr(buffer, name) if buffer else [] for name in TOKEN_FIELDS}
        return self.environment.Record.model_validate(records[-1] | tokens)

    def reward(self, name: str, conversation_id: str) -> float | None:
        """Return one reward of an episode that finished in this run folder. Rewards that this server computed are in
        memory. Those of an earlier server, and rewards without a weight in this run, are computed from the episode's
        record.

        Raises:
            UnknownConversation: if no episode with this id finished, or there is no such reward.
            DataError: if the episode lacks what the reward is computed from.
        """
        rewards = self.runner.rewards.get(conversation_id)
        if rewards is not None and name in rewards:
            return rewards[name]
        return self.environment.reward_of(name, self.record(conversation_id))

    def played_with(self, conversations: Iterable[str]) -> dict[str, str | None]:
        """Return, for each request that these conversations belong to, the fingerprint of the weights it was played
        with; None for a request that never began."""
        events = {request: self.journal.begun(request) for request in set(map(request_of, conversations))}
        return {request: event["weights"] if event is not None else None for request, event in events.items()}

    def check_alive(self) -> None:
        """Raise an `EngineFailure` if an engine died or failed in a batch, even if no connection waited for that
        batch."""
        if self._failure is not None:
            raise self._failure
        self.environment.roles.check_alive()

    @property
    def running(self) -> list[str]:
        """The ids of the requests that are running."""
        return [request_id for request_id, batch in self._batches.items() if not batch.task.done()]

    async def load_policy(self, folder: Path, policy: PolicyVersion, timeout_s: float) -> str:
        """Load published weights into the teacher's engine, and record them in the journal, so that a restarted server
        loads the same ones. Returns their fingerprint."""
        teacher = self.environment.roles.policy
        async with self.engine_sleep.room_for_loading(self.environment.roles.policy_role):
            await teacher.load_policy(folder, policy, timeout_s)
        self.journal.write_weights(policy, teacher.weights, folder)
        return teacher.weights

    async def receive_policy(
        self, group: TransferGroup, tensors: Sequence[TensorInfo], policy: PolicyVersion, folder: Path, timeout_s: float
    ) -> str:
        """Receive weights from the trainer's memory into the teacher's engine, and return their fingerprint.

        Args:
            folder: where the trainer writes this version if it also writes it to disk. It is recorded in the journal: a
                restarted server loads it from there, or waits for the trainer to send it again.

        Raises:
            EngineFailure: if the weights did not come, or `stop_receiving` was called.
        """
        teacher = self.environment.roles.policy
        async with self.engine_sleep.room_for_loading(self.environment.roles.policy_role):
            self._receiving = asyncio.ensure_future(teacher.receive_policy(group, tensors, policy, timeout_s))
            try:
                await self._receiving
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():
                    raise
                raise EngineFailure(f"The trainer gave up sending policy {policy}.") from None
            finally:
                self._receiving = None
        self.journal.write_weights(policy, teacher.weights, folder)
        return teacher.weights

    def stop_receiving(self) -> None:
        """Give up the weights that are being received, if any: nobody sends them any more, and NCCL would wait for them
        until the deadline."""
        if self._receiving is not None:
            self._receiving.cancel()

    async def restore_policy(self, run_folder: Path, timeout_s: float) -> None:
        """Load the weights that the previous server had, if their folder still exists, so that its unfinished batch can
        continue.

        Args:
            run_folder: the run's; the journal of a further server is in a folder inside it.
        """
        event = self.journal.loaded_weights()
        if event is None:
            return
        policy = PolicyVersion(**event["version"])
        try:
            run_folder = run_folder.resolve()
            folder = inside_run_folder(run_folder, moved_policy(run_folder, event["path"]))
            check_policy(folder, policy)
            async with self.engine_sleep.room_for_loading(self.environment.roles.policy_role):
                await self.environment.roles.policy.load_policy(folder, policy, timeout_s)
        except DataError as error:
            logger.warning("the last policy of this run, %s, cannot be taken up again: %s", policy, error)
            return
        logger.info("the teacher has the weights of %s again, as before", policy)

    async def _run(self, request: SampleRequest) -> SampleResponse:
        batch = self._batches[request.request_id]
        _, batch.weights = self.runner.weights_for(request)
        try:
            response = await self.runner.sample(request, batch.played.set)
            response = response.model_copy(update={"plays": self.plays})
        except BaseException as failure:  # also a cancellation: the id can be used again in any case
            self._forget(request.request_id, batch)
            if isinstance(failure, EngineFailure):
                self._failure = failure
            if batch.given_up and isinstance(failure, asyncio.CancelledError):
                raise PolicyMismatch(
                    f"Request {request.request_id} was given up: other weights were loaded, and it was asked for again."
                ) from None
            raise
        await self._drop_oldest()
        return response

    async def _drop_oldest(self) -> None:
        finished_ids = [request_id for request_id, batch in self._batches.items() if batch.task.done()]
        # Remove all of them before the first await, at which other requests may run.
        dropped_tasks = [self._batches.pop(request_id).task for request_id in finished_ids[: -self._keep]]
        while dropped_tasks:
            task = dropped_tasks.pop()
            records = [] if task.cancelled() or task.exception() else list(task.result().conversations)
            del task  # it holds the response, so its records would stay alive
            while records:  # freeing thousands of records at once would block the event loop
                del records[-_RECORDS_FREED_AT_ONCE:]
                await asyncio.sleep(0)


def _lacks_verdicts(task: "asyncio.Task[SampleResponse]") -> bool:
    return task.done() and any(record.reward is None for record in task.result().conversations)


async def open_service(
    config: "TrainRLConfig | EvalConfig", reward_weights: dict[str, float], run_folder: Path
) -> SamplingService:
    """Load the models of a configuration and open its environment with them. The journal is in `run_folder`. Raises an
    `EngineFailure` if a model cannot be loaded."""
    roles = await open_roles(config, reward_weights, run_folder)
    journal = Journal(run_folder)
    environment = environment_of(config).open_with(config, roles, journal, reward_weights)
    engine_sleep, schedule = await _open_schedule(config, environment)
    return SamplingService(Runner(environment, journal, reward_weights, schedule), journal, engine_sleep=engine_sleep)


async def _open_schedule(
    config: "TrainRLConfig | EvalConfig", environment: Environment
) -> tuple[EngineSleep, Schedule]:
    engines, timeout_s = environment.roles.engines, config.generation.load_weights_timeout_s
    phases = phases_of(config)
    if not phases:
        return EngineSleep(engines, timeout_s), ConcurrentSchedule()
    engine_sleep = EngineSleep(engines, timeout_s, wanted=phases[0].roles)
    await engine_sleep.wake_only(phases[0].roles)
    return engine_sleep, PhasedSchedule(engine_sleep.wake_only, phases)
