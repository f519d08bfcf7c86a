"""Has the server play the episodes of a batch: which problems, one request for each process, and what the batch was
like. With more servers than processes, `balancing.py` divides each request among them."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import fmean, stdev

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object

from classroom_rl.config.train_rl import TrainConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.config.values import KEEP
from classroom_rl.errors import PolicyMismatch, TooManyFailedJudgements
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.engine import Usage
from classroom_rl.rollout.environment import environment_of
from classroom_rl.rollout.problem import material_of
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.rows import POLICY
from classroom_rl.rollout.trajectory import NEVER_SPOKE, Trajectory
from classroom_rl.server.agreement import refuse_other_weights
from classroom_rl.trainer.balancing import BalancedServers
from classroom_rl.trainer.collective import on_every_process, to_main_process
from classroom_rl.trainer.curriculum import Curriculum
from classroom_rl.trainer.group_variance import GroupFilter, PlayedBatch
from classroom_rl.trainer.judge_monitor import JudgeMonitor
from classroom_rl.trainer.metrics import supervision_metrics
from classroom_rl.trainer.session import TrainingSession

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
            for pending in (future for future in (batch.played, batch.answer) if not future.done()):
                pending.set_exception(error)

    def wait(self) -> None:
        """Wait until the policy is not needed in the batch any more, or it has failed: new weights must not be loaded
        before, or its conversations would be of two policies."""
        if self._next is not None:
            self._next.played.exception()

    def take(self, step: int) -> BatchInFlight | None:
        """The batch of this step; None if it was not begun."""
        batch, self._next = self._next, None
        return None if batch is None or batch.step != step else batch


class ProblemOrder:
    """The problems of each batch: all once in an epoch, in an order that depends on the seed and the epoch only. A last
    batch of an epoch that would not be full is not played.

    Args:
        problem_ids: the ids of all problems.
        train: the number of problems of a batch, of episodes of each, and of steps on a batch.
    """

    def __init__(self, problem_ids: Sequence[str], train: TrainConfig, seed: int):
        self._ids, self._seed = list(problem_ids), seed
        self._count, self._group, self._mu = train.number_of_problems_per_batch, train.num_samples_per_problem, train.mu
        self.batches_per_epoch = len(self._ids) // self._count

    def of(self, step: int, accelerator: Accelerator) -> list[str]:
        """The problems of this process's episodes in the batch that begins at an optimizer step, one for each episode.

        The order of an epoch is that of TRL's `RepeatSampler` with this seed.
        """
        epoch, batch_index = divmod(step // self._mu, self.batches_per_epoch)
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * epoch)
        order = torch.randperm(len(self._ids), generator=generator).tolist()
        indices = order[batch_index * self._count : (batch_index + 1) * self._count]
        episodes = [self._ids[index] for index in indices for _ in range(self._group)]
        per_process = len(episodes) // accelerator.num_processes
        return episodes[accelerator.process_index * per_process : (accelerator.process_index + 1) * per_process]


class BatchPlayer:
    """Has the server play this process's part of each batch, and checks what it answers.

    Args:
        session: the problems, the server, and the configuration of the training.
        on_batch: called with (step, everything that was played) on every process, once it is written.
    """

    def __init__(self, session: TrainingSession, on_batch: Callable[[int, Sequence[Trajectory]], None] | None = None):
        config = session.config
        train, ids = config.train, [problem.id for problem in session.problems]
        self._problems = {problem.id: problem for problem in session.problems}
        self._client, self._gpus = session.client, session.gpus
        self._run_folder, self._run_id, self._seed = session.run_folder, session.run_id, config.seed
        self._reward_weights = reward_weights(config)
        self._max_failed_share = config.judge_model.max_failed_share
        self._judge_monitor = JudgeMonitor(config, session.client, session.run_folder)
        self._metrics = environment_of(config).batch_metrics
        self._supervised = config.supervisor_model is not None
        self._steps_of_batch, self._on_batch = train.mu, on_batch
        self._groups = None if train.groups_without_variance == KEEP else GroupFilter(config, ids)
        self._curriculum = None
        if config.dataset.curriculum:
            self._curriculum = Curriculum(ids, train.num_samples_per_problem, config.seed, session.run_folder, train.mu)
        self.order = ProblemOrder(ids, train, config.seed)
        self._next = NextBatch(session.client.play, self.sample) if train.max_staleness > 0 else None
        self._first = True
        self._waited_s = self._judging_s = 0.0

    def play(self, policy: PolicyVersion, step: int, max_steps: int, accelerator: Accelerator) -> PlayedBatch:
        """Play the batch of an optimizer step with a policy that the server has loaded; all processes call this
        together. `figures` of what is returned are means over the processes that have them.

        Raises:
            TooManyFailedJudgements: on every process, if judging failed for too many episodes.
            ConfigError: on every process, if a server uses other reward weights.
            ClassroomError: on every process, if sampling, or writing the episodes, failed on any.
        """
        started, self._judging_s = time.monotonic(), 0.0
        self._gpus.wake_engines()
        batch = self._play(self._problems_of(step, accelerator), policy, step, max_steps, accelerator)
        self._first = False
        records = batch.records
        judge_figures = self._judge_monitor.check(accelerator, step, records)  # while the engines are awake
        self._gpus.sleep_engines()
        figures = batch_metrics(records, batch.played) | supervision_metrics(records) | judge_figures
        gathered = to_main_process(accelerator, (records, batch.usage))
        if gathered is not None:
            figures |= self._metrics_of_all(gathered)
        if isinstance(self._client, BalancedServers):
            figures |= self._client.take_figures()
        if self._curriculum is not None:
            figures |= self._curriculum.record(step, batch.played)
        if self._next is not None:
            figures["policy/staleness"] = fmean(staleness(records, policy))
            if self._curriculum is not None:  # it draws by the rewards of these
                self._begin_next(policy, step, max_steps, accelerator)
        # What a batch that was begun ahead is waited for, before its weights are replaced, is a part of its rollout.
        rollout_s = time.monotonic() - started + self._waited_s
        batch.figures |= figures | {"seconds/rollout": rollout_s, "seconds/judging": self._judging_s}
        if self._on_batch is not None:
            self._on_batch(step, batch.played)
        batch.left_out |= {index for index, record in enumerate(records) if record.unrewarded}
        return batch

    def _metrics_of_all(
        self, everyones: Sequence[tuple[Sequence[Trajectory], Sequence[Mapping[str, Usage]]]]
    ) -> dict[str, float]:
        """The metrics that are no mean over processes, from what each of them played and used."""
        records = [record for process_records, _ in everyones for record in process_records]
        usages = [usage for _, process_usages in everyones for usage in process_usages]
        metrics = self._metrics(records) | reward_metrics([record.rewards for record in records])
        for role in dict.fromkeys(role for usage in usages for role in usage):
            metrics |= usage_metrics(role, [usage.get(role) for usage in usages])
        return metrics

    def _problems_of(self, step: int, accelerator: Accelerator) -> Sequence[str]:
        """The problems of this process's episodes: the next ones of the order, or the curriculum's."""
        problems = self.order.of(step, accelerator)
        return problems if self._curriculum is None else self._curriculum.choose(accelerator, len(problems), step)

    def wait_for_next(self, accelerator: Accelerator) -> None:
        """Wait until no process needs the policy any more in the batch that is played ahead, before new weights are
        loaded; all processes call this together."""
        if self._next is not None:
            started = time.monotonic()
            self._next.wait()
            accelerator.wait_for_everyone()  # other processes' episodes are played with the same engine
            self._waited_s = time.monotonic() - started

    def _begin_next(self, policy: PolicyVersion, step: int, max_steps: int, accelerator: Accelerator) -> None:
        """Have the batch after this step's played with the weights that are loaded now, while this step's is judged and
        trained on."""
        step += self._steps_of_batch
        if step < max_steps:
            problems = self._problems_of(step, accelerator)
            self._next.start(self._request(problems, policy, 0, step, accelerator))

    def _play(
        self, prompts: Sequence[str], policy: PolicyVersion, step: int, max_steps: int, accelerator: Accelerator
    ) -> PlayedBatch:
        """Play a batch, with what the filter of groups does to it; all processes call this together."""

        def sample(problem_ids: Sequence[str], attempt: int) -> SampleResponse | None:
            if not problem_ids:
                return None
            started = time.monotonic()
            if self._next is not None and attempt == 0:
                response = self._take(problem_ids, policy, step, max_steps, accelerator)
            else:
                response = self.sample(self._request(problem_ids, policy, attempt, step, accelerator))
            # Of a batch that was begun ahead, the judge may have read a part before this process began to wait.
            self._judging_s += min(response.seconds_after_policy, time.monotonic() - started)
            write_rollouts(self._run_folder, step, accelerator.process_index, response.conversations, attempt)
            return response

        def play(problem_ids: Sequence[str], attempt: int) -> tuple[list[Trajectory], Mapping[str, Usage]]:
            response = on_every_process(accelerator, lambda: sample(problem_ids, attempt))
            records = response.conversations if response else []
            self.check_judging(records)  # before further problems are paid for
            return records, response.usage if response else {}

        records, usage = play(prompts, 0)
        batch = PlayedBatch(list(records), [usage], list(records))
        if self._groups is not None:
            self._groups.apply(accelerator, batch, step, list(dict.fromkeys(prompts)), play)
        return batch

    def _take(
        self, prompts: Sequence[str], policy: PolicyVersion, step: int, max_steps: int, accelerator: Accelerator
    ) -> SampleResponse:
        """This process's part of the batch, which was begun one batch ago, save the first. The next one is begun as
        soon as the policy is not needed in this one any more, while its judge still reads."""
        batch = self._next.take(step)
        if batch is None:
            self._next.start(self._request(prompts, policy, 0, step, accelerator))
            batch = self._next.take(step)
        batch.played.result()
        if self._curriculum is None:
            self._begin_next(policy, step, max_steps, accelerator)
        return batch.answer.result()

    def _request(
        self, prompts: Sequence[str], policy: PolicyVersion, attempt: int, step: int, accelerator: Accelerator
    ) -> SampleRequest:
        problems = [self._problems[prompt] for prompt in prompts]
        # A restarted trainer requests its batch by the same id, and gets the conversations that were played already.
        # A judge that failed may have stopped the trainer before: in the first batch, failed attempts are repeated.
        rank = f"rank{accelerator.process_index}of{accelerator.num_processes}"
        attempt_suffix = f"-again{attempt}" if attempt else ""
        version_suffix = f"-of{policy.version}" if policy.version != step else ""
        slice_digest = hashlib.sha256(repr((self._seed, problems)).encode()).hexdigest()[:8]
        return SampleRequest(
            problems=[problem.text for problem in problems],
            answers=[problem.answer for problem in problems],
            post_test_material=material_of(problems),
            request_id=f"{self._run_id}-step{step:06d}-{rank}-{slice_digest}{attempt_suffix}{version_suffix}",
            seed=self._seed,
            step=step,
            run_id=policy.run_id,
            policy_version=policy.version,
            supervised=self._supervised,
            judge_again=self._first,
        )

    def sample(self, request: SampleRequest) -> SampleResponse:
        """Have a request played, and check what is answered.

        Raises:
            PolicyMismatch: if another policy played, or conversations are missing.
            ConfigError: if the server uses other reward weights.
            ClassroomError: the server's error.
        """
        response = self._client.sample(request)
        if response.policy != request.wanted_policy:
            raise PolicyMismatch(f"Asked for policy {request.wanted_policy}, got conversations of {response.policy}.")
        refuse_other_weights(response.reward_weights, self._reward_weights)
        if len(response.conversations) != len(request.problems):
            raise PolicyMismatch(f"Asked for {len(request.problems)} conversations, got {len(response.conversations)}.")
        return response

    def check_judging(self, records: Sequence[Trajectory]) -> None:
        """Raise if too little of the batch was judged. A conversation without a reward because a context was full is
        not the judge's failure: it is logged, and stops the run only if the whole batch has no reward."""
        total = sum(gather_object([len(records)]))
        lost = [record for record in records if record.reward is None]
        overflows = gather_object([(record.id, record.overflow) for record in records if record.overflow])
        unrewarded = sum(gather_object([len(lost)]))
        failed = gather_object(
            [(record.id, _why_unrewarded(record)) for record in lost if not _overflowed(record)]
            + [(record.id, _why_unrewarded(record)) for record in records if record.refused]
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


def batch_metrics(records: Sequence[Trajectory], played: Sequence[Trajectory] = ()) -> dict[str, float]:
    """The metrics of a batch that all environments have, as means over its episodes; of turn rewards over the policy's
    messages.

    Args:
        played: everything that was played for the batch, if that is more than its episodes; judging failed in a share
            of these.
    """
    by_message: dict[str, list[float]] = {}
    for record in records:
        for name, values in record.turn_rewards.items():
            by_message.setdefault(name, []).extend(value for value in values if value is not None)
    return {
        **{f"turn_rewards/{name}/mean": fmean(values) for name, values in by_message.items() if values},
        "conversation/teacher_tokens": fmean(sampled_tokens(record) for record in records),
        "conversation/overflow_share": fmean(record.overflow is not None for record in records),
        "judge/failed_share": fmean(record.reward is None and not _overflowed(record) for record in played or records),
    }


def sampled_tokens(record: Trajectory) -> int:
    """The tokens that the policy sampled for the messages that entered the episode, behind prompts of their own
    included."""
    branches = (branch for branch in record.branches if branch.kind == POLICY)
    return sum(record.mask) + sum(sum(branch.mask) if branch.mask else len(branch.ids) for branch in branches)


def staleness(records: Sequence[Trajectory], policy: PolicyVersion) -> list[float]:
    """How many optimizer steps older than `policy` the weights of each of the policy's messages are."""
    return [policy.version - turn.policy.version for record in records for turn in record.turns if turn.policy] or [0.0]


def reward_metrics(rewards: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Mean and sample standard deviation of each reward over a batch's episodes; those without one do not count."""
    metrics = {}
    for name in dict.fromkeys(name for episode_rewards in rewards for name in episode_rewards):
        values = [value for episode_rewards in rewards if (value := episode_rewards.get(name)) is not None]
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
    """Whether the episode could not go on because a context was full, or ended before there was anything to judge."""
    return record.failure is not None and (record.overflow is not None or record.failure == NEVER_SPOKE)


def _why_unrewarded(record: Trajectory) -> str:
    return record.failure or record.judge_error or "it was not judged"
