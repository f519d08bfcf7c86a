"""The trainer's part of checking whether the teacher fools the judge: the held-out judge and the canaries, whether the
verdicts depend on the conversation, and how much of it an embedded judge cannot read.

Two signs show that they do not. All conversations on a problem have the same verdict, for every problem: then the
rewards of a group are equal, and GRPO learns nothing. Or two attempts at one conversation agree no better than attempts
at two conversations on the same problem: then the rewards are noise.
"""

import json
import logging
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import fmean, mode
from typing import Any

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.train_rl import GuardsConfig, TrainRLConfig
from classroom_rl.config.values import TRAINS_STUDENT, TRAINS_TEACHER
from classroom_rl.environments.classroom.canaries import CANARIES
from classroom_rl.environments.classroom.judge_check import JudgeCheckRequest, JudgeCheckResponse
from classroom_rl.environments.classroom.metrics import beyond_rules
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ClassroomError, JudgeOutputError, StorageError
from classroom_rl.evaluation.metrics.language import (
    STUDENT_SHARES,
    StudentTurn,
    out_of_bounds,
    student_fidelity,
    student_turns,
)
from classroom_rl.evaluation.metrics.students import WORDS, talk_of, values_of
from classroom_rl.judges.agreement import rank_correlation
from classroom_rl.judges.verdicts import BEYOND_RULES, Verdict
from classroom_rl.results.run_folder import JUDGE_CHECKS_NAME, read_lines
from classroom_rl.rollout.intervals import Estimate, mean_with_ci
from classroom_rl.server.client import ClassroomClient
from classroom_rl.system.storage import write_whole
from classroom_rl.trainer.balancing import BalancedServers
from classroom_rl.trainer.collective import Processes, on_main_process
from classroom_rl.trainer.pleasing import PleasingWatch, add_and_join

logger = logging.getLogger(__name__)


LEAST_FOR_SAME = 128
LEAST_FOR_DEPENDENCE = 256
"""The least conversations for `share` to be meaningful. With 256 of them, in groups of 8 with two attempts each, a true
dependence of 0 is measured below 2 / √256 (0.125) in 98 of 100 cases, one of 0.3 in 1 of 200, one of 0.5 never
(simulated with normally distributed scores)."""
LARGEST_RISE, LEAST_FOR_RISE = 0.25, 512
"""The largest rise of the share of conversations that an embedded judge cannot read, since the process began, and the
least conversations on each side. A share that stays exceeds it in none of 400 runs of 200 batches, and in up to 8 of
100 where whole groups are alike (simulated)."""
LEAST_STUDENT_MESSAGES = 256
"""The least student messages for the shares of what they do. A true share of 2 % is measured above 5 % in 2 of 1,000
cases."""
STUDENT_FIGURES = {
    "errors (maths: of results)": "errors",
    "keeps to what it knows": "keeps_to_lesson",
    "changes after a hint": "changes_after_hint",
    "changes after praise alone": "changes_after_praise",
    WORDS: "words",
    "rise of right per message": "rise_of_right",
}
"""Figure of `evaluation.metrics.students` → its name in the log, as `guard/student_NAME`. They are means over a part of
a batch and have no bounds: how much a student should learn depends on the tutor."""
MEASURED_STUDENTS = 32
"""The most conversations of a batch whose student is measured so: one of maths takes 0.05 s of a CPU."""
LEAST_THAT_DIFFER = 20
"""The least conversations whose verdict differs from their group's most common one. Fewer may be single slips."""


