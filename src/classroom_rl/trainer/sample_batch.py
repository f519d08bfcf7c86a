"""Samples a batch on the server and turns its conversations into the columns that TRL trains on: tokens, masks,
log-probs and rewards."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object

from classroom_rl.errors import ConfigError, PolicyMismatch, TooManyFailedJudgements
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.engine import Usage
from classroom_rl.rollout.problem import Problem, material_of
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.rows import POLICY
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.server.client import ClassroomClient
from classroom_rl.trainer.collective import on_every_process, to_main_process
from classroom_rl.trainer.context import TrainerContext
from classroom_rl.trainer.curriculum import Curriculum
from classroom_rl.trainer.group_variance import GroupFilter, PlayedBatch
from classroom_rl.trainer.judge_monitor import JudgeMonitor
from classroom_rl.trainer.supervision_metrics import supervision_metrics

logger = logging.getLogger(__name__)


@dataclass
class BatchInFlight:
    """One rank's part of a batch that the server plays.

    Attributes:
        step: the optimizer step that it is for.
        played: done when no message of the policy is missing, or with the error of a batch that failed before.
        answer: the judged conversations, or the error.
    """

    step: int
    played: "Future[None]" = field(default_factory=Future)
    answer: "Future[SampleResponse]" = field(default_factory=Future)


class NextBatch:
    """Sends one rank's requests, each from a thread that awaits it. At most one batch is in flight that was not taken.

    Args:
        play: sends a request and waits until no message of the policy is missing in it.
        sample: sends a request and waits for its judged conversations.
    """

    def __init__(self, play: Callable[[SampleRequest], None], sample: Callable[[SampleRequest], SampleResponse]):
        self._play, self._sample = play, sample
        self._next: BatchInFlight | None = None

    def start(self, request: SampleRequest) -> None:
        """Send a request; returns at once."""
        self._next = BatchInFlight(request.step)
        threading.Thread(target=self._run, args=(request, self._next), name="next batch", daemon=True).start()

    def _run(self, request: SampleRequest, batch: BatchInFlight) -> None:
        try:
            self._play(request)
            batch.played.set_result(None)
            # `play` has begun to repeat the judge's failed attempts, which is to be done once.
            batch.answer.set_result(self._sample(request.model_copy(update={"judge_again": False})))
        except BaseException as error:  # raised where the batch is taken
            for missing in (each for each in (batch.played, batch.answer) if not each.done()):
                missing.set_exception(error)

    def wait(self) -> None:
        """Wait until the policy is not needed in the batch any more, or it has failed: new weights must not be loaded
        before, or its conversations would be of two policies."""
        if self._next is not None:
            self._next.played.exception()

    def take(self, step: int) -> BatchInFlight | None:
        """The batch of this step; None if it was not begun."""
        batch, self._next = self._next, None
        return None if batch is None or batch.step != step else batch


LEFT_OUT = "left_out"
"""The rollout column of whether a conversation is left out of the training."""


class Planner(Protocol):
    """Adds a column to a batch: what a trainer has to know of each conversation besides its tokens and its reward."""

    column: str

    def plan(self, accelerator: Accelerator, records: Sequence[Trajectory], step: int) -> list[Any]:
        """One entry for each of this rank's conversations; all ranks call this together."""


