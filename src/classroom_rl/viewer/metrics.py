"""The metrics of a run for the page: training steps, evaluations, guards and configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from classroom_rl.results.run_folder import (
    EVALUATIONS_NAME,
    JUDGE_CHECKS_NAME,
    LEARNING_NAME,
    has_score,
    is_number,
    last_figures,
    look_up,
    read_json,
    read_lines,
)
from classroom_rl.results.step_time import time_of
from classroom_rl.rollout.extensions import view_of
from classroom_rl.viewer.list_index import ConversationSets
from classroom_rl.viewer.schemas import EvalMark, Guards, Metrics

MOST_POINTS = 400
_PREFIXES = (
    "rewards/",
    "judge/",
    "student/",
    "teacher/",
    "seconds/",
    "conversation/",
    "mismatch/",
    "guard/",
    "heldout/",
    "supervision/",
    "corrections/",
    "ppo/",
    "groups/",
    "curriculum/",
    "level/",
    "policy/",
    "tools/",
)
_RARE_PREFIXES = ("guard/", "corrections/pass_")
"""Metrics that only a few steps have: checks of the judge, and supervised passes."""

_NAMES = frozenset(
    "reward reward_std frac_reward_zero_std loss grad_norm learning_rate entropy step_time completions/mean_length "
    "sampling/sampling_logp_difference/mean".split()
)
_FACTS = (
    ("teacher", "teacher_model.model_name_or_path"),
    ("student", "student_model.model_name_or_path"),
    ("judge", "judge_model.model_name_or_path"),
    ("readers", "generation.readers_path"),
    ("problems per batch", "train.number_of_problems_per_batch"),
    ("conversations per problem", "train.num_samples_per_problem"),
    ("learning rate", "train.learning_rate"),
    ("seed", "seed"),
)


class RunMetrics:
    """Reads `metrics.jsonl`, `evaluations.jsonl`, the evaluations' `metrics.json`, the guards' files and the
    configuration of a run folder. `metrics.jsonl` is read again only when it has changed."""

    def __init__(self, run_folder: Path):
        self._folder = run_folder
        self._lines: tuple[str, list[dict[str, Any]]] = ("", [])

    def stamp(self) -> str:
        """Return a string that changes when a step is logged, the judge is checked, learning.json is written, or an
        evaluation writes its metrics."""
        names = ("metrics.jsonl", JUDGE_CHECKS_NAME, EVALUATIONS_NAME, LEARNING_NAME, "metrics.json")
        paths = [self._folder / name for name in names]
        return " ".join(map(_stamp, [*paths, *sorted((self._folder / "eval").glob("*/metrics.json"))]))

    def metrics(self, sets: ConversationSets) -> Metrics:
        """Return the metrics that the charts show."""
        lines = self._read_lines()
        shown = _thin(lines)
        names = dict.fromkeys(name for line in shown for name in line if _is_shown(name))
        config = self.config()
        steps = look_up(config, "train", "max_steps")
        shares, advice = time_of(lines, config, self._folder)
        evaluations = read_lines(self._folder / EVALUATIONS_NAME)
        marks = [
            mark
            for name, path in sets.evaluations.items()
            for mark in _eval_marks(name, read_json(path.with_name("metrics.json")))
        ]
        marks += [mark for line in evaluations for mark in _eval_marks(f"step {line['step']}", line, line["step"])]
        return Metrics(
            steps=[line["step"] for line in shown],
            series={name: [_to_float(line.get(name)) for line in shown] for name in names},
            last=last_figures(lines),
            marks=marks,
            collapse=evaluations[-1]["collapse"] if evaluations else [],
            max_steps=steps if is_number(steps) and steps > 0 else None,
            time_shares=shares,
            time_advice=advice,
        )

    def guards(self) -> Guards:
        """Return the content of `learning.json` and `judge_checks.jsonl`."""
        learning = read_json(self._folder / LEARNING_NAME)
        checks = read_lines(self._folder / JUDGE_CHECKS_NAME)
        return Guards(
            verdict=learning.get("verdict"),
            reasons=learning.get("reasons", []),
            steps=look_up(learning, "figures", "steps"),
            checks=sum(map(has_score, checks)),
            failed=sum(not has_score(check) for check in checks),
            warnings=[(check["step"], text) for check in reversed(checks) for text in check["warnings"]],
        )

    def is_supervised(self) -> bool:
        """Whether a supervisor is configured, or a step was logged with one."""
        configured = bool(self.config().get("supervisor_model"))
        return configured or any(name.startswith("supervision/") for line in self._read_lines() for name in line)

    def config(self) -> dict[str, Any]:
        """Return the recorded configuration: the trainer's, else the server's, else the evaluation's, else {}."""
        for name in ("train_rl", "vllm_server", "eval"):
            path = self._folder / "config" / f"{name}.yaml"
            if path.is_file():
                return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        return {}

    def facts(self) -> list[tuple[str, str]]:
        """Return the settings that the page shows, as (label, value)."""
        config = self.config()
        facts = [(label, look_up(config, *key.split("."))) for label, key in _FACTS]
        facts += view_of(config).facts(config).items()
        return [(label, str(value)) for label, value in facts if value is not None]

    def _read_lines(self) -> list[dict[str, Any]]:
        """Return one line per step, in order; the last one if a step was logged twice."""
        path = self._folder / "metrics.jsonl"
        stamp = _stamp(path)
        if stamp == self._lines[0]:
            return self._lines[1]
        by_step = {line["step"]: line for line in read_lines(path) if isinstance(line.get("step"), int)}
        self._lines = (stamp, [by_step[step] for step in sorted(by_step)])
        return self._lines[1]


def _thin(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most `MOST_POINTS` lines, evenly spaced from the first to the last. Lines with a rare metric would get
    lost, so at most as many lines with each kind of rare metric are added."""
    rare = [[line for line in lines if any(name.startswith(prefix) for name in line)] for prefix in _RARE_PREFIXES]
    by_step = {line["step"]: line for group in (lines, *rare) for line in _evenly_spaced(group)}
    return [by_step[step] for step in sorted(by_step)]


def _evenly_spaced(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count = min(len(lines), MOST_POINTS)
    return [lines[round(index * (len(lines) - 1) / max(1, count - 1))] for index in range(count)]


def _stamp(path: Path) -> str:
    if not path.is_file():
        return ""
    stat = path.stat()
    return f"{stat.st_mtime_ns}-{stat.st_size}"


def _is_shown(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)


def _to_float(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _eval_marks(name: str, evaluation: Mapping[str, Any], step: int | None = None) -> list[EvalMark]:
    marks = []
    for sampling, metrics in evaluation.items():
        mean, interval = look_up(metrics, "reward", "mean"), look_up(metrics, "reward", "ci95")
        if is_number(mean):
            low, high = interval if interval else (None, None)
            marks.append(EvalMark(name=name, sampling=sampling, mean=mean, low=low, high=high, step=step))
    return marks
