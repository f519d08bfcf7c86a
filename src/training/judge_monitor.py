"""Is the judge being fooled? The trainer's part: now and then, a sample of the batch's conversations goes before the
held-out judge, and planted ones before the judge that is trained on. The rewards stay what they are.
"""

import json
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from config.train_rl_model import GuardsConfig, TrainRLConfig
from src.classroom.canaries import CANARIES
from src.classroom.record import ConversationRecord
from src.errors import ClassroomError, JudgeOutputError, StorageError
from src.results.agreement import rank_correlation
from src.results.run_folder import JUDGE_CHECKS_NAME, read_lines
from src.results.statistics import Estimate, mean_with_ci
from src.server.client import ClassroomClient
from src.server.schemas import JudgeCheckRequest, JudgeCheckResponse
from src.system.storage import write_whole
from src.training.collective import Processes, on_main_process
from src.training.verdict_watch import VerdictWatch

logger = logging.getLogger(__name__)


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
"""The line of a check that came to nothing."""


class JudgeMonitor:
    """Checks the judge every `guards.judge_check_every_n_steps` steps, beginning with the first batch, and warns. The
    verdicts of every batch are looked at besides: whether they depend on the conversation.

    Each check is a line of `judge_checks.jsonl` in the run folder; a step that a resumed run makes again replaces its
    line. A check that fails is logged and has its line, and stops nothing.
    """

    def __init__(self, config: TrainRLConfig, client: ClassroomClient, run_folder: Path):
        self._guards = config.guards
        self._judged = bool(config.generation.judge_rules)
        self._steps_in_batch = config.train.mu
        self._seed = config.seed
        self._client = client
        self._path = run_folder / JUDGE_CHECKS_NAME
        self._verdicts = VerdictWatch()

    def is_due(self, step: int) -> bool:
        """Whether the batch that is sampled at this step is checked."""
        every = self._guards.judge_check_every_n_steps
        return every > 0 and step % every < self._steps_in_batch

    def check(self, processes: Processes, step: int, records: Sequence[ConversationRecord]) -> dict[str, float]:
        """Look at the verdicts, and check the judge if it is due, on the main process with its conversations, and
        return the figures to log; all processes take part."""
        if not self._judged:
            return {}
        check = self._check if self.is_due(step) else lambda *_: {}
        return on_main_process(processes, lambda: self._look_at_verdicts(step, records) | check(step, records))

    def _look_at_verdicts(self, step: int, records: Sequence[ConversationRecord]) -> dict[str, float]:
        found = self._verdicts.update(records)
        if found is None:
            return {}
        warning = self._verdicts.new_warning(found)
        if warning is not None:
            logger.warning("step %d: %s", step, warning)
        figures = {"guard/blind_judge": float(found.warning is not None)}
        return figures if found.share is None else figures | {"guard/verdict_dependence": found.share}

    def _check(self, step: int, records: Sequence[ConversationRecord]) -> dict[str, float]:
        """On the main process, of its conversations: their problems are a random part of the batch."""
        earlier = [line for line in read_lines(self._path) if line["step"] < step]
        try:
            line = summarize_check(self._ask(step, records), self._guards, first_gap(earlier)) | {"step": step}
        except ClassroomError as error:
            logger.warning("the judge was not checked at step %d: %s", step, error)
            line = FAILED_CHECK | {"step": step, "error": str(error)}
        for warning in line["warnings"]:
            logger.warning("step %d: %s", step, warning)
        try:
            write_whole(self._path, "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in (*earlier, line)))
        except StorageError as error:
            logger.warning("the check of the judge at step %d is not on record: %s", step, error)
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
    """The gap that the run began with; None if none was measured yet."""
    return next((check["gap"]["mean"] for check in checks if check["gap"]["mean"] is not None), None)


def summarize_check(response: JudgeCheckResponse, guards: GuardsConfig, first: float | None) -> dict[str, Any]:
    """What a check says.

    Args:
        first: the gap that the run began with.

    Returns:
        `gap`: how much more the training's judge gives than the held-out one (mean, 95 % interval over problems, n
        conversations); `growth`: how much of it has come since the run began; `rank_correlation` of the two judges'
        scores; `canaries`: each one's score by the training's judge; `failed`: how many judgements brought no verdict;
        `warnings`, in words.
    """
    pairs = [each for each in response.second_opinions if None not in (each.training, each.held_out)]
    by_problem: dict[str, list[float]] = {}
    for each in pairs:
        by_problem.setdefault(each.problem_id, []).append(each.training - each.held_out)
    gap = mean_with_ci(by_problem)
    growth = None if gap["mean"] is None else gap["mean"] - (gap["mean"] if first is None else first)
    canaries = {each.canary: each.score for each in response.canaries}
    return {
        "gap": gap,
        "growth": growth,
        "training": fmean(each.training for each in pairs) if pairs else None,
        "held_out": fmean(each.held_out for each in pairs) if pairs else None,
        "rank_correlation": rank_correlation([(each.training, each.held_out) for each in pairs]),
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
    """A check as metrics of its step; what is not known is left out."""
    found = {
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
    return {name: float(value) for name, value in found.items() if value is not None}
