"""Measures the policy on held-out lessons while it is trained (`evaluation` in the configuration): before the first
batch, every so many steps, and after the last, on the engines that play the batches.

    the same each time   lessons, students and sampling seeds: none of them depends on the step
    who asks             the leader of each server asks for its share of the lessons; the other processes wait
    interrupted          request ids depend on run, step and lessons: asked again, a server gives what its journal has
    kept apart           no rollout file, guard, curriculum, correction or usage of a batch sees these conversations
    on record            `evaluations.jsonl` in the run folder, one line for each evaluation
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from accelerate import PartialState
from transformers import Trainer

from classroom_rl.config.values import GREEDY, SAMPLED, SAMPLINGS
from classroom_rl.errors import TrainingCollapsed
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.learning import LEAST_RISE
from classroom_rl.results.run_folder import EVALUATIONS_NAME, METRICS_NAME, is_number, read_lines
from classroom_rl.results.statistics import is_clear, paired_change, rewards_by_lesson
from classroom_rl.rollout.intervals import mean_with_ci, shown
from classroom_rl.rollout.problem import material_of
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.rows import message_numbers
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.system.storage import write_whole
from classroom_rl.trainer.balancing import BalancedServers
from classroom_rl.trainer.checkpoints import step_of
from classroom_rl.trainer.collective import Processes, on_main_process, to_main_process
from classroom_rl.trainer.sample_batch import BatchPlayer, sampled_tokens
from classroom_rl.trainer.session import TrainingSession

logger = logging.getLogger(__name__)

BEST_NAME = "best.json"
_MISMATCH = "mismatch/mean_abs_logprob_diff"
P_OF_COLLAPSE, LEAST_LESSONS_FOR_COLLAPSE = 0.01, 8
"""A fall of the reward, by at least `LEAST_RISE`, is a collapse if its two-sided p is below this; with fewer lessons a
sign-flip test never says so."""
LONGER, ALIKE = 3.0, 0.25
"""Conversations are far longer if they have so many times the tokens of the start; messages are all alike if the share
of distinct ones is below so much of that at the start."""
MORE_MISMATCH, LEAST_MISMATCH = 5.0, 0.1
"""The mismatch is a collapse above so many times that of the first steps, and above so many nats per token."""


@dataclass(frozen=True)
class Measured:
    """What an evaluation found; the same on every process.

    Attributes:
        figures: for the log, by name.
        collapse: the signs of a collapse as texts; empty without one.
        best_step: the step of the evaluation with the highest reward so far, the earliest if several have it; None if
            none has a reward.
    """

    figures: dict[str, float]
    collapse: list[str]
    best_step: int | None


class HeldOutEvaluation:
    """Has the held-out lessons played, and compares each evaluation with the first one on the same lessons.

    Args:
        session: the lessons, the server, and the configuration of the training.
        player: asks the server, and checks what it answers.
    """

    def __init__(self, session: TrainingSession, player: BatchPlayer):
        config = session.config
        self._options, self._steps_of_batch, self._seed = config.evaluation, config.train.mu, config.seed
        self._player, self._server, self._gpus = player, session.server, session.gpus
        servers = 1 if isinstance(session.client, BalancedServers) else len(config.generation.server_urls or [""])
        self._own = session.held_out[session.server.index :: servers]
        self._run_id, self._run_folder = session.run_id, session.run_folder
        lessons_key = (config.seed, self._options.num_samples_per_problem, session.held_out)
        self._lessons = hashlib.sha256(repr(lessons_key).encode()).hexdigest()[:8]
        self._part = f"server{session.server.index}of{servers}-{self._lessons}"
        resumed_step = step_of(session.checkpoint)
        lines = read_lines(session.run_folder / EVALUATIONS_NAME)
        # Later lines are of weights that are lost.
        self._lines = [line for line in lines if line["step"] <= resumed_step]
        if len(session.held_out) < LEAST_LESSONS_FOR_COLLAPSE and PartialState().is_main_process:
            logger.warning(
                "evaluation.eval_datasets has %d lessons: whether their reward falls cannot be told from chance with "
                "fewer than %d",
                len(session.held_out),
                LEAST_LESSONS_FOR_COLLAPSE,
            )

    @property
    def best_step(self) -> int | None:
        """That of the evaluations before the checkpoint from which the training goes on."""
        return self._best_of(self._lines)

    def is_due(self, step: int) -> bool:
        """Whether the policy is measured before the batch of this step."""
        return step % self._options.every < self._steps_of_batch

    def measure(self, policy: PolicyVersion, step: int, processes: Processes) -> Measured:
        """Measure a policy that the servers have loaded; all processes call this together.

        Raises:
            TooManyFailedJudgements: on every process, if judging failed for too many conversations.
            ClassroomError: on every process, if a server refuses or fails.
        """
        started = time.monotonic()
        self._gpus.wake_engines()
        records_by_sampling: dict[str, list[Trajectory]] = {}
        cost_usd = 0.0
        for sampling in self._options.samplings:
            response = self._server.once_per_server(processes, partial(self._play, policy, step, sampling))
            records = response.conversations if response else []
            self._player.check_judging(records)
            own_usd = sum(usage.cost_usd for usage in response.usage.values()) if response else 0.0
            for process_records, usd in to_main_process(processes, (records, own_usd)) or ():
                records_by_sampling.setdefault(sampling, []).extend(process_records)
                cost_usd += usd
        return on_main_process(
            processes, lambda: self._record(step, records_by_sampling, cost_usd, time.monotonic() - started)
        )

    def _play(self, policy: PolicyVersion, step: int, sampling: str) -> SampleResponse | None:
        problems = [problem for problem in self._own for _ in range(self._options.num_samples_per_problem)]
        if not problems:  # more servers than lessons
            return None
        return self._player.sample(
            SampleRequest(
                problems=[problem.text for problem in problems],
                answers=[problem.answer for problem in problems],
                post_test_material=material_of(problems),
                request_id=f"{self._run_id}-heldout-step{step:06d}-{sampling}-{self._part}",
                seed=self._seed,
                step=0,
                run_id=policy.run_id,
                policy_version=policy.version,
                greedy=sampling == GREEDY,
                fixed_seeds=True,
                judge_again=True,
            )
        )

    def _record(
        self, step: int, records_by_name: Mapping[str, Sequence[Trajectory]], cost_usd: float, seconds: float
    ) -> Measured:
        """Write an evaluation's line; the line of the same step is replaced."""
        self._lines = [line for line in self._lines if line["step"] < step]
        line: dict[str, Any] = {"step": step, "lessons": self._lessons, "seconds": seconds, "cost_usd": cost_usd}
        line["mismatch"] = self._mismatch_until(step)
        line |= {name: summarise(records) for name, records in records_by_name.items()}
        comparable = [evaluation for evaluation in self._lines if evaluation["lessons"] == self._lessons] + [line]
        for name in records_by_name:
            first = next(evaluation for evaluation in comparable if name in evaluation)
            change = paired_change(first[name]["rewards"], line[name]["rewards"])
            line[name] |= {"change": change, "since": first["step"]}
        line["collapse"] = signs_of_collapse(comparable)
        self._lines.append(line)
        text = "".join(json.dumps(evaluation, ensure_ascii=False) + "\n" for evaluation in self._lines)
        write_whole(self._run_folder / EVALUATIONS_NAME, text)
        for name in records_by_name:
            entry = line[name]
            since = f"{shown(entry['change'], '+')} since step {entry['since']}"
            logger.info("held-out reward after step %d, %s: %s, %s", step, name, shown(entry["reward"]), since)
        return Measured(figures_of(line), line["collapse"], self._best_of(self._lines))

    def _mismatch_until(self, step: int) -> float | None:
        """The mean mismatch of the steps since the last evaluation; None if none was logged."""
        since = self._lines[-1]["step"] if self._lines else 0
        lines = read_lines(self._run_folder / METRICS_NAME)
        values = [line[_MISMATCH] for line in lines if since < line["step"] <= step and is_number(line.get(_MISMATCH))]
        return fmean(values) if values else None

    def _best_of(self, lines: Sequence[Mapping[str, Any]]) -> int | None:
        rewards = {line["step"]: line[SAMPLED]["reward"]["mean"] for line in lines if line["lessons"] == self._lessons}
        known = {step: reward for step, reward in rewards.items() if reward is not None}
        return max(known, key=known.__getitem__, default=None)

    def write_best(self, checkpoints: Path) -> None:
        """Write `best.json`: step, checkpoint and figures of the best evaluation. The policy that the training began
        with has no checkpoint."""
        line = next(evaluation for evaluation in self._lines if evaluation["step"] == self.best_step)
        checkpoint = checkpoints / f"checkpoint-{line['step']}"
        best = {"step": line["step"], "checkpoint": str(checkpoint) if checkpoint.is_dir() else None}
        write_whole(self._run_folder / BEST_NAME, json.dumps(best | {"figures": figures_of(line)}, indent=2) + "\n")