@dataclass(frozen=True)
class Dependence:
    """How far verdicts depend on the conversation.

    Attributes:
        conversations: the number of conversations that were examined.
        same: whether all conversations of each group had the same verdict.
        share: 1 − the mean squared difference of two attempts at one conversation ÷ that of attempts at two
            conversations of its group (the intraclass correlation, computed from pairs): 1 if verdicts depend on the
            conversation only, 0 if they do not depend on it. None without two attempts, and if no two conversations of
            a group differ.
        compared: the number of conversations that `share` is computed from.
        differing: the number of those whose verdict differs from their group's most common one.
    """

    conversations: int
    same: bool
    share: float | None
    compared: int
    differing: int = 0

    @property
    def warning(self) -> str | None:
        """A warning for the user; None if there is no reason for one."""
        if self.same and self.conversations >= LEAST_FOR_SAME:
            return (
                "The judge gave every conversation on a problem the same verdict, on every problem, in the last "
                f"{self.conversations} conversations. Either it does not see them (look at a prompt and a reply in "
                "judge_calls.sqlite, or at the verdicts on the page), or the tutor's conversations no longer differ in "
                "what it judges. Its verdicts teach nothing."
            )
        enough = self.compared >= LEAST_FOR_DEPENDENCE and self.differing >= LEAST_THAT_DIFFER
        if self.share is not None and enough and self.share < 2 / sqrt(self.compared):
            return (
                "The judge's verdicts do not depend on the conversation, as far as its own attempts tell: two attempts "
                f"at one conversation agree no better than attempts at two on the same problem (dependence "
                f"{self.share:.2f}, {self.compared} conversations). The rewards are noise. Look at what the judge is "
                "shown, lower judge_model.vllm.temperature, or take a better judge."
            )
        return None


class VerdictWatch:
    """Computes the dependence over the latest batches of a training, as many as give enough conversations."""

    def __init__(self) -> None:
        self._batches: deque[Sequence[ConversationRecord]] = deque()

    def update(self, records: Sequence[ConversationRecord]) -> Dependence | None:
        """Add a batch, and return the dependence over the latest conversations; None if they are too few."""
        judged = [record for record in records if any(verdict.valid for verdict in record.verdicts)]
        latest = add_and_join(self._batches, judged, LEAST_FOR_DEPENDENCE)
        return dependence(latest) if len(latest) >= LEAST_FOR_SAME else None


class UnreadWatch:
    """Compares the share of conversations with messages that no rule of the embedded judge can read: the latest ones
    with the first ones that this process has seen. Of each there are at least `LEAST_FOR_RISE`."""

    def __init__(self) -> None:
        self._first: list[bool] = []
        self._batches: deque[Sequence[bool]] = deque()

    def update(self, records: Sequence[ConversationRecord]) -> float | None:
        """Add a batch, and return the rise of the share; None with too few conversations, or another judge."""
        batch = [count > 0 for count in map(beyond_rules, records) if count is not None]
        if len(self._first) < LEAST_FOR_RISE:
            self._first += batch
        latest = add_and_join(self._batches, batch, LEAST_FOR_RISE)
        return fmean(latest) - fmean(self._first) if len(latest) >= LEAST_FOR_RISE else None


class StudentWatch:
    """Checks by rules whether the student does what its personas say, and stays in its role, over the latest student
    messages of a training, at least `LEAST_STUDENT_MESSAGES`."""

    def __init__(self) -> None:
        self._batches: deque[Sequence[StudentTurn]] = deque()

    def update(self, records: Sequence[ConversationRecord]) -> dict[str, Any] | None:
        """Add a batch, and return `student_fidelity` of the latest messages; None if they are too few."""
        batch = [turn for record in records for turn in student_turns(record)]
        latest = add_and_join(self._batches, batch, LEAST_STUDENT_MESSAGES)
        return student_fidelity(latest, "rules") if len(latest) >= LEAST_STUDENT_MESSAGES else None


