"""Reads a run folder for reports: the evaluations, the metrics of the training, and the configurations."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Optional

import yaml

from classroom_rl.config.values import SAMPLED, SAMPLINGS
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import DataError
from classroom_rl.results.evaluation_files import CONVERSATIONS_NAME, read_records
from classroom_rl.results.statistics import paired_change, rewards_by_lesson
from classroom_rl.rollout.intervals import Estimate

METRICS_NAME = "metrics.jsonl"
LEARNING_NAME = "learning.json"
JUDGE_CHECKS_NAME = "judge_checks.jsonl"
EVALUATIONS_NAME = "evaluations.jsonl"
"""The file with a line for each evaluation during the training (trainer/held_out_evaluation.py)."""
ENVIRONMENT_NAME = "train_rl.environment.json"

STAGES = ("sft", "server_start", "rollout", "publish", "train", "eval")
"""The stages into which the wall-clock time of a run is split, in the order in which they are shown."""

_STEP_STAGES = ("rollout", "publish", "train")


@dataclass(frozen=True)
class Measurement:
    """One evaluation: the content of its metrics.json, and its conversations by sampling."""

    metrics: dict[str, Any]
    records: dict[str, list[ConversationRecord]]

    @property
    def samplings(self) -> list[str]:
        """The kinds of sampling that were measured, in the order of metrics.json."""
        return [name for name in self.metrics if name in self.records]


@dataclass(frozen=True)
class RunData:
    """The content of a run folder. What the folder lacks is None or empty. `lines` are those of metrics.jsonl,
    `evaluations` those during the training."""

    folder: Path
    before: Optional[Measurement] = None
    after: Optional[Measurement] = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    judge_checks: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def measurements(self) -> dict[str, Measurement]:
        """The evaluations that exist, by name: "before", "after"."""
        measurements = {"before": self.before, "after": self.after}
        return {name: measurement for name, measurement in measurements.items() if measurement is not None}

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """One metrics line per optimizer step, in order; the last one if a step was logged twice."""
        by_step = {line["step"]: line for line in self.lines if "step" in line}
        return [by_step[step] for step in sorted(by_step)]

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) of a metric, for the steps that have a finite value."""
        points = [(line["step"], line.get(name)) for line in self.steps]
        return [(float(step), float(value)) for step, value in points if is_number(value)]

    def step_seconds(self) -> dict[str, float]:
        """Return the total seconds of rollout, publish and train over all steps."""
        return {stage: sum(value for _, value in self.series(f"seconds/{stage}")) for stage in _STEP_STAGES}

    def held_out_rewards(self) -> list[tuple[str, str, float, Estimate]]:
        """Return (sampling, when, step, reward) of each evaluation during the training; without any, of those before
        and after it. Evaluations without a reward are left out."""
        rewards = [
            (name, f"step {line['step']}", float(line["step"]), line[name]["reward"])
            for line in self.evaluations
            for name in SAMPLINGS
            if name in line
        ]
        steps = {"before": 0.0, "after": float(max((line["step"] for line in self.steps), default=1))}
        rewards = rewards or [
            (name, f"{when} training", steps[when], measurement.metrics[name]["reward"])
            for when, measurement in self.measurements.items()
            for name in measurement.samplings
        ]
        return [reward for reward in rewards if is_number(reward[3]["mean"])]

    def reward_changes(self) -> dict[str, Estimate]:
        """Return sampling → the change of the held-out reward, paired by lesson, for the samplings that were measured
        both before and after training, by `eval.py` or during the training. Where a program of the environment's own
        measured it, summary.json holds the change (`reward.change`) and the `version` of the measured policy. The last
        two count only if the last version was measured."""
        if self.before is None or self.after is None:
            last = self.steps[-1]["step"] if self.steps else None
            if last is not None and look_up(self.summary, "version") == last:
                return {SAMPLED: self.summary["reward"]["change"]}
            line = self.evaluations[-1] if self.evaluations else {}
            entries = {name: line[name] for name in SAMPLINGS if name in line and line["step"] == last}
            return {name: entry["change"] for name, entry in entries.items() if entry["since"] == 0}
        return {
            name: paired_change(rewards_by_lesson(records), rewards_by_lesson(self.after.records[name]))
            for name, records in self.before.records.items()
            if name in self.after.records
        }


def is_number(value: Any) -> bool:
    """Whether the value is a finite number; False for booleans."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def load_run(folder: Path) -> RunData:
    """Read everything in a run folder that reports show. Raises `DataError` if it holds neither an evaluation nor a
    step of training."""
    data = RunData(
        folder=folder,
        before=_load_measurement(folder / "eval" / "before"),
        after=_load_measurement(folder / "eval" / "after"),
        lines=read_lines(folder / "metrics.jsonl"),
        config=_read_yaml(folder / "config" / "train_rl.yaml") or _read_yaml(folder / "config" / "vllm_server.yaml"),
        environment=read_json(folder / "config" / ENVIRONMENT_NAME),
        summary=read_json(folder / "summary.json"),
        judge_checks=read_lines(folder / JUDGE_CHECKS_NAME),
        evaluations=read_lines(folder / EVALUATIONS_NAME),
    )
    if not data.lines and not data.measurements:
        raise DataError(
            f"{folder} holds nothing to report: no metrics.jsonl of a training, no eval/before or eval/after of "
            "eval.py. Give the run folder (logging.save_dir)."
        )
    return data


def _load_measurement(folder: Path) -> Optional[Measurement]:
    metrics = read_json(folder / "metrics.json")
    return Measurement(metrics, read_records(folder / CONVERSATIONS_NAME)) if metrics else None


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; {} if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _read_yaml(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {} if path.is_file() else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON Lines file. Lines that cannot be parsed (cut off by a kill) are left out."""
    if not path.is_file():
        return []
    parsed = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            parsed.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [line for line in parsed if isinstance(line, dict)]


def step_seconds(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the median seconds between the ends of successive steps. `lines` are those of at least two steps."""
    return median(after["time"] - before["time"] for before, after in pairwise(lines))


def last_figures(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the last number of each metric. It may be in an earlier line: steps that train on a batch again
    (`train.mu`) do not repeat the metrics of its conversations."""
    return {name: value for line in lines for name, value in line.items() if is_number(value)}


def has_score(check: Mapping[str, Any]) -> bool:
    """Whether a check of the judge gave at least one score; without one it cannot warn."""
    return check["gap"]["mean"] is not None or any(score is not None for score in check["canaries"].values())


def look_up(values: Mapping[str, Any], *path: str) -> Any:
    """Return the value at a path of keys; None if a key is missing."""
    value: Any = values
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