class ClassroomRollout:
    """TRL's `rollout_func`: takes this rank's slice of problem ids, returns the tokens of their conversations.

    Args:
        problems: the training problems by id.
        reward_weights: the configured weights of the rewards.
        max_failed_share: the run stops if more than this share of a batch's conversations, over all ranks, have no
            verdict or content that the judge refused.
        judge_monitor: checks the judge during the training.
        metrics: computes the environment's own metrics of a batch.
        planner: adds a column, such as the rows beside the conversations; None if there is none to add.
        supervised: whether a supervisor reads the policy's messages.
        on_batch: called with (step, conversations) on every rank, after they were written.
        groups: leaves groups without variance out, or replaces them; None if all are kept.
        curriculum: draws the problems of each batch; None for those that TRL asks for.
        ahead: whether the next batch is played while one is judged and trained on.
    """

    def __init__(
        self,
        problems: dict[str, Problem],
        client: ClassroomClient,
        run_folder: Path,
        run_id: str,
        seed: int,
        reward_weights: dict[str, float],
        max_failed_share: float,
        judge_monitor: JudgeMonitor,
        metrics: Callable[[Sequence[Trajectory]], dict[str, float]],
        planner: Planner | None = None,
        supervised: bool = False,
        on_batch: Callable[[int, Sequence[Trajectory]], None] | None = None,
        groups: GroupFilter | None = None,
        curriculum: Curriculum | None = None,
        ahead: bool = False,
    ):
        self._problems = problems
        self._client = client
        self._run_folder = run_folder
        self._run_id = run_id
        self._seed = seed
        self._reward_weights = reward_weights
        self._max_failed_share = max_failed_share
        self._judge_monitor = judge_monitor
        self._metrics = metrics
        self._planner = planner
        self._supervised = supervised
        self._on_batch = on_batch
        self._groups = groups
        self._curriculum = curriculum
        self._next = NextBatch(client.play, self._sample) if ahead else None
        self._first = True

    def __call__(self, prompts: Sequence[str], trainer: TrainerContext) -> dict[str, list[Any]]:
        """Sample one conversation per prompt (a problem id, repeated for its group).

        Raises:
            TooManyFailedJudgements: on every rank, if judging failed for too many conversations.
            ConfigError: on every rank, if a server uses other reward weights.
            ClassroomError: on every rank, if sampling, or writing the conversations, failed on any.
        """
        started, step = time.monotonic(), trainer.state.global_step
        trainer.gpus.wake_engines()
        batch = self._play(self._problems_of(step, prompts, trainer), trainer)
        self._first = False
        records = batch.records
        checked = self._judge_monitor.check(trainer.accelerator, step, records)  # while the engines are awake
        trainer.gpus.sleep_engines()
        metrics = batch_metrics(records, batch.played) | supervision_metrics(records) | checked | batch.figures
        everyones = to_main_process(trainer.accelerator, (records, batch.usage))
        if everyones is not None:  # metrics are means over the processes that record them
            metrics |= self._metrics_of_all(everyones)
        if self._curriculum is not None:
            metrics |= self._curriculum.record(step, batch.played)
        if self._next is not None:
            metrics["policy/staleness"] = fmean(staleness(records, trainer.policy))
            if self._curriculum is not None:  # it draws by the rewards of these
                self._begin_next(trainer)
        for name, value in metrics.items():
            trainer.record_metric(name, value)
        trainer.record_metric("seconds/rollout", time.monotonic() - started)
        trainer.show_conversations(records)
        if self._on_batch is not None:
            self._on_batch(step, batch.played)
        columns = to_rollout(records)
        columns[LEFT_OUT] = [place in batch.left_out or each.unrewarded for place, each in enumerate(records)]
        if self._planner is not None:
            columns[self._planner.column] = self._planner.plan(trainer.accelerator, records, step)
        return columns

    def _metrics_of_all(
        self, everyones: Sequence[tuple[Sequence[Trajectory], Sequence[Mapping[str, Usage]]]]
    ) -> dict[str, float]:
        """The metrics that are no mean over processes, from what each of them played and used."""
        records = [record for own, _ in everyones for record in own]
        usages = [each for _, own in everyones for each in own]
        metrics = self._metrics(records) | reward_metrics([record.rewards for record in records])
        for role in dict.fromkeys(role for each in usages for role in each):
            metrics |= usage_metrics(role, [each.get(role) for each in usages])
        return metrics

    def _problems_of(self, step: int, prompts: Sequence[str], trainer: TrainerContext) -> Sequence[str]:
        """The problems of this rank's conversations: those that TRL asks for, or the curriculum's."""
        if self._curriculum is None:
            return prompts
        return self._curriculum.choose(trainer.accelerator, len(prompts), step)

    def wait_for_next(self) -> bool:
        """Wait until the policy is not needed any more in this rank's part of the next batch, before new weights are
        loaded. Returns whether batches are played ahead at all."""
        if self._next is None:
            return False
        self._next.wait()
        return True

    def _begin_next(self, trainer: TrainerContext) -> None:
        """Have the next batch played with the weights that are loaded now, while this one is judged and trained on."""
        step = trainer.state.global_step + trainer.steps_of_batch
        if step < trainer.state.max_steps:
            problems = self._problems_of(step, trainer.prompts_of(step), trainer)
            self._next.start(self._request(problems, trainer, 0, step))

    def _play(self, prompts: Sequence[str], trainer: TrainerContext) -> PlayedBatch:
        """Play a batch, with what the filter of groups does to it; all ranks call this together."""
        accelerator, step = trainer.accelerator, trainer.state.global_step

        def sample(problem_ids: Sequence[str], attempt: int) -> SampleResponse | None:
            if not problem_ids:
                return None
            if self._next is not None and attempt == 0:
                response = self._take(problem_ids, trainer)
            else:
                response = self._sample(self._request(problem_ids, trainer, attempt, step))
            write_rollouts(self._run_folder, step, accelerator.process_index, response.conversations, attempt)
            return response

        def play(problem_ids: Sequence[str], attempt: int) -> tuple[list[Trajectory], Mapping[str, Usage]]:
            response = on_every_process(accelerator, lambda: sample(problem_ids, attempt))
            records = response.conversations if response else []
            self._check_judging(records)  # before further problems are paid for
            return records, response.usage if response else {}

        records, usage = play(prompts, 0)
        batch = PlayedBatch(list(records), [usage], list(records))
        if self._groups is not None:
            self._groups.apply(accelerator, batch, step, list(dict.fromkeys(prompts)), play)
        return batch

    def _take(self, prompts: Sequence[str], trainer: TrainerContext) -> SampleResponse:
        """This rank's part of the batch, which was begun one batch ago, save the first. The next one is begun as soon
        as the policy is not needed in this one any more, while its judge still reads."""
        step = trainer.state.global_step
        batch = self._next.take(step)
        if batch is None:
            self._next.start(self._request(prompts, trainer, 0, step))
            batch = self._next.take(step)
        batch.played.result()
        if self._curriculum is None:
            self._begin_next(trainer)
        return batch.answer.result()

    def _request(self, prompts: Sequence[str], trainer: TrainerContext, attempt: int, step: int) -> SampleRequest:
        problems = [self._problems[prompt] for prompt in prompts]
        policy, accelerator = trainer.policy, trainer.accelerator
        # A restarted trainer requests its batch by the same id, and gets the conversations that were played already.
        # A judge that failed may have stopped the trainer before: in the first batch, failed attempts are repeated.
        rank = f"rank{accelerator.process_index}of{accelerator.num_processes}"
        again = f"-again{attempt}" if attempt else ""
        early = f"-of{policy.version}" if policy.version != step else ""
        slice_digest = hashlib.sha256(repr((self._seed, problems)).encode()).hexdigest()[:8]
        return SampleRequest(
            problems=[problem.text for problem in problems],
            answers=[problem.answer for problem in problems],
            post_test_material=material_of(problems),
            request_id=f"{self._run_id}-step{step:06d}-{rank}-{slice_digest}{again}{early}",
            seed=self._seed,
            step=step,
            run_id=policy.run_id,
            policy_version=policy.version,
            supervised=self._supervised,
            judge_again=self._first,
        )

    def _sample(self, request: SampleRequest) -> SampleResponse:
        response = self._client.sample(request)
        if response.policy != request.wanted_policy:
            raise PolicyMismatch(f"Asked for policy {request.wanted_policy}, got conversations of {response.policy}.")
        refuse_other_weights(response.reward_weights, self._reward_weights)
        if len(response.conversations) != len(request.problems):
            raise PolicyMismatch(f"Asked for {len(request.problems)} conversations, got {len(response.conversations)}.")
        return response

    def _check_judging(self, records: Sequence[Trajectory]) -> None:
        """Raise if too little of the batch was judged. A conversation without a reward because a context was full is
        not the judge's failure: it is logged, and stops the run only if the whole batch has no reward."""
        total = sum(gather_object([len(records)]))
        lost = [record for record in records if record.reward is None]
        overflows = gather_object([(record.id, record.overflow) for record in records if record.overflow])
        unrewarded = sum(gather_object([len(lost)]))
        failed = gather_object(
            [(each.id, _why_unrewarded(each)) for each in lost if not _overflowed(each)]
            + [(each.id, _why_unrewarded(each)) for each in records if each.refused]
        )
        if overflows and PartialState().is_main_process:
            logger.warning(
                "%d of the %d conversations of this batch ended early because a context was full; %d of the batch have "
                "no reward. The first, %s: %s",
                len(overflows),
                total,
                unrewarded,
                *overflows[0],
            )
        if overflows and unrewarded == total:
            raise TooManyFailedJudgements(
                f"None of the {total} conversations of this batch has a reward, so there is nothing to learn from it. "
                f"The first, {overflows[0][0]}: {overflows[0][1]}"
            )
        if len(failed) > self._max_failed_share * total:
            conversation, error = failed[0]
            raise TooManyFailedJudgements(
                f"{len(failed)} of {total} conversations of this batch have no verdict, or were refused by the judge, "
                f"more than the share of {self._max_failed_share:g} that judge_model.max_failed_share allows. "
                f"The first, {conversation}: {error}"
            )


