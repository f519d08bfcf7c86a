"""The metrics of a run for the page: the training's steps, the evaluations, the guards, and the configuration."""

import json
from pathlib import Path
from typing import Any

import yaml

from classroom_rl.results.run_folder import (
    JUDGE_CHECKS_NAME,
    LEARNING_NAME,
    error_share,
    has_score,
    is_number,
    last_figures,
    look_up,
    read_json,
    read_lines,
)
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
    "policy/",
    "tools/",
)
_RARE = ("guard/", "corrections/pass_")
"""Metrics of few steps: checks of the judge, and supervised passes."""

_NAMES = frozenset(
    "reward reward_std frac_reward_zero_std loss grad_norm learning_rate entropy step_time completions/mean_length "
    "sampling/sampling_logp_difference/mean".split()
)
MAROONED = "marooned"
"""The environment whose games a person can join."""
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
    """Reads `metrics.jsonl`, the evaluations' `metrics.json`, the guards' files and the configuration of a run folder.
    `metrics.jsonl` is read again only when it has changed."""

    def __init__(self, run_folder: Path):
        self._folder = run_folder
        self._lines: tuple[str, list[dict[str, Any]]] = ("", [])

    def stamp(self) -> str:
        """A string that changes when a step is logged, the judge is checked, learning.json is written, or an evaluation
        writes its metrics."""
        paths = [self._folder / name for name in ("metrics.jsonl", JUDGE_CHECKS_NAME, LEARNING_NAME, "metrics.json")]
        return " ".join(map(_stamp, [*paths, *sorted((self._folder / "eval").glob("*/metrics.json"))]))

    def metrics(self, sets: ConversationSets) -> Metrics:
        """The metrics that charts show."""
        lines = self._read_lines()
        thinned = _thinned(lines)
        names = dict.fromkeys(name for line in thinned for name in line if _is_shown(name))
        steps = look_up(self.config(), "train", "max_steps")
        return Metrics(
            steps=[line["step"] for line in thinned],
            series={name: [_figure(line.get(name)) for line in thinned] for name in names},
            last=last_figures(lines),
            marks=[mark for name, path in sets.evaluations.items() for mark in _marks(name, path)],
            max_steps=steps if is_number(steps) and steps > 0 else None,
        )

    def guards(self) -> Guards:
        """The content of `learning.json` and `judge_checks.jsonl`."""
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
        """The recorded configuration of the trainer, else of the server, else of the evaluation; {} without any."""
        for name in ("train_rl", "vllm_server", "eval"):
            path = self._folder / "config" / f"{name}.yaml"
            if path.is_file():
                return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        return {}

    def facts(self) -> list[tuple[str, str]]:
        """The settings that the page shows: (label, value)."""
        config = self.config()
        found = [(label, look_up(config, *key.split("."))) for label, key in _FACTS]
        longest = "own decisions at most" if config.get("environment") == MAROONED else "tutor closes from message"
        found.append((longest, look_up(config, "generation", "max_turns")))
        found.append(("error turns", error_share(config)))
        return [(label, str(value)) for label, value in found if value is not None]

    def _read_lines(self) -> list[dict[str, Any]]:
        """One line per step, in order; the last one if a step was logged twice."""
        path = self._folder / "metrics.jsonl"
        stamp = _stamp(path)
        if stamp == self._lines[0]:
            return self._lines[1]
        by_step = {line["step"]: line for line in read_lines(path) if isinstance(line.get("step"), int)}
        self._lines = (stamp, [by_step[step] for step in sorted(by_step)])
        return self._lines[1]


def _thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most `MOST_POINTS` lines, evenly spread from the first to the last, and at most as many of the lines with each
    kind of rare metric."""
    rare = [[line for line in lines if any(name.startswith(kind) for name in line)] for kind in _RARE]
    kept = {line["step"]: line for kind in (lines, *rare) for line in _spread(kind)}
    return [kept[step] for step in sorted(kept)]


def _spread(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count = min(len(lines), MOST_POINTS)
    return [lines[round(i * (len(lines) - 1) / max(1, count - 1))] for i in range(count)]


def _stamp(path: Path) -> str:
    if not path.is_file():
        return ""
    stat = path.stat()
    return f"{stat.st_mtime_ns}-{stat.st_size}"


def _is_shown(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)


def _figure(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _marks(name: str, conversations: Path) -> list[EvalMark]:
    path = conversations.with_name("metrics.json")
    if not path.is_file():
        return []
    found = []
    for sampling, measured in json.loads(path.read_text(encoding="utf-8")).items():
        mean, interval = look_up(measured, "reward", "mean"), look_up(measured, "reward", "ci95")
        if is_number(mean):
            low, high = interval if interval else (None, None)
            found.append(EvalMark(name=name, sampling=sampling, mean=mean, low=low, high=high))
    return found
