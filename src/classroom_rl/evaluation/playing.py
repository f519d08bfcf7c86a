"""Plays the conversations of an evaluation with one tutor, in this process or on a running server.

Every tutor gets the same problems, seeds and error schedules. All conversations on one problem are in one request,
because the seed of a conversation depends on its position in the request.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional
from uuid import uuid4

from classroom_rl.config.evaluation import EvalConfig, is_measured_by_solutions, reward_weights, without_zeros
from classroom_rl.config.values import GREEDY, SAMPLED, SUPERVISED
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.errors import ConfigError, DeadlineExceeded, PolicyMismatch
from classroom_rl.evaluation.counterfactuals.comparing import Compared, compare_messages
from classroom_rl.evaluation.extra_judges import label_errors
from classroom_rl.evaluation.metrics.language import ErrorLabels
from classroom_rl.evaluation.metrics.maths import InitialSolutions, initial_solutions
from classroom_rl.evaluation.progress import EvaluationProgress, gather_or_stop
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.engine import EngineHealth
from classroom_rl.rollout.problem import Problem, material_of
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.scheduler import Schedule
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.server.schemas import Health

if TYPE_CHECKING:
    from classroom_rl.server.client import ClassroomClient

CONVERSATIONS_PER_REQUEST = 16
REQUESTS_IN_FLIGHT = 16


@dataclass
class EvaluatedTutor:
    """The tutor that is evaluated: the function that plays its conversations, its engine and its policy version. For a
    tutor in this process also the roles of all models, their schedule and the journal."""

    sample: Callable[[SampleRequest], Awaitable[SampleResponse]]
    teacher: EngineHealth
    policy: PolicyVersion
    roles: Optional[Roles] = None
    schedule: Optional[Schedule] = None
    journal: Optional[Journal] = None


@dataclass
class EvaluationResult:
    """The result of evaluating one tutor.

    Attributes:
        about: the entries of metrics.json about the whole evaluation.
        records: each conversation as (sampling, record).
        labels: the judge's labels of the student's errors, if a judge was asked.
        initial: of maths, the student's solutions before the dialogue, if known.
        scores: of maths, for each record the pedagogical reward of each teacher message, if it is measured.
        compared: the tutor's messages compared with alternatives, if `counterfactuals` asks for it.
    """

    about: dict[str, Any]
    records: list[tuple[str, ConversationRecord]] = field(default_factory=list)
    labels: Optional[ErrorLabels] = None
    initial: Optional[InitialSolutions] = None
    scores: Optional[list[list[float]]] = None
    compared: Optional[Compared] = None

    def of(self, sampling: str) -> list[ConversationRecord]:
        """The conversations of one sampling."""
        return [record for name, record in self.records if name == sampling]

    def scores_of(self, sampling: str) -> Optional[list[list[float]]]:
        """`scores` of the conversations of one sampling."""
        if self.scores is None:
            return None
        return [scores for (name, _), scores in zip(self.records, self.scores, strict=True) if name == sampling]


async def play_all(
    config: EvalConfig, problems: Sequence[Problem], folder: Path, initial: Optional[InitialSolutions] = None
) -> EvaluationResult:
    """Play all conversations of one tutor, and shut its models down.

    Args:
        initial: the student's solutions before the dialogue, where an evaluation of another tutor has them already.

    Raises:
        ConfigError: if the tutor should be supervised, but none of its messages was reviewed; or if a server sums up
            rewards by other weights than `reward_weights` asks for.
        PolicyMismatch: if the server's tutor changed while it was measured.
        EngineFailure, DeadlineExceeded: if the tutor cannot be reached, or does not answer.
    """
    tutor_context = _tutor_in_process(config, folder) if config.server_url is None else _tutor_on_server(config)
    async with tutor_context as tutor:
        started = time.monotonic()
        about = {
            "tutor": tutor.teacher.model,
            "policy": {"run_id": tutor.policy.run_id, "version": tutor.policy.version},
            "engine": {"name": tutor.teacher.engine, "version": tutor.teacher.engine_version},
            "server_url": config.server_url,
            "seed": config.seed,
            "problems": len(problems),
            "num_samples_per_problem": config.num_samples_per_problem,
        }
        result = EvaluationResult(about)
        if is_measured_by_solutions(config):
            if initial is None:
                initial = await initial_solutions(config, problems, tutor.roles, folder)
            result.initial = initial
        run = uuid4().hex[:12]
        for sampling in config.samplings:
            requests = list(make_requests(problems, config, sampling, tutor.policy, run))
            conversations = await _play(tutor, requests, sampling, config.reward_weights)
            if sampling == SUPERVISED:
                _check_reviewed(conversations)
            result.records += [(sampling, record) for record in conversations]
        if tutor.roles is not None and not is_measured_by_solutions(config):
            records = [record for _, record in result.records]
            result.labels = await label_errors(config, tutor.roles, tutor.schedule, records)
        if config.counterfactuals.forks > 0:
            models = (tutor.roles, tutor.schedule, tutor.journal)
            result.compared = await compare_messages(config, *models, result.of(SAMPLED), problems, folder)
        if tutor.roles is not None:
            result.about["paid"] = {role: asdict(api.ledger.spending()) for role, api in tutor.roles.apis.items()}
        result.about["seconds"] = round(time.monotonic() - started, 3)
    return result


def make_requests(
    problems: Sequence[Problem], config: EvalConfig, sampling: str, policy: PolicyVersion, run: str
) -> Iterator[SampleRequest]:
    """The requests for all conversations of one sampling. Apart from their ids, they are the same for every tutor.

    Args:
        run: a unique name of this evaluation. A server answers a known request id with the batch that it already has;
            the name keeps a second evaluation of the same tutor from getting the batches of the first.
    """
    samples = config.num_samples_per_problem
    per_request = max(1, CONVERSATIONS_PER_REQUEST // samples)
    for number, start in enumerate(range(0, len(problems), per_request)):
        group = problems[start : start + per_request]
        repeated = [problem for problem in group for _ in range(samples)]
        yield SampleRequest(
            problems=[problem.text for problem in repeated],
            answers=[problem.answer for problem in repeated],
            post_test_material=material_of(repeated),
            request_id=f"eval-{run}-v{policy.version}-{sampling}-seed{config.seed}-{number:04d}",
            seed=config.seed,
            step=0,
            greedy=sampling == GREEDY,
            fixed_seeds=True,
            supervised=sampling == SUPERVISED,
        )


async def _play(
    tutor: EvaluatedTutor, requests: Sequence[SampleRequest], sampling: str, weights: Optional[Mapping[str, float]]
) -> list[ConversationRecord]:
    """Send the requests; returns the records of all of them, in order."""
    slots = asyncio.Semaphore(REQUESTS_IN_FLIGHT)
    total = sum(len(request.problems) for request in requests)

    async def ask(request: SampleRequest) -> list[ConversationRecord]:
        async with slots:
            response = await tutor.sample(request)
        if response.policy != tutor.policy:
            raise PolicyMismatch(
                f"The tutor changed while it was measured: from {tutor.policy} to {response.policy}. "
                "Evaluate when no training publishes to this server."
            )
        if (
            tutor.roles is None
            and weights is not None
            and without_zeros(response.reward_weights) != without_zeros(weights)
        ):
            raise ConfigError(
                f"The server sums up rewards by {response.reward_weights}, but this evaluation by {dict(weights)}: set "
                "reward_weights to the server's own, or start it with the same train.reward_weights."
            )
        progress.add(len(response.conversations))
        return response.conversations

    with EvaluationProgress(total, f"evaluating ({sampling})", "conversations") as progress:
        answers = await gather_or_stop(map(ask, requests))
    return [record for records in answers for record in records]


def _check_reviewed(records: Sequence[ConversationRecord]) -> None:
    """Refuse supervised conversations in which no message of the tutor was reviewed: their metrics would look like
    those with a supervisor."""
    tutor_turns = [turn for record in records for turn in record.turns if turn.role == "teacher" and not turn.given]
    if tutor_turns and all(turn.review is None for turn in tutor_turns):
        raise ConfigError(
            "samplings names supervised, but not one message of the tutor was reviewed: the server has no supervisor "
            "(start it with supervisor_model.model_name_or_path), or generation.supervisor.share is 0. Or leave "
            "supervised out."
        )


@asynccontextmanager
async def _tutor_on_server(config: EvalConfig) -> AsyncIterator[EvaluatedTutor]:
    from classroom_rl.server.client import ClassroomClient

    client = ClassroomClient(config.server_url, sample_timeout_s=config.generation.sample_timeout_s)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(REQUESTS_IN_FLIGHT) as threads:
        health = await loop.run_in_executor(threads, _health, client)

        async def sample(request: SampleRequest) -> SampleResponse:
            return await loop.run_in_executor(threads, client.sample, request)

        yield EvaluatedTutor(sample, health.roles["teacher"], health.policy)


def _health(client: "ClassroomClient") -> Health:
    try:
        return client.health()
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"{error} Start a server with: python vllm_server.py --config-name …, or measure a model without one: "
            "server_url=null teacher_model.model_name_or_path=FOLDER"
        ) from error


@asynccontextmanager
async def _tutor_in_process(config: EvalConfig, folder: Path) -> AsyncIterator[EvaluatedTutor]:
    from classroom_rl.server.sampling_service import open_service

    service = await open_service(config, reward_weights(config), folder)
    roles = service.environment.roles
    try:
        yield EvaluatedTutor(
            service.sample,
            roles.health()["teacher"],
            roles.teacher.policy,
            roles,
            service.runner.schedule,
            service.journal,
        )
    finally:
        roles.shutdown()