def measure_held_out(
    loop: Any, evaluation: HeldOutEvaluation, policy: PolicyVersion, step: int, last: bool = False
) -> None:
    """Measure the policy, which the servers have loaded, log the figures at this step, and save a checkpoint if they
    are the best so far; all processes call this together.

    Args:
        loop: the `TrainingLoop`.
        last: the training has ended, so nothing is left to stop.

    Raises:
        TrainingCollapsed: on every process, if the policy has collapsed and that shall stop the training.
        ClassroomError: as `HeldOutEvaluation.measure`.
    """
    options, accelerator = loop.run_config.evaluation, loop.accelerator
    measured = evaluation.measure(policy, step, accelerator)
    Trainer.log(loop, measured.figures)  # a line of its own: the loop's figures are of the next step
    loop.keep_figures({"seconds/eval": measured.figures["heldout/seconds"]})
    if options.keep_best and measured.best_step == step:
        loop.best_step = step
        loop.save_progress()
        on_main_process(accelerator, lambda: evaluation.write_best(Path(loop.args.output_dir)))
    if not measured.collapse:
        return
    why = f"step {step}: on held-out lessons the policy has collapsed: {'; '.join(measured.collapse)}"
    if options.stop_on_collapse and not last:
        raise TrainingCollapsed(
            f"{why}. The training was stopped, with a checkpoint of this step. Begin anew in another folder "
            "(logging.save_dir=…) with a lower train.learning_rate or a higher train.beta; or go on all the same with "
            "evaluation.stop_on_collapse=false."
        )
    if accelerator.is_main_process:
        logger.warning("%s", why)