def student_figures(records: Sequence[ConversationRecord]) -> dict[str, float]:
    """The means of `STUDENT_FIGURES` over conversations that are spread over a batch; those without a value are left
    out."""
    values: dict[str, list[float]] = {}
    for record in records[:: -(-len(records) // MEASURED_STUDENTS) or 1]:
        for name, value in values_of(talk_of(record, None, None)):
            if name in STUDENT_FIGURES:
                values.setdefault(f"guard/student_{STUDENT_FIGURES[name]}", []).append(float(value))
    return {name: fmean(measured) for name, measured in values.items()}


def dependence(records: Sequence[ConversationRecord]) -> Dependence:
    """The dependence of the verdicts of these conversations. A group is one problem at one step."""
    groups: dict[tuple[int, str], list[ConversationRecord]] = {}
    for record in records:
        groups.setdefault((record.step, record.problem_id), []).append(record)
    rules = sorted({verdict.rule for record in records for verdict in record.verdicts if verdict.valid})
    of_one: list[float] = []
    of_two: list[float] = []
    compared: set[str] = set()
    same, differing = True, 0
    for group in groups.values():
        for rule in rules:
            attempts = {
                record.id: [
                    verdict
                    for verdict in record.verdicts
                    if verdict.valid and verdict.rule == rule and verdict.group_size is None
                ]
                for record in group
            }
            same &= len({_said(verdict) for verdicts in attempts.values() for verdict in verdicts}) <= 1
            repeated = {name: list(map(_score, verdicts)) for name, verdicts in attempts.items() if len(verdicts) > 1}
            if len(repeated) > 1:
                compared |= set(repeated)
                commonest = mode(score for scores in repeated.values() for score in scores)
                differing += sum(set(scores) != {commonest} for scores in repeated.values())
                of_one += _within(repeated.values())
                of_two += _between(list(repeated.values()))
    between = fmean(of_two) if of_two else 0.0
    share = 1 - fmean(of_one) / between if between > 0 else None
    return Dependence(len(records), same, share, len(compared), differing)


def _said(verdict: Verdict) -> object:
    return verdict.accepted if verdict.scores is None else verdict.scores


def _score(verdict: Verdict) -> float:
    return float(bool(verdict.accepted)) if verdict.scores is None else verdict.scores.final_reward


def _within(conversations: Iterable[list[float]]) -> Iterator[float]:
    for scores in conversations:
        yield from ((one - other) ** 2 for one, other in combinations(scores, 2))


def _between(conversations: Sequence[list[float]]) -> Iterator[float]:
    for these, those in combinations(conversations, 2):
        yield from ((one - other) ** 2 for one in these for other in those)


FAILED_CHECK: dict[str, Any] = {
    "gap": {"mean": None, "ci95": None, "n": 0},
    "growth": None,
    "training": None,
    "held_out": None,
    "rank_correlation": None,
    "canaries": {},
    "failed": 1,
    "held_out_cost_usd": None,
    "warnings": [],
}
"""The line in `judge_checks.jsonl` for a check that failed."""


class JudgeMonitor:
    """Checks the judge every `guards.judge_check_every_n_steps` steps, beginning with the first batch, and logs
    warnings. For every batch it also tests whether the verdicts depend on the conversation, and whether an
    embedded judge can read fewer conversations than at the beginning.

    Each check is a line of `judge_checks.jsonl` in the run folder. If a resumed run repeats a step, its line is
    replaced. A failed check is logged and recorded, and does not stop the training.
    """

    def __init__(self, config: TrainRLConfig, client: ClassroomClient | BalancedServers, run_folder: Path):
        self._guards = config.guards
        self._has_verdicts = isinstance(config.generation, GenerationConfig)
        self._steps_in_batch = config.train.mu
        self._seed = config.seed
        self._client = client
        self._path = run_folder / JUDGE_CHECKS_NAME
        self._verdicts = VerdictWatch()
        self._unread = UnreadWatch()
        self._students = StudentWatch()
        self._signs: set[str] = set()
        trains_student = getattr(config.generation, "trained_role", TRAINS_TEACHER) == TRAINS_STUDENT
        self._pleasing = PleasingWatch() if trains_student else None

    def is_due(self, step: int) -> bool:
        """Whether the batch that is sampled at this step is checked."""
        every = self._guards.judge_check_every_n_steps
        return every > 0 and step % every < self._steps_in_batch

    def check(self, processes: Processes, step: int, records: Sequence[ConversationRecord]) -> dict[str, float]:
        """Examine the verdicts, and check the judge if a check is due. The main process does this with its own
        conversations; all processes call it together.

        Returns:
            The metrics to log.
        """
        if not self._has_verdicts:  # another environment than the classroom
            return {}
        check = self._check if self.is_due(step) else lambda *_: {}
        return on_main_process(processes, lambda: self._examine_verdicts(step, records) | check(step, records))

    def _examine_verdicts(self, step: int, records: Sequence[ConversationRecord]) -> dict[str, float]:
        """The figures of a batch. A sign that something is wrong is logged if it was not there in the batch before."""
        figures: dict[str, float] = {}
        signs: dict[str, str] = {}
        verdict_dependence, rise = self._verdicts.update(records), self._unread.update(records)
        if verdict_dependence is not None:
            figures["guard/blind_judge"] = float(verdict_dependence.warning is not None)
            if verdict_dependence.warning is not None:
                signs["blind_judge"] = verdict_dependence.warning
            if verdict_dependence.share is not None:
                figures["guard/verdict_dependence"] = verdict_dependence.share
        if rise is not None:
            figures["guard/beyond_rules_rise"] = rise
            if rise > LARGEST_RISE:
                signs["beyond_rules_rise"] = (
                    "The tutor says more and more that the embedded judge cannot read: the share of such conversations "
                    f"has risen by {rise:.2f} since this training process began. Read some of them on the page (their "
                    f"verdicts say “{BEYOND_RULES}”): they may be better teaching than the rules know, or drivel and "
                    "codes."
                )
        if (fidelity := self._students.update(records)) is not None:
            for name, text in out_of_bounds(fidelity):
                signs[name] = f"The simulated student strays: {text}, in the latest messages."
            shares = {name: fidelity[name]["share"] for name in STUDENT_SHARES}
            figures |= {f"guard/student_{name}": share for name, share in shares.items() if share is not None}
        try:
            figures |= student_figures(records)
            if self._pleasing is not None:
                figures |= self._pleasing.update(records)
        except Exception as error:  # rules read any text of a model; a figure must not end a training
            logger.warning("step %d: the student was not measured: %s: %s", step + 1, type(error).__name__, error)
        if self._pleasing is not None:
            signs |= self._pleasing.signs()
        for sign, warning in signs.items():
            if sign not in self._signs:
                logger.warning("step %d: %s", step + 1, warning)
        self._signs = set(signs)
        return figures

    def _check(self, step: int, records: Sequence[ConversationRecord]) -> dict[str, float]:
        """Check the judge with the main process's conversations, whose problems are a random part of the batch."""
        earlier = [line for line in read_lines(self._path) if line["step"] < step]
        try:
            line = summarize_check(self._ask(step, records), self._guards, first_gap(earlier)) | {"step": step}
        except ClassroomError as error:
            logger.warning("the judge was not checked at step %d: %s", step + 1, error)
            line = FAILED_CHECK | {"step": step, "error": str(error)}
        for warning in line["warnings"]:
            logger.warning("step %d: %s", step + 1, warning)
        try:
            write_whole(self._path, "".join(json.dumps(check, ensure_ascii=False) + "\n" for check in (*earlier, line)))
        except StorageError as error:
            logger.warning("the check of the judge at step %d is not on record: %s", step + 1, error)
        return metrics_of(line)

    def _ask(self, step: int, records: Sequence[ConversationRecord]) -> JudgeCheckResponse:
        judged = [record.id for record in records if record.reward is not None]
        if not judged:
            raise JudgeOutputError("No conversation of the batch has a verdict.")
        drawn = random.Random(f"{self._seed}|{step}").sample(judged, min(len(judged), self._guards.judge_check_sample))
        request = JudgeCheckRequest(
            request_id=f"{records[0].request_id}-judge-check",
            step=step,
            conversations=drawn,
            canaries=self._guards.canaries,
        )
        return self._client.check_judge(request, self._guards.judge_check_timeout_s)


def first_gap(checks: Sequence[Mapping[str, Any]]) -> float | None:
    """The gap of the first check that measured one; None if no check has."""
    return next((check["gap"]["mean"] for check in checks if check["gap"]["mean"] is not None), None)


def summarize_check(response: JudgeCheckResponse, guards: GuardsConfig, first: float | None) -> dict[str, Any]:
    """The line of a check in `judge_checks.jsonl`.

    Args:
        first: the gap at the beginning of the run; None if this check is the first.

    Returns:
        `gap`: the training judge's score minus the held-out judge's (mean, 95 % interval over problems, n
        conversations); `growth`: the gap minus `first`; `rank_correlation` of the two judges' scores; `canaries`: the
        score of each canary by the training's judge; `failed`: the number of judgements without a verdict; `warnings`:
        messages for the user.
    """
    pairs = [opinion for opinion in response.second_opinions if None not in (opinion.training, opinion.held_out)]
    by_problem: dict[str, list[float]] = {}
    for opinion in pairs:
        by_problem.setdefault(opinion.problem_id, []).append(opinion.training - opinion.held_out)
    gap = mean_with_ci(by_problem, (-1.0, 1.0))
    growth = None if gap["mean"] is None else gap["mean"] - (gap["mean"] if first is None else first)
    canaries = {result.canary: result.score for result in response.canaries}
    return {
        "gap": gap,
        "growth": growth,
        "training": fmean(opinion.training for opinion in pairs) if pairs else None,
        "held_out": fmean(opinion.held_out for opinion in pairs) if pairs else None,
        "rank_correlation": rank_correlation([(opinion.training, opinion.held_out) for opinion in pairs]),
        "canaries": canaries,
        "failed": len(response.second_opinions) - len(pairs) + sum(score is None for score in canaries.values()),
        "held_out_cost_usd": response.held_out.run_cost_usd if response.held_out is not None else None,
        "warnings": _gap_warnings(gap, growth, guards) + _canary_warnings(canaries, guards),
    }


def _gap_warnings(gap: Estimate, growth: float | None, guards: GuardsConfig) -> list[str]:
    if growth is None or growth <= guards.largest_gap_growth:
        return []
    return [
        f"The judge may be being fooled: it gives {gap['mean']:.3f} more than the held-out judge (mean of {gap['n']} "
        f"conversations), and {growth:.3f} of that has come since the run began (guards.largest_gap_growth is "
        f"{guards.largest_gap_growth:g})."
    ]


def _canary_warnings(canaries: Mapping[str, float | None], guards: GuardsConfig) -> list[str]:
    return [
        f"The judge can be fooled: it gives {score:.3f} to a planted conversation with a teacher that "
        f"{CANARIES[name].what} (guards.largest_canary_score is {guards.largest_canary_score:g})."
        for name, score in canaries.items()
        if score is not None and score > guards.largest_canary_score
    ]


def metrics_of(check: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a check; unknown values are left out."""
    metrics = {
        "guard/gap": check["gap"]["mean"],
        "guard/gap_growth": check["growth"],
        "guard/gap_n": check["gap"]["n"],
        "guard/held_out_reward": check["held_out"],
        "guard/rank_correlation": check["rank_correlation"],
        **{f"guard/canary_{name}": score for name, score in check["canaries"].items()},
        "guard/failed": check["failed"],
        "guard/held_out_cost_usd": check["held_out_cost_usd"],
        "guard/warnings": len(check["warnings"]),
    }
    return {name: float(value) for name, value in metrics.items() if value is not None}
