"""Writes `summary.json`: a complete run in one small file, for people and for tests."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Optional

from classroom_rl.errors import DataError
from classroom_rl.results.learning import learning_of
from classroom_rl.results.run_folder import STAGES, Measurement, RunData, load_run

MISMATCH = "sampling/sampling_logp_difference/mean"


def write_summary(run_folder: Path, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Write `summary.json` into the run folder and return what it holds.

    Args:
        seconds: wall-clock seconds by stage (`sft`, `server_start`, `rollout`, `publish`, `train`, `eval`) and
            `total`. Missing stages of the training loop are summed from metrics.jsonl, a missing `eval` from the
            evaluations; other missing stages are null. A missing `total` is the sum of the known stages.

    Raises:
        DataError: if an evaluation is missing or the run was not trained.
    """
    summary = build_summary(load_run(Path(run_folder)), seconds)
    text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    (Path(run_folder) / "summary.json").write_text(text, encoding="utf-8")
    return summary


def build_summary(data: RunData, seconds: Mapping[str, float]) -> dict[str, Any]:
    """The content of summary.json; arguments and errors as in `write_summary`."""
    missing = [f"eval/{name}" for name in ("before", "after") if name not in data.measurements]
    missing += [] if data.steps else ["metrics.jsonl"]
    if missing:
        raise DataError(f"{data.folder} has no {', '.join(missing)}: a summary tells of a run that was measured twice.")
    by_stage = _seconds_by_stage(data, seconds)
    rewards = data.series("reward")
    mismatch = [value for _, value in data.series(MISMATCH)]
    known = [value for value in by_stage.values() if value is not None]
    learning, _ = learning_of(data)
    return {
        "learning": {"verdict": learning.verdict, "reasons": list(learning.reasons)},
        "heldout": {name: _held_out(measured) for name, measured in data.measurements.items()},
        "training": {
            "steps": len(data.steps),
            "reward_first": rewards[0][1] if rewards else None,
            "reward_last": rewards[-1][1] if rewards else None,
            "seconds_total": seconds.get("total", round(sum(known), 3)),
            "seconds": by_stage,
        },
        "engine": data.measurements["after"].metrics["engine"],
        "mismatch": {"mean_abs_logprob_diff": fmean(mismatch) if mismatch else None},
    }


def _held_out(measured: Measurement) -> dict[str, Any]:
    """The part of metrics.json that the summary repeats. Figures about turns are null where no rule can read them."""
    names = ("reward", "error_turns", "clean_turns")
    return {sampling: {name: measured.metrics[sampling].get(name) for name in names} for sampling in measured.samplings}


def _seconds_by_stage(data: RunData, seconds: Mapping[str, float]) -> dict[str, Optional[float]]:
    in_evals = sum(measured.metrics.get("seconds", 0.0) for measured in data.measurements.values())
    known = {**data.step_seconds(), "eval": in_evals, **seconds}
    return {stage: None if known.get(stage) is None else round(known[stage], 3) for stage in STAGES}
