"""The conversations of a measurement: fixed ones, played with one tutor, in this process or on a running server.

The same problems, seeds and error schedules meet every tutor. The conversations on one problem always travel in one
request: their position in it is part of what seeds them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional
from uuid import uuid4

from config.eval_model import EvalConfig, is_measured_by_solutions, reward_weights
from src.classroom.record import ConversationRecord
from src.classroom.seats import Seats
from src.errors import DeadlineExceeded, PolicyMismatch
from src.evaluation.error_labels import Labels, label_errors
from src.evaluation.progress import Progress
from src.evaluation.solve_alone import InitialSolutions, initial_solutions
from src.models.policy_version import PolicyVersion
from src.rollout.engines import EngineHealth
from src.rollout.problem import Problem
from src.rollout.requests import SampleRequest, SampleResponse
from src.rollout.scheduler import Schedule
from src.server.schemas import Health

if TYPE_CHECKING:
    from src.server.client import ClassroomClient

CONVERSATIONS_PER_REQUEST = 16
REQUESTS_IN_FLIGHT = 16


@dataclass
class Tutor:
    """Whoever is measured: how it is asked for conversations, what it is, and the models beside it if they are in this
    process."""

    sample: Callable[[SampleRequest], Awaitable[SampleResponse]]
    teacher: EngineHealth
    policy: PolicyVersion
    seats: Optional[Seats] = None
    schedule: Optional[Schedule] = None


@dataclass
class Found:
    """What came of an evaluation: (sampling, record) of each conversation, what metrics.json says of the whole, the
    student's solutions before the dialogue, if they are known, and a judge's labels of the student's errors, if one was
    asked."""

    records: list[tuple[str, ConversationRecord]]
    about: dict[str, Any]
    initial: Optional[InitialSolutions] = None
    labels: Optional[Labels] = None


async def play_all(config: EvalConfig, problems: Sequence[Problem], folder: Path) -> Found:
    """Hold all conversations of one tutor, and end its models.

    Raises:
        PolicyMismatch: if the server's tutor changed while it was measured.
        EngineFailure, DeadlineExceeded: if the tutor cannot be reached, or does not answer.
    """
    async with _open_tutor(config, folder) as tutor:
        started = time.monotonic()
        found = Found(
            [],
            {
                "tutor": tutor.teacher.model,
                "policy": {"run_id": tutor.policy.run_id, "version": tutor.policy.version},
                "engine": {"name": tutor.teacher.engine, "version": tutor.teacher.engine_version},
                "server_url": config.server_url,
                "seed": config.seed,
                "problems": len(problems),
                "num_samples_per_problem": config.num_samples_per_problem,
            },
        )
        if is_measured_by_solutions(config):
            found.initial = await initial_solutions(config, problems, tutor.seats, folder)
        run = uuid4().hex[:12]
        for sampling in config.samplings:
            requests = list(make_requests(problems, config, sampling, tutor.policy, run))
            found.records += [(sampling, record) for record in await _play(tutor, requests, sampling)]
        if tutor.seats is not None and not is_measured_by_solutions(config):
            records = [record for _, record in found.records]
            found.labels = await label_errors(config, tutor.seats, tutor.schedule, records)
        if tutor.seats is not None:
            found.about["paid"] = {seat: asdict(api.ledger.spending()) for seat, api in tutor.seats.apis.items()}
        found.about["seconds"] = round(time.monotonic() - started, 3)
    return found


def make_requests(
    problems: Sequence[Problem], config: EvalConfig, sampling: str, policy: PolicyVersion, run: str
) -> Iterator[SampleRequest]:
    """The conversations of one sampling as requests; everything in them but their ids is the same for every tutor.

    Args:
        run: names this measurement: a second one of the same tutor must not be answered from the first one's batches.
    """
    samples = config.num_samples_per_problem
    per_request = max(1, CONVERSATIONS_PER_REQUEST // samples)
    for number, first in enumerate(range(0, len(problems), per_request)):
        group = problems[first : first + per_request]
        repeated = [problem for problem in group for _ in range(samples)]
        yield SampleRequest(
            problems=[problem.text for problem in repeated],
            answers=[problem.answer for problem in repeated],
            request_id=f"eval-{run}-v{policy.version}-{sampling}-seed{config.seed}-{number:04d}",
            seed=config.seed,
            step=0,
            greedy=sampling == "greedy",
            fixed_seeds=True,
        )


async def _play(tutor: Tutor, requests: Sequence[SampleRequest], sampling: str) -> list[ConversationRecord]:
    """The records of all requests, in order."""
    slots = asyncio.Semaphore(REQUESTS_IN_FLIGHT)
    total = sum(len(request.problems) for request in requests)
    progress = Progress(total, f"evaluating ({sampling})", "conversations")

    async def ask(request: SampleRequest) -> list[ConversationRecord]:
        async with slots:
            response = await tutor.sample(request)
        if response.policy != tutor.policy:
            raise PolicyMismatch(
                f"The tutor changed while it was measured: from {tutor.policy} to {response.policy}. "
                "Evaluate when no training publishes to this server."
            )
        progress.add(len(response.conversations))
        return response.conversations

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(request)) for request in requests]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        progress.close()
    return [record for task in tasks for record in task.result()]


@asynccontextmanager
async def _open_tutor(config: EvalConfig, folder: Path) -> AsyncIterator[Tutor]:
    if config.server_url is not None:
        async with _tutor_on_server(config) as tutor:
            yield tutor
    else:
        async with _tutor_in_process(config, folder) as tutor:
            yield tutor


@asynccontextmanager
async def _tutor_on_server(config: EvalConfig) -> AsyncIterator[Tutor]:
    from src.server.client import ClassroomClient

    client = ClassroomClient(config.server_url, sample_timeout_s=config.generation.sample_timeout_s)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(REQUESTS_IN_FLIGHT) as threads:
        health = await loop.run_in_executor(threads, _health, client)

        async def sample(request: SampleRequest) -> SampleResponse:
            return await loop.run_in_executor(threads, client.sample, request)

        yield Tutor(sample, health.seats["teacher"], health.policy)


def _health(client: "ClassroomClient") -> Health:
    try:
        return client.health()
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"{error} Start a server with: python vllm_server.py --config-name …, or measure a model without one: "
            "server_url=null teacher_model.model_name_or_path=FOLDER"
        ) from error


@asynccontextmanager
async def _tutor_in_process(config: EvalConfig, folder: Path) -> AsyncIterator[Tutor]:
    from src.server.sampling_service import open_service

    service = await open_service(config, reward_weights(config), folder)
    seats = service.environment.seats
    try:
        yield Tutor(service.sample, seats.health()["teacher"], seats.teacher.policy, seats, service.runner.schedule)
    finally:
        seats.shutdown()
