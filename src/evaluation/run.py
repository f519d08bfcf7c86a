"""Measures a tutor: plays fixed conversations with it, and writes what came of them into a run folder.

The same problems, seeds and error schedules meet every tutor. The conversations on one problem always travel in one
request: their position in it is part of what seeds them.
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional
from uuid import uuid4

from tqdm import tqdm

from config.checks import solutions_are_graded
from config.eval_model import EvalConfig, reward_weights
from config.load import record_run
from src.api import ConversationRecord, EngineHealth, Health, SampleRequest, SampleResponse
from src.data import Problem, load_problems
from src.errors import DeadlineExceeded, PolicyMismatch
from src.evaluation.exchanges import read_exchanges
from src.evaluation.metrics import summarise
from src.evaluation.records import write_records
from src.evaluation.tables import measurement_table
from src.turns import PolicyVersion

if TYPE_CHECKING:
    from src.vllm.client import ClassroomClient

logger = logging.getLogger(__name__)

CONVERSATIONS_PER_REQUEST = 16
REQUESTS_IN_FLIGHT = 16
SECONDS_BETWEEN_LINES = 10.0


@dataclass
class Tutor:
    """Whoever is measured: how it is asked for conversations, and what it is."""

    sample: Callable[[SampleRequest], Awaitable[SampleResponse]]
    teacher: EngineHealth
    policy: PolicyVersion


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """Measure one tutor and write `metrics.json` and `conversations.parquet` into `logging.save_dir`.

    Returns:
        What stands in metrics.json.

    Raises:
        DataError: if there is no problem to measure it on.
        PolicyMismatch: if the server's tutor changed while it was measured.
        EngineFailure, DeadlineExceeded: if the tutor cannot be reached, or does not answer.
    """
    problems = load_problems(config.dataset.eval_datasets, config.dataset.max_val_examples, config.seed)
    folder = record_run(config, "eval")
    metrics, records = asyncio.run(_measure(config, problems, folder))
    write_records(folder / "conversations.parquet", records)
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(measurement_table(metrics))
    print(f"\n{folder / 'metrics.json'}\n{folder / 'conversations.parquet'}")
    return metrics


async def _measure(
    config: EvalConfig, problems: Sequence[Problem], folder: Path
) -> tuple[dict[str, Any], list[tuple[str, ConversationRecord]]]:
    async with _open_tutor(config, folder) as tutor:
        metrics: dict[str, Any] = {
            "tutor": tutor.teacher.model,
            "policy": {"run_id": tutor.policy.run_id, "version": tutor.policy.version},
            "engine": {"name": tutor.teacher.engine, "version": tutor.teacher.engine_version},
            "server_url": config.server_url,
            "seed": config.seed,
            "problems": len(problems),
            "num_samples_per_problem": config.num_samples_per_problem,
            "seconds": 0.0,
        }
        records: list[tuple[str, ConversationRecord]] = []
        run = uuid4().hex[:12]
        for sampling in config.samplings:
            started = time.monotonic()
            requests = list(make_requests(problems, config, sampling, tutor.policy, run))
            found = await _play(tutor, requests, sampling)
            records += [(sampling, record) for record in found]
            metrics[sampling] = summarise(found, read_exchanges)
            metrics["seconds"] += round(time.monotonic() - started, 3)
    return metrics, records


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
    progress = _Progress(sum(len(request.problems) for request in requests), sampling)

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
    from src.vllm.client import ClassroomClient

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
    from src.batches import open_desk

    desk = await open_desk(config, reward_weights(config), solutions_are_graded(config), folder)
    seats = desk.classroom.seats
    try:
        yield Tutor(desk.sample, seats.health()["teacher"], seats.teacher.policy)
    finally:
        seats.shutdown()


class _Progress:
    """A bar in a terminal; elsewhere a line now and then."""

    def __init__(self, total: int, sampling: str):
        self._label = f"evaluating ({sampling})"
        self._total, self._done, self._last_line = total, 0, time.monotonic()
        self._bar: Optional[tqdm] = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, desc=self._label, unit=" conversations", dynamic_ncols=True)

    def add(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._done == self._total or time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            logger.info("%s: %d of %d conversations", self._label, self._done, self._total)
            self._last_line = time.monotonic()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