def summarise(records: Sequence[Trajectory]) -> dict[str, Any]:
    """The entry of one sampling in a line of `evaluations.jsonl`.

    Returns:
        `reward` with its 95 % interval over lessons; `tokens`, the mean number that the policy sampled in a
        conversation; `distinct_messages`, the number of its different messages divided by that of all; the shares of
        conversations that were cut by a full context and that have no reward; `rewards` by lesson.
    """
    messages = [record.turns[index].text for record in records for index in message_numbers(record)]
    rewards = rewards_by_lesson(records)
    return {
        "reward": mean_with_ci(rewards),
        "tokens": fmean(map(sampled_tokens, records)),
        "distinct_messages": len(set(messages)) / len(messages) if messages else 0.0,
        "overflow_share": fmean(record.overflow is not None for record in records),
        "without_reward": fmean(record.reward is None for record in records),
        "rewards": rewards,
    }


def figures_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation, from its line; unknown values are left out."""
    values: dict[str, Any] = {
        "seconds": line["seconds"],
        "cost_usd": line["cost_usd"],
        "collapse": len(line["collapse"]),
    }
    for name in (sampling for sampling in SAMPLINGS if sampling in line):
        entry = line[name]
        low, high = entry["reward"]["ci95"] or (None, None)
        values |= {f"{name}/reward": entry["reward"]["mean"], f"{name}/reward_low": low, f"{name}/reward_high": high}
        values |= {f"{name}/change": entry["change"]["mean"], f"{name}/change_p": entry["change"]["p"]}
        others = ("tokens", "distinct_messages", "overflow_share", "without_reward")
        values |= {f"{name}/{other}": entry[other] for other in others}
    return {f"heldout/{name}": float(value) for name, value in values.items() if value is not None}


def signs_of_collapse(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What shows that the last of these evaluations, which are on the same lessons, is of a policy that has collapsed.

    A fall of the reward below that of the first one, and a mismatch of engine and trainer, are signs by themselves.
    Longer conversations and messages that are all alike may also be what was learned: they are signs unless the reward
    is clearly above its start.
    """
    start, now, change = lines[0][SAMPLED], lines[-1][SAMPLED], lines[-1][SAMPLED]["change"]
    mean, p = change["mean"] or 0.0, change["p"]
    signs = []
    if mean <= -LEAST_RISE and p < P_OF_COLLAPSE:
        reward = now["reward"]["mean"]
        signs.append(f"reward: it is {reward:.3f}, {-mean:.3f} below its start on {change['n']} lessons (p = {p:.2g})")
    if not (mean > 0 and is_clear(change)):
        if now["tokens"] > LONGER * start["tokens"] > 0:
            signs.append(
                f"length: the policy writes {now['tokens']:.0f} tokens a conversation, at first {start['tokens']:.0f}"
            )
        if now["distinct_messages"] < ALIKE * start["distinct_messages"]:
            signs.append(
                f"distinct messages: {100 * now['distinct_messages']:.2g} % of its messages are different ones, at "
                f"first {100 * start['distinct_messages']:.2g} %"
            )
    mismatches = [line["mismatch"] for line in lines if line["mismatch"] is not None]
    if mismatches and lines[-1]["mismatch"] is not None:
        first, last = mismatches[0], mismatches[-1]
        if last > max(LEAST_MISMATCH, MORE_MISMATCH * first):
            signs.append(
                f"mismatch: engine and trainer differ by {last:.3g} nats per token, in the first steps by {first:.3g}"
            )
    return signs