def refuse_other_weights(theirs: Mapping[str, float], ours: Mapping[str, float]) -> None:
    """Raise a `ConfigError` if a server sums up rewards by other weights than its trainer's."""
    if theirs != ours:
        raise ConfigError(
            f"The server sums up rewards by {theirs}, but this trainer is configured for {ours}. Start both with the "
            "same train.reward_weights and judge rules."
        )


def to_rollout(records: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """TRL's rollout columns, one entry per conversation in the given order.

    `completion_ids` is everything after the teacher's first prompt; `env_mask` is 1 for tokens that the policy sampled.
    """
    return {
        "prompt_ids": [record.prompt_ids for record in records],
        "completion_ids": [record.completion_ids for record in records],
        "logprobs": [record.logprobs for record in records],
        "env_mask": [record.mask for record in records],
        "conversation_id": [record.id for record in records],
        "reward": [record.reward for record in records],
    }


def reward_column(prompts: list, completions: list, reward: list[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function: the `reward` of each conversation; None for one without a verdict."""
    return reward


def batch_metrics(records: Sequence[Trajectory], played: Sequence[Trajectory] = ()) -> dict[str, float]:
    """The metrics of a batch that all environments have, as means over its episodes.

    Args:
        played: everything that was played for the batch, if that is more than its episodes; judging failed in a share
            of these.
    """
    return {
        "conversation/teacher_tokens": fmean(_sampled_tokens(record) for record in records),
        "conversation/overflow_share": fmean(record.overflow is not None for record in records),
        "judge/failed_share": fmean(record.reward is None and not _overflowed(record) for record in played or records),
    }


def _sampled_tokens(record: Trajectory) -> int:
    """The tokens that the policy sampled for the messages that entered the episode, behind prompts of their own
    included."""
    beside = (each for each in record.branches if each.kind == POLICY)
    return sum(record.mask) + sum(sum(each.mask) if each.mask else len(each.ids) for each in beside)


def staleness(records: Sequence[Trajectory], policy: PolicyVersion) -> list[float]:
    """How many optimizer steps older than `policy` the weights of each of the policy's messages are."""
    return [policy.version - turn.policy.version for record in records for turn in record.turns if turn.policy] or [0.0]


def reward_metrics(rewards: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Mean and sample standard deviation of each reward over a batch's episodes; those without one do not count."""
    metrics = {}
    for name in dict.fromkeys(name for each in rewards for name in each):
        values = [value for each in rewards if (value := each.get(name)) is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = fmean(values)
        if len(values) > 1:
            metrics[f"rewards/{name}/std"] = stdev(values)
    return metrics


def usage_metrics(role: str, usages: Sequence[Usage | None]) -> dict[str, float]:
    """Metrics of what a batch used of a role's API, over all ranks; empty for a role that is not behind an API.

    `…/run_cost_usd` is the spending of the whole run so far, by the count of the server that spent most.
    """
    known = [usage for usage in usages if usage is not None]
    if not known:
        return {}
    return {
        f"{role}/calls": sum(usage.calls for usage in known),
        f"{role}/failed_calls": sum(sum(usage.failures.values()) for usage in known),
        f"{role}/unusable_replies": sum(usage.unusable for usage in known),
        f"{role}/tokens": sum(usage.prompt_tokens + usage.completion_tokens for usage in known),
        f"{role}/cost_usd": sum(usage.cost_usd for usage in known),
        f"{role}/reserved_usd": sum(usage.reserved_usd for usage in known),
        f"{role}/run_cost_usd": max(usage.run_cost_usd for usage in known),
    }


def _overflowed(record: Trajectory) -> bool:
    """Whether the episode could not go on because a context was full."""
    return record.failure is not None and record.overflow is not None


def _why_unrewarded(record: Trajectory) -> str:
    return record.failure or record.judge_error or "it was not judged"
